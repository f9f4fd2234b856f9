"""The status screen of a run for status.yml and the console: plain text made from results of run_state.

A figure that a rank does not publish (an older trainer, a host without sensors) is left out.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import run_report as text
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_summary as facts
from ansible_collections.nanofleet.fleet.trainer.formatting import duration

State = Mapping[str, Any]
RunStatus = Mapping[str, Any]

UNREACHED = re.compile(r"rank \d+ \(([^)\s]+)\):? (?:it )?cannot be reached", re.IGNORECASE)
"""Matches the message that a rank cannot be reached; the group is the host of the unreachable rank."""
STEP_PHASES = ("data", "forward", "backward", "sync", "optimizer")
SLOW_PHASE_SECONDS = 10.0
"""A rank that is in one of STEP_PHASES for longer than this, and than three steps, makes no progress."""
HEADER = ("host", "unit", "rank", "phase", "step", "loss", "sync", "temp", "updated")
FROZEN_SECONDS = 10.0
"""Seconds without a run status after which a rank is frozen. A thread of each rank publishes one a second."""
STALE_SECONDS = 60.0
RESTART_SECONDS = 180.0
"""Seconds after its boot within which a host restarts its run."""
SHOWN_ATTEMPTS = 5


def status_screen(states: Mapping[str, State], run_id: str = "", tracker_page: str = "") -> str:
    """The screen about one run, as status.yml shows it.

    states: host -> result of run_state, in rank order. run_id: the run that is shown: the requested one, else
    the active one, else the newest; "" if there is none. tracker_page: address of the MLflow page, "" for
    none.
    """
    reached = facts.answered(states)
    found = {host: state for host, state in reached.items() if state["found"]}
    lines = []
    if found:
        status = facts.rank_zero(found)
        step, last = status.get("step"), status.get("num_iterations")
        progress = (
            f": step {step:,} of {last:,} ({100 * step // last} %)" if last and step is not None else ""
        )
        lines = [f"Run {run_id}{progress}", ""]
    elif not without_directory(reached):
        if run_id:
            lines = [no_such_run(reached, run_id)]
        elif reached:
            lines = ["No run was started on these hosts. Start one: ansible-playbook train.yml -e depth=4"]
    return str(text.screen(lines + hosts_and_facts(states, run_id, tracker_page, errors=True)))


def hosts_and_facts(
    states: Mapping[str, State], run_id: str, tracker_page: str = "", errors: bool = False
) -> list[str]:
    """The status screen without its title: a row for each rank, diagnosis, speed, progress, outcome.

    states, run_id, tracker_page: as for `status_screen`. errors: whether the errors in the logs are included.
    """
    reached = facts.answered(states)
    missing = [host for host in states if host not in reached]
    found = {host: state for host, state in reached.items() if state["found"]}
    deleted = without_directory(reached)
    lines = []
    if found or missing or deleted:
        target = facts.transferred_to(found)
        rows = [
            row
            for host, state in states.items()
            for row in host_rows(host, state, run_id, target, host in deleted)
        ]
        lines += [*text.table(HEADER, rows), ""]
        lines += [f"Transferred: to {target} by sync=auto"] if target else []
    lines += [f"{host} did not answer. Is it on? Try: ansible {host} -m ping" for host in missing]
    lines += [
        f"Missing:     {reached[host]['run_dir']} on {host}, where the unit is "
        f"{text.unit_word(reached[host])}. Restore it: {facts.resume_command(run_id, reached)}"
        for host in deleted
    ]
    lines += [*reboots(found, run_id), *_starting(found), *_problems(found), *_figures(found, tracker_page)]
    outcomes = {(state["outcome"] or {}).get("outcome") for state in found.values()}
    over = found and all(state["ended"] and not state.get("rebooted") for state in found.values())
    if over and "finished" not in outcomes:
        lines.append(f"Resume:      {facts.resume_command(run_id, found)}")
    # Without the requested run, no command that ends another one is shown.
    lines += text.others_active(states, run_id) if found or not run_id else []
    shown = text.errors_of(found) if errors else []
    ending = text.ending({host: state for host, state in found.items() if state["ended"]})
    return [*lines, *shown, *([""] if shown and ending else []), *ending]


def without_directory(states: Mapping[str, State]) -> list[str]:
    """The hosts that belong to the run but do not have its directory.

    A host belongs to the run if the run is active on other hosts and their run file names it, or if its unit
    is active or failed. states: host -> result of run_state.
    """
    reached = facts.answered(states)
    active = [state for state in reached.values() if state["found"] and not state["ended"]]
    files = [state["run_file"] or {} for state in active]
    members = {host for file in files for name in ("hosts", facts.ADDED) for host in file.get(name) or []}
    return [
        host
        for host, state in reached.items()
        if not state["found"]
        and (host in members or not state["ended"] or state["unit"]["active_state"] == "failed")
    ]


def no_such_run(reached: Mapping[str, State], run_id: str) -> str:
    """The message that no host has a run of this name, with the most similar name and all known runs.

    reached: host -> result of run_state, of the hosts that answered.
    """
    runs = {run["run_id"]: run.get("active") for state in reached.values() for run in state["runs"]}
    near = difflib.get_close_matches(run_id, runs, n=1, cutoff=0.4)
    meant = f" Did you mean {near[0]}?" if near else ""
    known = ", ".join(f"{name} (active)" if active else name for name, active in runs.items())
    if not known:
        return (
            f"No host that answers has a run {run_id}, and no other run was started on these hosts. "
            "Fix: start one: ansible-playbook train.yml"
        )
    return (
        f"No host that answers has a run {run_id}.{meant} Known runs: {known}. "
        "Fix: repeat the command with one of them: -e run_id=NAME"
    )


def host_rows(
    host: str, state: State, run_id: str, target: str = "", is_deleted: bool = False
) -> list[list[str]]:
    """The rows of one host in the table of status.yml: one per rank, or one that shows why no rank is there.

    host: its name. state: the result of run_state there. run_id: name of the run. target: the host to which
    the run was transferred, or "". is_deleted: whether the directory of the run is missing.
    """
    blank = ["-"] * (len(HEADER) - 2)
    if facts.unreachable(state):
        return [[host, "unreachable", *blank]]
    unit = text.unit_word(state)
    if is_deleted:
        return [[host, unit, "-", "no directory", *blank[2:]]]
    if not state["found"]:
        return [[host, "not needed" if target else "no such run" if run_id else "-", *blank]]
    if state["heartbeats"]:
        return [[host, unit, *_cells(status, state)] for status in state["heartbeats"]]
    return [[host, unit, "-", _start_phase(state)[0] if is_starting(state) else "-", *blank[2:]]]


def _cells(status: RunStatus, state: State) -> list[str]:
    """The cells of a rank from the column `rank` on."""
    phase, loss = str(status.get("phase") or "-"), status.get("loss")
    if status.get("before"):
        phase, loss = _start_phase(state)[0], None
    elif is_running(status, state):
        seconds = slow_phase_seconds(status)
        phase += f" for {duration(seconds)}" if seconds is not None else ""
    elif not state["ended"]:
        restarts = (state["outcome"] or {}).get("outcome") in (None, "retryable")
        phase = "ended, restarting" if restarts else "ended"
    step, share, warm = status.get("step"), status.get("sync_share"), status.get("temperature")
    return [
        str(status.get("rank", "-")),
        phase,
        "-" if step is None else f"{step}/{status.get('num_iterations') or '?'}",
        "-" if loss is None else f"{loss:.4f}",
        "-" if share is None else f"{100 * share:.0f} %",
        ("-" if warm is None else f"{warm:.0f} °C") + (" throttled" if status.get("throttled") else ""),
        f"{duration(status.get('age'))} ago",
    ]


def is_running(status: RunStatus, state: State) -> bool:
    """Whether a run status belongs to the present attempt and its rank has not ended.

    status: the run status of a rank (see run_dir.heartbeats). state: the result of run_state on its host.
    """
    return not (status.get("before") or status.get("over") or facts.is_over(state))


def is_starting(state: State) -> bool:
    """Whether the unit is active and no rank of the present attempt has published its run status yet.

    state: the result of run_state.
    """
    active = not facts.is_over(state) and state["unit"]["active_state"] in ("activating", "active")
    return active and all(status.get("before") for status in state["heartbeats"])


def is_frozen(status: RunStatus, state: State) -> bool:
    """Whether a rank of the present attempt has published nothing for FROZEN_SECONDS.

    False for a rank that is done, whose unit is not running, or whose trainer publishes only at steps.
    status: the run status of the rank (see run_dir.heartbeats). state: the result of run_state on its host.
    """
    # Trainers that publish only at steps do not report when they entered a phase.
    publishes = status.get("entered") is not None and state["unit"].get("sub_state", "running") == "running"
    silent = publishes and status["age"] > FROZEN_SECONDS and status.get("phase") != "done"
    return silent and is_running(status, state)


def slow_phase_seconds(status: RunStatus) -> float | None:
    """The seconds that a rank has spent in its present phase of a step, if they exceed a limit; else None.

    The limit is SLOW_PHASE_SECONDS, or three steps if these take longer. status: the run status of the rank
    (see run_dir.heartbeats).
    """
    if None in (status.get("entered"), status.get("time")) or status.get("phase") not in STEP_PHASES:
        return None
    seconds = max(0.0, float(status["time"] - status["entered"])) + float(status["age"])
    return seconds if seconds > max(SLOW_PHASE_SECONDS, 3 * (status.get("step_seconds") or 0.0)) else None


def is_training(found: Mapping[str, State]) -> bool:
    """Whether all ranks of these hosts make progress; if not, their last speed is out of date.

    found: host -> result of run_state.
    """
    return all(
        state["heartbeats"]
        and all(
            is_running(status, state) and not is_frozen(status, state) and slow_phase_seconds(status) is None
            for status in state["heartbeats"]
        )
        for state in found.values()
    )


def rebooted(found: Mapping[str, State]) -> dict[str, float]:
    """{host: Unix time of its boot} of the hosts whose boot ended the unit of the run.

    The result is {} if the run was stopped or has ended for good. found: {host: result of run_state}.
    """
    if any((state["outcome"] or {}).get("settled") for state in found.values()):
        return {}
    return {host: state["rebooted"] for host, state in found.items() if state.get("rebooted")}


def returning(found: Mapping[str, State]) -> list[str]:
    """The hosts that rebooted during the run and now restart their ranks by themselves, without a command.

    found: host -> result of run_state.
    """
    return [
        host
        for host, moment in rebooted(found).items()
        if found[host].get("at_boot") and found[host]["time"] - moment < RESTART_SECONDS
    ]


def reboots(found: Mapping[str, State], run_id: str) -> list[str]:
    """A line for each host whose reboot ended the run's unit.

    The line has the command that restarts the run there, unless the host restarts it by itself. found:
    host -> result of run_state. run_id: name of the run.
    """
    automatic = returning(found)
    return [
        f"Rebooted:    {host} at {time.strftime('%a %H:%M:%S', time.localtime(moment))}, which ended the "
        "run's unit there. "
        + (
            "The host restarts it by itself."
            if host in automatic
            else f"Restart it: {facts.resume_command(run_id, found)}"
        )
        for host, moment in rebooted(found).items()
    ]


def _start_phase(state: State) -> tuple[str, float | None]:
    """(activity of a host before its ranks publish a run status, Unix time at which it began or None)."""
    since, began = state["unit"].get("since"), state.get("began")
    if began is not None and began >= (since or 0.0) - 1:
        return "importing torch", began
    return "joining", since


def _starting(found: Mapping[str, State]) -> list[str]:
    """A line for each host whose ranks are loading, which takes a minute or two on a cold disk."""
    lines = []
    for host, state in found.items():
        if is_starting(state):
            phase, since = _start_phase(state)
            doing = "torchrun loads and joins the other hosts"
            doing = doing if phase == "joining" else f"its ranks are {phase}"
            at = time.strftime(", since %H:%M:%S", time.localtime(since)) if since else ""
            lasts = f" ({duration(max(0.0, state['time'] - since))})" if since else ""
            lines.append(f"Starting:    {host}: {doing}{at}{lasts}")
    return lines


def _problems(found: Mapping[str, State]) -> list[str]:
    """Lines about frozen ranks, warnings of ranks, diagnoses of delays, and broken paths between hosts."""
    known = [(host, state, status) for host, state in found.items() for status in state["heartbeats"]]
    running = [(host, state, status) for host, state, status in known if is_running(status, state)]
    # The diagnosis of a frozen rank may be out of date.
    diagnoses = [
        (str(status["diagnosis"]), state["time"] - status["age"] - FROZEN_SECONDS)
        for _, state, status in running
        if status.get("diagnosis") and status["age"] <= FROZEN_SECONDS
    ]
    lines = [
        f"Frozen:      rank {status.get('rank')} on {host} has published no run status for "
        f"{duration(status['age'])}{_remedy(status, host, state)}"
        for host, state, status in known
        if is_frozen(status, state)
    ]
    lines += [
        f"Warning:     {host}: {status['warning']}" for host, _, status in running if status.get("warning")
    ]
    lines += [f"Diagnosis:   {line}" for line in dict.fromkeys(line for line, _ in diagnoses)]
    # The outcome of an ended run may be old and its cause fixed.
    outcomes = [state["outcome"] for state in found.values() if state["outcome"] and not state["ended"]]
    unreached_at: dict[str, float] = {}
    for line, at in [*diagnoses, *((str(one.get("reason")), one.get("time") or 0.0) for one in outcomes)]:
        for host in UNREACHED.findall(line):
            unreached_at[host] = max(at, unreached_at.get(host, at))
    return lines + [
        f"Network:     {host} answers the controller, but not the other hosts of the run: a firewall or the "
        "network between them drops packets. To find the cause and its fix: ansible-playbook doctor.yml"
        for host, state in found.items()
        if host in unreached_at and state["time"] > unreached_at[host] and not state.get("rebooted")
    ]


def _remedy(status: RunStatus, host: str, state: State) -> str:
    """The end of the sentence about a frozen rank: the cause, and how the rank continues.

    The rank continues after a command that the text names, or by itself.
    """
    systemctl = "systemctl --user" if state["unit"].get("scope") == "user" else "sudo systemctl"
    command = f"{systemctl} kill -s CONT nanofleet-{state['run_id']}"
    process = status.get("process") or ""
    if process == "stopped":
        return f": it is stopped (SIGSTOP). Continue it, on {host}: {command}"
    if process == "tracing stop":
        return f": a debugger on {host} holds it. Continue it in the debugger."
    cause = " though its unit is active: its host swaps, sleeps, or its disk is slow or full. "
    action = (
        "No command is needed: " if process else f"If it was stopped (SIGSTOP), on {host}: {command}. Else "
    )
    if (status.get("world_size") or 1) < 2:
        return f"{cause}{action}it continues when its host recovers."
    return f"{cause}{action}the other ranks restart without it, and it restarts when its host recovers."


def _figures(found: Mapping[str, State], tracker_page: str = "") -> list[str]:
    """The lines below the table: speed, time left, evaluation, checkpoint, attempts, tracker."""
    lines = []
    if any(not state["ended"] for state in found.values()):
        status = facts.rank_zero(found)
        if is_training(found) and status.get("age", 0.0) <= STALE_SECONDS:
            lines += _speed(status)
        ages = [status["age"] for state in found.values() for status in state["heartbeats"]]
        if ages and min(ages) > STALE_SECONDS:
            lines.append(f"No rank has published its run status for {duration(min(ages))}.")
        if any(state["stop_requested"] for state in found.values()):
            lines.append("Stop:        requested; the run saves and ends after its current step")
        enabled = [host for host, state in found.items() if state.get("at_boot") and not state["ended"]]
        if enabled:
            lines.append(f"At boot:     the run restarts by itself on {', '.join(enabled)}")
    lines += text.evaluation_and_checkpoints(found) + _attempts(found)
    return lines + ([f"Tracker:     {tracker_page}"] if tracker_page and found else [])


def _speed(status: RunStatus) -> list[str]:
    """Lines about the present speed, the average speed and the time left. status: of rank 0."""
    now, average, left = (status.get(name) for name in ("tok_per_s", "tok_per_s_average", "eta_seconds"))
    lines = []
    if now is not None:
        mean = f", {average:,.0f} on average" if average is not None else ""
        lines.append(f"Speed:       {now:,.0f} tok/s{mean}")
    if left is not None:
        # The clock of the host, which also wrote the time of the run status.
        at = time.strftime("%a %H:%M", time.localtime(float(status.get("time") or time.time()) + left))
        lines.append(f"Time left:   {duration(left)}, until {at}")
    return lines


def _attempts(found: Mapping[str, State]) -> list[str]:
    """Lines about the attempts that have ended, from the first host in rank order that recorded any."""
    recorded: list[Mapping[str, Any]] = next(
        (state["past_attempts"] for state in found.values() if state["past_attempts"]), []
    )
    ended = [attempt for attempt in recorded if attempt.get("outcome")]
    if not ended or (len(ended) == 1 and ended[0]["outcome"] in ("finished", "stopped")):
        return []
    lines = [f"Attempts:    {len(ended)} ended{', the last ones' * (len(ended) > SHOWN_ATTEMPTS)}:"]
    for attempt in ended[-SHOWN_ATTEMPTS:]:
        moment = attempt.get("time")
        at = time.strftime("%a %H:%M:%S", time.localtime(moment)) if moment else "-"
        step = f" at step {attempt['step']}" if attempt.get("step") is not None else ""
        how = "transferred to one host" if attempt.get("transfer") else attempt["outcome"]
        lines.append(f"  {at}  {how}{step}: {attempt.get('reason') or '-'}")
    return lines
