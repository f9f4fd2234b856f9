"""The screen of status.yml and the console about one run: plain text made from results of run_state.

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

State = Mapping[str, Any]
Beat = Mapping[str, Any]

UNREACHED = re.compile(r"rank \d+ \(([^)\s]+)\):? (?:it )?cannot be reached", re.IGNORECASE)
"""Matches the message of a rank that cannot reach another one; the group is the host of that one."""
STEP_PHASES = ("data", "forward", "backward", "sync", "optimizer")
LINGER_SECONDS = 10.0
"""A rank that is in one of STEP_PHASES for longer than this, and than three steps, makes no progress."""
HEADER = ("host", "unit", "rank", "phase", "step", "loss", "sync", "temp", "last beat")
FROZEN_SECONDS = 10.0
"""A thread of each rank publishes its run status every second. A rank silent for longer does not run."""
USUAL_STALL_SECONDS = 60.0
LATE_STEPS = 5
"""Equal to the trainer's watchdog: a step is late after so many seconds, and so many usual steps."""
STALE_SECONDS = 60.0
RETURN_SECONDS = 180.0
"""Seconds after its boot within which a host starts its run again."""
SHOWN_ATTEMPTS = 5


def status_screen(states: Mapping[str, State], run_id: str = "", tracker_uri: str = "") -> str:
    """The screen of status.yml about one run. states: host -> result of run_state in rank order.

    run_id: the run that was asked for, "" for none. tracker_uri: address of the MLflow page, "" for none.
    """
    reached = facts.answered(states)
    found = {host: state for host, state in reached.items() if state["found"]}
    lines = []
    if not found and run_id and not lacking(reached):
        lines.append(no_such_run(reached, run_id))
    elif not found and reached and not lacking(reached):
        lines.append("Nothing ever ran here. Start a run: ansible-playbook train.yml -e depth=4")
    if found:
        lines += [_title(found, run_id), ""]
    lines += hosts_and_facts(states, run_id, tracker_uri, errors=True)
    return str(text.screen(lines))


def hosts_and_facts(
    states: Mapping[str, State], run_id: str, tracker_uri: str = "", errors: bool = False
) -> list[str]:
    """The screen without its title: a row for each rank, diagnosis, speed, progress, outcome.

    errors: whether the errors in the logs are included.
    """
    reached = facts.answered(states)
    missing = [host for host in states if host not in reached]
    found = {host: state for host, state in reached.items() if state["found"]}
    lines = []
    gone = lacking(reached)
    if found or missing or gone:
        alone = facts.transferred_to(found)
        rows = [
            row
            for host, state in states.items()
            for row in host_rows(host, state, run_id, alone, host in gone)
        ]
        lines += [*text.table(HEADER, rows), ""]
        lines += [f"Alone:       on {alone}: sync=auto transferred the run to this host"] if alone else []
    lines += [f"{host} did not answer. Is it on? Try: ansible {host} -m ping" for host in missing]
    lines += (
        _gone(reached, run_id)
        + reboots(found, run_id)
        + starting(found)
        + silences(found)
        + _about(found, tracker_uri)
    )
    lines += _again(found, run_id)
    # Without the run that was asked for, no command that ends another one is shown.
    lines += text.others_active(states, run_id) if found or not run_id else []
    shown = text.errors_of(found) if errors else []
    over = text.ending({host: state for host, state in found.items() if state["ended"]})
    return [*lines, *shown, *([""] if shown and over else []), *over]


def lacking(states: Mapping[str, State]) -> list[str]:
    """The hosts whose run directory is missing although the run is active on them or on other hosts."""
    reached = facts.answered(states)
    found = [state for state in reached.values() if state["found"] and not state["ended"]]
    named = {host for state in found for host in (state["run_file"] or {}).get("hosts") or []}
    return [
        host
        for host, state in reached.items()
        if not state["found"]
        and (host in named or not state["ended"] or state["unit"]["active_state"] == "failed")
    ]


def _gone(reached: Mapping[str, State], run_id: str) -> list[str]:
    """A line for each host whose run directory is missing, with the command that restores it."""
    return [
        f"Missing:     {reached[host]['run_dir']} on {host}, where the unit is "
        f"{text.unit_word(reached[host])}. Put it back: ansible-playbook train.yml -e run_id={run_id}"
        for host in lacking(reached)
    ]


def _again(found: Mapping[str, State], run_id: str) -> list[str]:
    """The command that resumes a run that ended before its last step; [] if there is no such run."""
    ends = {(state["outcome"] or {}).get("outcome") for state in found.values()}
    if not found or "finished" in ends or any(not s["ended"] or s.get("rebooted") for s in found.values()):
        return []
    return [f"Resume:      ansible-playbook train.yml -e run_id={run_id}"]


