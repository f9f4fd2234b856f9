"""The messages of train.yml and stop.yml about a run: plain text made from results of the module run_state.

Parts that status.yml shares are here too; its screen is in run_status.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.log_lines import KILLED
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import (
    State,
    active_runs,
    answered,
    can_save,
    checkpoint_step,
    is_over,
    not_met,
    rank_zero,
    resume_command,
    transferred_to,
)
from ansible_collections.nanofleet.fleet.trainer.formatting import duration

NUMBERS = {"rank", "step", "loss", "sync", "temp", "updated", "processes ended"}
"""Names of the columns that are aligned to the right."""
GFLOPS_A_THREAD = 40
"""GFLOP/s per core in a whole training step, from measured steps of depth 8; for an estimate only."""
USUAL_VOCABULARY = 32_768
WHY_NOT_MET = "To find out why the hosts do not connect: ansible-playbook doctor.yml"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = NUMBERS
) -> list[str]:
    """The lines of a table: a header and rows in aligned columns.

    numbers: the names in the header whose columns are aligned to the right.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        )
        return "  ".join(cells).rstrip()

    return [line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)]


def screen(lines: Sequence[str]) -> str:
    """Lines as one text that Ansible's YAML output prints unchanged.

    The text has no tabs, trailing blanks, blank lines at its end, control characters or characters from
    U+FE00 on, such as most emoji.
    """
    kept = ("".join(c for c in line.expandtabs() if c.isprintable() and c < "\ufe00") for line in lines)
    return "\n".join(line.rstrip() for line in kept).rstrip()


def unit_word(state: State) -> str:
    """The state of a run's unit on a host in one or two words, such as active or failed (RESULT).

    state: the result of run_state.
    """
    unit = state["unit"]
    if state["failed_unit"]:
        result = unit.get("result")
        return "failed" if result in ("success", "", None) else f"failed ({result})"
    if state.get("rebooted"):
        return "rebooted"
    return "restarting" if state.get("between") else str(unit["active_state"])


def evaluation_and_checkpoints(found: Mapping[str, State]) -> list[str]:
    """Lines about the last evaluation and the last checkpoint of a run.

    found: host -> result of run_state, of the hosts that have the run.
    """
    lines = []
    evaluation = next((state["evaluation"] for state in found.values() if state["evaluation"]), None)
    if evaluation:
        at = f"at step {evaluation.get('step')}"
        lines.append(f"Validation:  {evaluation['val_bpb']:.4f} bits per byte {at}")
    newest = max(map(checkpoint_step, found.values()), default=0)
    copies = [h for h, state in found.items() if state["checkpoint"] and checkpoint_step(state) == newest]
    for host, state in found.items():
        if state["checkpoint"] and host not in copies[1:]:
            age = state["time"] - (state["checkpoint_time"] or state["time"])
            step = checkpoint_step(state)
            where = f"{state['run_dir']}/{state['checkpoint']} on {host}"
            if len(copies) > 1 and host == copies[0]:
                where += f", and on {', '.join(copies[1:])}"
            lines.append(f"Checkpoint:  step {step:,}, {duration(age)} ago: {where}")
    return lines


def ending(found: Mapping[str, State]) -> list[str]:
    """Lines about how a run has ended: one for each outcome and reason, with the hosts that report it.

    found: host -> result of run_state, of the hosts that have the run. One line without hosts if all hosts
    agree, or if all have finished or all were stopped.
    """
    ended = {host: state["outcome"] for host, state in found.items() if state["outcome"]}
    by_end: dict[tuple[str, str], list[str]] = {}
    for host, outcome in ended.items():
        by_end.setdefault((outcome["outcome"], outcome.get("reason") or "-"), []).append(host)
    kinds = {kind for kind, _reason in by_end}
    if by_end and (len(by_end) == 1 or (len(kinds) == 1 and kinds <= {"finished", "stopped"})):
        by_end = {next(iter(by_end)): []}
    return [
        f"Outcome:     {kind}{' on ' * bool(hosts)}{', '.join(hosts)}: {reason}"
        for (kind, reason), hosts in by_end.items()
    ]