def no_such_run(reached: Mapping[str, State], run_id: str) -> str:
    """The message that no run has this name, with the most similar name and all known runs."""
    runs = {run["run_id"]: run.get("active") for state in reached.values() for run in state["runs"]}
    near = difflib.get_close_matches(run_id, runs, n=1, cutoff=0.4)
    meant = f" Did you mean {near[0]}?" if near else ""
    known = ", ".join(f"{name} (active)" if active else name for name, active in runs.items())
    return f"No run {run_id} here.{meant} Known runs: {known or 'none'}."


def _title(found: Mapping[str, State], run_id: str) -> str:
    """The name of the run and its progress."""
    beat = facts.rank_zero(found)
    step, last = beat.get("step"), beat.get("num_iterations")
    if step is None or not last:
        return f"Run {run_id}"
    return f"Run {run_id}: step {step:,} of {last:,} ({100 * step // last} %)"


def host_rows(host: str, state: State, run_id: str, alone: str = "", gone: bool = False) -> list[list[str]]:
    """The rows of one host: one per rank, or a single row that shows why there is none.

    alone: the host to which the run was transferred, or ""; gone: whether the run directory is missing.
    """
    blank = ["-"] * (len(HEADER) - 2)
    if facts.unreachable(state):
        return [[host, "unreachable", *blank]]
    if gone:
        return [[host, text.unit_word(state), "-", "no directory", *blank[2:]]]
    if not state["found"]:
        return [[host, "not needed" if alone else "no such run" if run_id else "-", *blank]]
    unit = text.unit_word(state)
    beats = [{**beat, **_instead(beat, state)} for beat in state["heartbeats"]]
    none = [host, unit, "-", starts(state)[0], *blank[2:]] if is_starting(state) else [host, unit, *blank]
    return [[host, unit, *_beat_cells(beat)] for beat in beats] or [none]


def _instead(beat: Beat, state: State) -> dict[str, Any]:
    """The fields that replace those of a heartbeat if its rank has ended or makes no progress."""
    if beat.get("before"):
        return {"phase": starts(state)[0], "loss": None}
    if state["ended"]:
        return {}
    if is_under_way(beat, state):
        seconds = lingers(beat)
        return {} if seconds is None else {"phase": f"{beat['phase']} for {text.duration(seconds)}"}
    again = (state["outcome"] or {}).get("outcome") in (None, "retryable")
    return {"phase": "ended, restarting" if again else "ended"}


def is_under_way(beat: Beat, state: State) -> bool:
    """Whether a heartbeat belongs to the present attempt and its rank has not ended."""
    return not (beat.get("before") or beat.get("over") or facts.is_over(state))


def is_starting(state: State) -> bool:
    """Whether the unit is active and no rank of the present attempt has published its run status yet."""
    up = not facts.is_over(state) and state["unit"]["active_state"] in ("activating", "active")
    return up and all(beat.get("before") for beat in state["heartbeats"])


def starts(state: State) -> tuple[str, float | None]:
    """(what a host does before the first heartbeat of its ranks, Unix time at which that began or None)."""
    since = state["unit"].get("since")
    began = state.get("began")
    if began is not None and began >= (since or 0.0) - 1:
        return "importing torch", began
    return "joining", since


def starting(found: Mapping[str, State]) -> list[str]:
    """A line for each host whose ranks are loading, which takes a minute or two on a cold disk."""
    lines = []
    for host, state in found.items():
        if is_starting(state):
            word, since = starts(state)
            what = (
                "torchrun loads and joins the other hosts" if word == "joining" else f"its ranks are {word}"
            )
            at = time.strftime(", since %H:%M:%S", time.localtime(since)) if since else ""
            lasts = f" ({text.duration(max(0.0, state['time'] - since))})" if since else ""
            lines.append(f"Starting:    {host}: {what}{at}{lasts}")
    return lines


def is_frozen(beat: Beat, state: State) -> bool:
    """Whether a rank of the present attempt has published nothing for FROZEN_SECONDS."""
    # Only a trainer whose heart beats on its own says when it entered its phase.
    beats = beat.get("entered") is not None and state["unit"].get("sub_state", "running") == "running"
    late = beats and beat["age"] > FROZEN_SECONDS and beat.get("phase") != "done"
    return late and is_under_way(beat, state)