def others_active(states: Mapping[str, State], run_id: str) -> list[str]:
    """A line for each active run other than `run_id`, with the command that ends it.

    states: host -> result of run_state.
    """
    return [
        f"Also active: run {other} on {', '.join(hosts)}. End it: ansible-playbook stop.yml -e run_id={other}"
        for other, hosts in active_runs(states).items()
        if other != run_id
    ]


def errors_of(states: Mapping[str, State]) -> list[str]:
    """The first error in the log of each host, as lines.

    An error is left out if the outcome that the host's rank has written has the same text. states: host ->
    result of run_state.
    """
    lines: list[str] = []
    for host, state in answered(states).items():
        outcome = state["outcome"] or {}
        end = f"[rank {outcome.get('rank')}] {outcome.get('outcome')}: {outcome.get('reason')}"
        if state["error"] and state["error"][0] == KILLED:
            # The reason of the outcome, once it is written, has more details.
            if not str(outcome.get("reason") or "").startswith("Killed"):
                lines += ["", f"{host}: {KILLED}{_last_phase(state)}."]
        elif state["error"] and list(state["error"]) != [end]:
            lines += ["", f"{host}: {state['run_dir']}/train.log reports"]
            lines += [f"  {line}" for line in state["error"]]
    return lines


def _last_phase(state: State) -> str:
    """Phase and last step of the host's rank, as text; empty if the host has several ranks or none."""
    known = [status for status in state["heartbeats"] if not status.get("before")]
    if len(known) != 1 or not known[0].get("phase"):
        return ""
    return f" in {known[0]['phase']} after step {known[0].get('step') or 0}"


def failure(states: Mapping[str, State], run_id: str, subcommand: str = "train") -> str:
    """The message for a run that did not start or finish: first errors, the cause with host names, a fix.

    states: host -> result of run_state. run_id: name of the run. subcommand: the subcommand of the trainer
    that the units run. Hosts come in the order in which their units ended: the first one is the most likely
    cause.
    """
    reached = answered(states)
    ended_at = {host: (is_over(s) and s["unit"].get("since")) or math.inf for host, s in reached.items()}
    reached = {host: reached[host] for host in sorted(ended_at, key=lambda host: ended_at[host])}
    lost = [host for host in states if host not in reached]
    waiting = [host for host, state in reached.items() if not state["stepped"]]
    ended = [host for host in waiting if is_over(reached[host])]
    slow = [host for host in waiting if host not in ended]
    late = [host for host, state in reached.items() if not (waiting or is_over(state))]
    phases = [str(status.get("phase")) for host in slow for status in reached[host]["heartbeats"]]
    last = f"in phase {', '.join(dict.fromkeys(phases))}" if phases else "no rank has reported its status"
    stopped = any(state["stop_requested"] for state in reached.values())
    causes = ["stop.yml has requested its end"] if stopped else []
    causes += [f"{', '.join(lost)} did not answer"] if lost else []
    causes += [f"its unit ended on {', then on '.join(ended)} before the first step"] if ended else []
    causes += [f"no step was made on {', '.join(slow)} ({last})"] if slow else []
    causes += [f"it has made steps and is still active on {', '.join(late)}"] if late else []
    outcomes = {host: state["outcome"] or {} for host, state in reached.items()}
    errors = errors_of(reached)[1:]
    repeat = f"then: {resume_command(run_id, states)}"
    return screen(
        [
            *errors,
            *([""] if errors else []),
            f"The cause: {'; '.join(causes) or 'its units ended after the first step'}.",
            *(f"  {host}: {one['reason']}" for host, one in outcomes.items() if one.get("reason")),
            *others_active(states, run_id),
            "",
            *([WHY_NOT_MET] if not_met(states) else []),
            f"Correct the cause, {repeat if subcommand == 'train' else 'then repeat the command'}",
        ]
    )


def evaluation_failure(states: Mapping[str, State]) -> str:
    """Why an evaluation has not finished: the outcomes of the hosts, and the first error of each log.

    A reason that several hosts report is shown once. states: host -> result of run_state in rank order.
    """
    reached = answered(states)
    lost = [f"{host} did not answer." for host in states if host not in reached]
    silent = [
        f"{host}: its unit ended without an outcome ({unit_word(state)})."
        for host, state in reached.items()
        if not state["outcome"] and not state["error"]
    ]
    ended = {host: state for host, state in reached.items() if state["outcome"]}
    unfinished = {host: s for host, s in ended.items() if s["outcome"]["outcome"] != "finished"}
    errors = errors_of({host: state for host, state in reached.items() if host not in ended})
    return screen([*lost, *silent, *ending(unfinished), *errors])


def started(states: Mapping[str, State], run_id: str) -> str:
    """The message of train.yml after every rank's first step: prediction, step, loss, speed, commands.

    states: {host: result of run_state}. run_id: name of the run.
    """
    status = rank_zero(states)
    progress = f"step {status.get('step')} of {status.get('num_iterations')}"
    progress += f", loss {status['loss']:.4f}" if status.get("loss") is not None else ""
    progress += f", {status['tok_per_s']:,.0f} tok/s" if status.get("tok_per_s") is not None else ""
    progress += f", {duration(status['eta_seconds'])} left" if status.get("eta_seconds") else ""
    predicted = [state["prediction"] for state in answered(states).values() if state.get("prediction")]
    return screen(
        [
            *"".join(predicted[:1]).splitlines(),
            f"The run {run_id} trains on {', '.join(states)}: {progress}.",
            f"See it: ansible-playbook status.yml -e run_id={run_id}",
            f"End it: ansible-playbook stop.yml -e run_id={run_id}",
        ]
    )


def idle(states: Mapping[str, State], run_id: str) -> str:
    """The message that a run is not active on the hosts that answered.

    states: host -> result of run_state. run_id: name of the run; "" for the message that no run is active.
    """
    reached = answered(states)
    if not reached:
        return "No host answered."
    runs = {run["run_id"]: run["active"] for state in reached.values() for run in state["runs"]}
    what = f"The run {run_id} is not running" if run_id in runs else f"There is no run {run_id}"
    others = [run for run, active in runs.items() if active]
    rest = f" Active: {', '.join(others)}." if others else ""
    return f"{what if run_id else 'Nothing runs'} on {', '.join(reached)}.{rest}"


def stop_expected(states: Mapping[str, State], run_id: str) -> str:
    """The message that is shown before a run is stopped: how long the stop takes, or that no run is active.

    states: {host: result of run_state}. run_id: name of the run.
    """
    reached = answered(states)
    if all(state["ended"] for state in reached.values()):
        return idle(states, run_id)
    status = rank_zero(states)
    lost = [host for host in states if host not in reached]
    saved = max((checkpoint_step(state) for state in reached.values()), default=0)
    last = f"the last checkpoint is that of step {saved:,}" if saved else "no checkpoint was saved yet"
    if not can_save(states):
        return f"The run {run_id} makes no steps at present, so it ends without saving: {last}."
    took = f" ({duration(status['step_seconds'])})" if status.get("step_seconds") is not None else ""
    at = f" is at step {status['step']} of {status.get('num_iterations')} and" if status.get("step") else ""
    line = f"The run {run_id}{at} ends after one more step{took} and one save."
    if lost:
        line += f" Without {', '.join(lost)}, which did not answer, that may fail: then {last}."
    return f"{line} Without saving, within 15 s: -e stop_now=true"


def stopped(
    states: Mapping[str, State],
    run_id: str,
    ended: Mapping[str, Sequence[Any]],
    at_once: Mapping[str, str] | None = None,
) -> str:
    """The report of stop.yml.

    states: {host: result of run_state}. run_id: name of the run. ended: {host: processes that were in the
    unit when it was stopped}. at_once: {host: name of a run that was ended there without saving}.
    """
    reached = answered(states)
    target = transferred_to(reached)
    rows = []
    for host in states:
        state = reached.get(host)
        how = str((state["outcome"] or {}).get("outcome") or "no outcome") if state else "-"
        how = "not needed" if state and target and not state["found"] else how
        unit = str(state["unit"]["active_state"]) if state else "unreachable"
        rows.append([host, unit, how, str(len(ended.get(host, []))) if state else "-"])
    lines = [f"Run {run_id}", "", *table(("host", "unit", "outcome", "processes ended"), rows), ""]
    found = {host: state for host, state in reached.items() if state["found"]}
    lines += evaluation_and_checkpoints(found) + ending(found)
    if len(reached) == len(states):
        lines.append("No process of the run and no listener on its port is left.")
    lines += [
        f"Also ended:  run {other} on {host}, at once; nothing was saved."
        for host, other in (at_once or {}).items()
        if other and other != run_id
    ]
    lines += others_active(states, run_id)
    if not any((state["outcome"] or {}).get("outcome") == "finished" for state in reached.values()):
        lines.append(f"Resume it: {resume_command(run_id, states)}")
    return screen(lines)