def lingers(beat: Beat) -> float | None:
    """Seconds that a rank has spent in one phase of a step, if too long (LINGER_SECONDS); else None."""
    if beat.get("entered") is None or beat.get("time") is None or beat.get("phase") not in STEP_PHASES:
        return None
    seconds = max(0.0, beat["time"] - beat["entered"]) + beat["age"]
    return seconds if seconds > max(LINGER_SECONDS, 3 * (beat.get("step_seconds") or 0.0)) else None


def is_training(found: Mapping[str, State]) -> bool:
    """Whether all ranks of these hosts make progress. If not, their last speed is out of date."""
    return all(
        state["heartbeats"]
        and all(
            is_under_way(beat, state) and not is_frozen(beat, state) and lingers(beat) is None
            for beat in state["heartbeats"]
        )
        for state in found.values()
    )


def _beat_cells(beat: Beat) -> list[str]:
    step, share, warm = beat.get("step"), beat.get("sync_share"), beat.get("temperature")
    return [
        str(beat.get("rank", "-")),
        str(beat.get("phase") or "-"),
        "-" if step is None else f"{step}/{beat.get('num_iterations') or '?'}",
        "-" if beat.get("loss") is None else f"{beat['loss']:.4f}",
        "-" if share is None else f"{100 * share:.0f} %",
        ("-" if warm is None else f"{warm:.0f} °C") + (" throttled" if beat.get("throttled") else ""),
        f"{text.duration(beat.get('age'))} ago",
    ]


def rebooted(found: Mapping[str, State]) -> dict[str, float]:
    """{host: Unix time of its boot} of hosts whose boot ended the unit of a run that is still wanted."""
    if any((state["outcome"] or {}).get("settled") for state in found.values()):
        return {}
    return {host: state["rebooted"] for host, state in found.items() if state.get("rebooted")}


def returning(found: Mapping[str, State]) -> list[str]:
    """The hosts in `rebooted` that are starting the run again by themselves (within RETURN_SECONDS)."""
    return [
        host
        for host, moment in rebooted(found).items()
        if found[host].get("at_boot") and found[host]["time"] - moment < RETURN_SECONDS
    ]


def reboots(found: Mapping[str, State], run_id: str) -> list[str]:
    """A line for each host in `rebooted`, with the command that starts the run there again."""
    return [
        f"Rebooted:    {host} at {time.strftime('%a %H:%M:%S', time.localtime(moment))}, which ended the "
        + (
            "run's unit there. The host starts it again by itself."
            if host in returning(found)
            else f"run's unit there. Start it again: ansible-playbook train.yml -e run_id={run_id}"
        )
        for host, moment in rebooted(found).items()
    ]


def silences(found: Mapping[str, State]) -> list[str]:
    """Lines about frozen ranks, warnings of ranks, diagnoses of delays, and broken paths between hosts."""
    lines = []
    for host, state in found.items():
        for beat in state["heartbeats"]:
            if is_frozen(beat, state):
                silent = f"rank {beat.get('rank')} on {host} has not beaten for {text.duration(beat['age'])}"
                lines.append(f"Frozen:      {silent}{_remedy(beat, host, found)}")
    up = [beat for state in found.values() for beat in state["heartbeats"] if is_under_way(beat, state)]
    lines += [f"Warning:     {beat['warning']}" for beat in up if beat.get("warning")]
    # What a rank reported before it stood still may be long over.
    delays = [beat["blame"] for beat in up if beat.get("blame") and beat["age"] <= FROZEN_SECONDS]
    lines += [f"Blame:       {line}" for line in dict.fromkeys(map(str, delays))]
    return lines + _between(found)


def _between(found: Mapping[str, State]) -> list[str]:
    """Lines about hosts that the controller reaches and their peers do not: a path between them is broken."""
    unreached_at: dict[str, float] = {}
    for state in found.values():
        outcome = state["outcome"] or {}
        up = [beat for beat in state["heartbeats"] if is_under_way(beat, state)]
        reported = [
            (str(beat.get("blame")), state["time"] - beat["age"] - FROZEN_SECONDS)
            for beat in up
            if beat["age"] <= FROZEN_SECONDS
        ]
        # The outcome of an ended run may be old and its cause fixed.
        reported += [] if state["ended"] else [(str(outcome.get("reason")), outcome.get("time") or 0.0)]
        for line, at in reported:
            for host in UNREACHED.findall(line):
                unreached_at[host] = max(at, unreached_at.get(host, at))
    return [
        f"Between:     {host} answers this machine, and not its peers: a firewall or the "
        "network between them drops packets. Fix: ansible-playbook doctor.yml"
        for host, state in found.items()
        if host in unreached_at and state["time"] > unreached_at[host] and not state.get("rebooted")
    ]


def _remedy(beat: Beat, host: str, found: Mapping[str, State]) -> str:
    """Why a rank is frozen, and the command that continues it or that none is needed; ends a sentence."""
    unit = found[host]["unit"]
    systemctl = "systemctl --user" if unit.get("scope") == "user" else "sudo systemctl"
    command = f"{systemctl} kill -s CONT nanofleet-{found[host]['run_id']}"
    process = beat.get("process") or ""
    if process == "stopped":
        return f": it is stopped (SIGSTOP). Continue it, on {host}: {command}"
    if process == "tracing stop":
        return f": a debugger on {host} holds it. It continues once the debugger lets it."
    why = " though its unit is active: its host swaps, sleeps, or its disk is slow or full. "
    typed = "Nothing to type: " if process else f"If it was stopped (SIGSTOP), on {host}: {command}. Else "
    return f"{why}{typed}{_given_up(beat, host, found)}"


def _given_up(beat: Beat, host: str, found: Mapping[str, State]) -> str:
    """What a frozen rank and the other ranks will do without a command; ends a sentence."""
    itself = "it ends and starts again by itself, once its host lets it"
    if (beat.get("world_size") or 1) < 2:
        return "it continues by itself, once its host lets it."
    others = [state for other, state in found.items() if other != host]
    if any(not is_under_way(known, state) for state in others for known in state["heartbeats"]):
        return f"the others have given it up; {itself}."
    # Late after this long, and given up when it still is so another minute later; see the trainer's watchdog.
    stall = float(beat.get("stall_seconds") or USUAL_STALL_SECONDS)
    left = max(stall, LATE_STEPS * float(beat.get("step_seconds") or 0.0)) + stall - float(beat["age"])
    when = f"in about {text.duration(left)}" if left > 0 else "any moment now"
    return f"the others give it up {when} and start again; {itself}."


def _about(found: Mapping[str, State], tracker_uri: str = "") -> list[str]:
    """The lines below the table: speed, time left, evaluation, checkpoint, attempts, tracker."""
    lines = []
    if any(not state["ended"] for state in found.values()):
        beat = facts.rank_zero(found)
        lines += _pace(beat) if is_training(found) and beat.get("age", 0.0) <= STALE_SECONDS else []
        ages = [beat["age"] for state in found.values() for beat in state["heartbeats"]]
        if ages and min(ages) > STALE_SECONDS:
            lines.append(f"No rank has reported its status for {text.duration(min(ages))}.")
        if any(state["stop_requested"] for state in found.values()):
            lines.append("Stop:        asked for; the run saves and ends after its current step")
        returns = [host for host, state in found.items() if state.get("at_boot") and not state["ended"]]
        if returns:
            lines.append(f"At boot:     the run starts again by itself on {', '.join(returns)}")
    lines += text.standing(found) + _attempts(found)
    if tracker_uri and found:
        lines.append(f"Tracker:     {tracker_uri}")
    return lines


def _pace(beat: Beat) -> list[str]:
    """Lines about the present speed, the average speed and the time left. beat: heartbeat of rank 0."""
    now, average, left = (beat.get(name) for name in ("tok_per_s", "tok_per_s_average", "eta_seconds"))
    lines = []
    if now is not None:
        mean = f", {average:,.0f} on average" if average is not None else ""
        lines.append(f"Speed:       {now:,.0f} tok/s{mean}")
    if left is not None:
        # By the host's clock, which is the one the heartbeat was read at.
        at = time.strftime("%a %H:%M", time.localtime(float(beat.get("time") or time.time()) + left))
        lines.append(f"Time left:   {text.duration(left)}, until {at}")
    return lines


def _attempts(found: Mapping[str, State]) -> list[str]:
    """Lines about the attempts that have ended, from the first host in rank order that recorded any."""
    attempts: list[Mapping[str, Any]] = next(
        (s["past_attempts"] for s in found.values() if s["past_attempts"]), []
    )
    ended = [attempt for attempt in attempts if attempt.get("outcome")]
    if not ended or (len(ended) == 1 and ended[0]["outcome"] in ("finished", "stopped")):
        return []
    lines = [
        f"Attempts:    {len(ended)} ended" + (", the last ones:" if len(ended) > SHOWN_ATTEMPTS else ":")
    ]
    for attempt in ended[-SHOWN_ATTEMPTS:]:
        moment = attempt.get("time")
        at = time.strftime("%a %H:%M:%S", time.localtime(moment)) if moment else "-"
        step = f" at step {attempt['step']}" if attempt.get("step") is not None else ""
        how = "transferred to one host" if attempt.get("alone") else attempt["outcome"]
        lines.append(f"  {at}  {how}{step}: {attempt.get('reason') or '-'}")
    return lines