def begins(plan: Mapping[str, Any], states: Sequence[State]) -> str:
    """A sentence on the run that is about to start: its name, its hosts and its first step.

    If hosts join an active run, the sentence has only the name of the run and these hosts. plan: result of
    plan_run. states: results of run_state of all hosts, in rank order.
    """
    chosen = " only (chosen by sync=auto)" * bool(plan["file"].get("chosen_from"))
    run = f"the run {plan['run_id']} on {', '.join(plan['file']['hosts'])}{chosen}"
    if plan["action"] == "join":
        joining = ", ".join(plan["joins"])
        return f"Starting {joining} for the run {plan['run_id']}, which trains on the others."
    if plan["action"] != "resume":
        return f"Starting {run}."
    first = _resumed(plan, states)
    step = checkpoint_step(first)
    if not step:
        return f"Starting {run} from step 0: no checkpoint was saved yet."
    age = first["time"] - (first.get("checkpoint_time") or first["time"])
    return f"Resuming {run} from its checkpoint of step {step:,}, {duration(age)} old."


def _resumed(plan: Mapping[str, Any], states: Sequence[State]) -> State:
    """The state of the host from whose checkpoint the run resumes.

    It is the host with the newest checkpoint if checkpoint_copies is above 1, else the first host.
    """
    config = plan["file"]["config"]
    return max(states, key=checkpoint_step) if config.get("checkpoint_copies", 1) > 1 else states[0]


def expected(plan: Mapping[str, Any], states: Sequence[State], threads: Sequence[int]) -> str:
    """A sentence about the expected duration of the run.

    plan: result of plan_run. states: results of run_state of all hosts, in rank order. threads: CPU threads
    of each host, in rank order. The duration follows from the ranks' prediction, else from the measured rate
    of an equal run, else from a rough estimate.
    """
    config = plan["file"]["config"]
    tokens, steps = config["total_batch_size"], config["num_iterations"]
    shape = ("depth", "aspect_ratio", "sequence_len", "total_batch_size", "dtype", "sync")
    alike = [
        run
        for run in states[0].get("runs", [])
        if run.get("tok_per_s")
        and [(run.get("config") or {}).get(name) for name in shape] == [config[name] for name in shape]
        and len(run.get("hosts") or []) == len(plan["file"]["hosts"])
    ]
    if not tokens or not steps:
        return "The expected duration is shown once the hosts have derived the steps and their size."
    if plan.get("step_seconds"):
        seconds, source = float(plan["step_seconds"]), "as its ranks have just predicted"
    elif alike:
        seconds = tokens / float(alike[0]["tok_per_s"])
        source = f"measured in {alike[0]['run_id']}"
    else:
        seconds = tokens * _flops_per_token(config) / (GFLOPS_A_THREAD * 1e9 * max(1, sum(threads)))
        source = "a rough figure until the first steps are measured"
    done = checkpoint_step(_resumed(plan, states)) if plan["action"] == "resume" else 0
    left = max(0, steps - done)
    return f"Expected: {duration(seconds)} a step, {duration(seconds * left)} for {left:,} steps ({source})."


def _flops_per_token(config: Mapping[str, Any]) -> float:
    """FLOP per token: six per weight, and attention over full contexts. For an estimate only."""
    width = -(-config["depth"] * config["aspect_ratio"] // config["head_dim"]) * config["head_dim"]
    weights = 12 * config["depth"] * width**2 + USUAL_VOCABULARY * width
    return 6 * weights + 12 * config["depth"] * width * config["sequence_len"]
