"""What train.yml and stop.yml say about a run: plain text made from the module run_state's results.

The words that status.yml shares with them stand here too; its screen is launch_status.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

State = Mapping[str, Any]

NUMBERS = {"rank", "step", "loss", "sync", "temp", "last beat", "processes ended"}
"""Columns whose cells stand to the right."""
KILLED = "Killed (SIGKILL, or the kernel for want of memory)"
"""As log_lines has it, which runs on the hosts."""
GFLOPS_A_THREAD = 40
"""Of a whole training step on an ordinary core, from measured d8 steps; only for a first guess."""
USUAL_VOCABULARY = 32_768


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines under a header; numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if name in NUMBERS else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        )
        return "  ".join(cells).rstrip()

    return [line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)]


def screen(lines: Sequence[str]) -> str:
    """One text that YAML output shows as it is: no tabs, blanks at the end, emoji, control characters."""
    kept = ("".join(c for c in line.expandtabs() if c.isprintable() and c < "\ufe00") for line in lines)
    return "\n".join(line.rstrip() for line in kept).rstrip()


def unreachable(state: State | None) -> bool:
    """Whether the host did not answer when its state was asked for."""
    return not state or bool(state.get("unreachable")) or "unit" not in state


def answered(states: Mapping[str, State]) -> dict[str, State]:
    """The states of the hosts that did answer."""
    return {host: state for host, state in states.items() if not unreachable(state)}


def is_over(state: State) -> bool:
    """Whether the attempt is over, be it that the unit would try again."""
    return bool(state["ended"] or state.get("between"))


def rank_zero(states: Mapping[str, State]) -> Mapping[str, Any]:
    """Rank 0's heartbeat, else any, else an empty one."""
    beats = [beat for state in answered(states).values() for beat in state["heartbeats"]]
    return next((beat for beat in beats if beat.get("rank") == 0), beats[0] if beats else {})


def unit_word(state: State) -> str:
    """What the unit does, in a word or two."""
    unit = state["unit"]
    if state["failed_unit"]:
        result = unit.get("result")
        return "failed" if result in ("success", "", None) else f"failed ({result})"
    if state.get("rebooted"):
        return "rebooted"
    return "restarting" if state.get("between") else str(unit["active_state"])


def left_to(found: Mapping[str, State]) -> str:
    """The one host that sync=auto has left the run to, if it has."""
    files = [state["run_file"] or {} for state in found.values()]
    return next((str(file["hosts"][0]) for file in files if file.get("chosen_from")), "")


def launch_run_shown(states: Mapping[str, State], run_id: str = "") -> str:
    """The run to show when hosts name different ones: the asked one, an active one, else the newest."""
    named = [state for state in answered(states).values() if state["found"]]
    active = [state["run_id"] for state in named if state["active_units"]]
    runs = [run for state in named for run in state["runs"]]
    newest = max(runs, key=lambda run: run["time"], default={"run_id": ""})
    return run_id or str(active[0] if active else newest["run_id"])


def standing(found: Mapping[str, State]) -> list[str]:
    """What the run has come to: its last evaluation and its last checkpoint."""
    lines = []
    evaluation = next((state["evaluation"] for state in found.values() if state["evaluation"]), None)
    if evaluation:
        at = f"at step {evaluation.get('step')}"
        lines.append(f"Validation:  {evaluation['val_bpb']:.4f} bits per byte {at}")
    for host, state in found.items():
        if state["checkpoint"]:
            age = state["time"] - (state["checkpoint_time"] or state["time"])
            step = checkpoint_step(state)
            where = f"{state['run_dir']}/{state['checkpoint']} on {host}"
            lines.append(f"Checkpoint:  step {step:,}, {duration(age)} ago: {where}")
    return lines


def ending(found: Mapping[str, State]) -> list[str]:
    """How the run ended: once where all hosts agree or the end is good, else by host."""
    ended = {host: state["outcome"] for host, state in found.items() if state["outcome"]}
    said: dict[tuple[str, str], list[str]] = {}
    for host, outcome in ended.items():
        said.setdefault((outcome["outcome"], outcome.get("reason") or "-"), []).append(host)
    words = {word for word, _reason in said}
    if said and (len(said) == 1 or (len(words) == 1 and words <= {"finished", "stopped"})):
        said = {next(iter(said)): []}
    return [
        f"Outcome:     {word}{' on ' * bool(hosts)}{', '.join(hosts)}: {reason}"
        for (word, reason), hosts in said.items()
    ]


def _runs_up(states: Mapping[str, State]) -> dict[str, list[str]]:
    """The runs that are up, each with its hosts."""
    up: dict[str, list[str]] = {}
    for host, state in answered(states).items():
        for unit in state["active_units"]:
            up.setdefault(unit.removeprefix("nanofleet-").removesuffix(".service"), []).append(host)
    return up


def others_active(states: Mapping[str, State], run_id: str) -> list[str]:
    """A line for every other run that is up."""
    return [
        f"Also active: run {other} on {', '.join(hosts)}. End it: ansible-playbook stop.yml -e run_id={other}"
        for other, hosts in _runs_up(states).items()
        if other != run_id
    ]


def launch_errors(states: Mapping[str, State]) -> list[str]:
    """The first error's log lines of every host that has one, unless its outcome is all they say."""
    lines: list[str] = []
    for host, state in answered(states).items():
        outcome = state["outcome"] or {}
        end = f"[rank {outcome.get('rank')}] {outcome.get('outcome')}: {outcome.get('reason')}"
        if state["error"] and state["error"][0] == KILLED:
            # The attempts' own sentence says more: it comes with the outcome, or with the next attempt.
            told = str(outcome.get("reason") or "").startswith("Killed")
            lines += [] if told else ["", f"{host}: {KILLED}{_last_seen(state)}."]
        elif state["error"] and list(state["error"]) != [end]:
            lines += ["", f"{host}: {state['run_dir']}/train.log says"]
            lines += [f"  {line}" for line in state["error"]]
    return lines


def _last_seen(state: State) -> str:
    """Where the rank of a host was, if it is one."""
    beats = [beat for beat in state["heartbeats"] if not beat.get("before")]
    if len(beats) != 1 or not beats[0].get("phase"):
        return ""
    return f" in {beats[0]['phase']} after step {beats[0].get('step') or 0}"


def launch_unmet(states: Mapping[str, State]) -> bool:
    """Whether a start failed because the ranks did not find each other."""
    words = ("DistStoreError", "DistNetworkError", "RendezvousTimeoutError", "The ranks did not meet")
    return any(
        word in text
        for state in answered(states).values()
        for text in [*(state["error"] or []), str((state["outcome"] or {}).get("reason"))]
        for word in words
    )


def launch_failure(states: Mapping[str, State], run_id: str) -> str:
    """Why a start failed: every host's first error, then the cause in a sentence that names the host.

    The hosts come in the order in which their units ended: the first of them is where to look.
    """
    never = float("inf")
    ended = {host: (is_over(s) and s["unit"].get("since")) or never for host, s in answered(states).items()}
    reached = {host: states[host] for host in sorted(ended, key=lambda host: ended[host])}
    odd = [host for host in states if host not in reached]
    waiting = [host for host, state in reached.items() if not state["stepped"]]
    dead = [host for host in waiting if is_over(reached[host])]
    silent = [host for host in waiting if not is_over(reached[host])]
    phases = [str(beat.get("phase")) for host in silent for beat in reached[host]["heartbeats"]]
    last = f"in phase {', '.join(dict.fromkeys(phases))}" if phases else "no rank has said anything"
    stopped = any(state["stop_requested"] for state in reached.values())
    said = ["stop.yml has asked it to end"] if stopped else []
    said += [f"{', '.join(odd)} did not answer"] if odd else []
    said += [f"its unit ended on {', then on '.join(dead)} before the first step"] if dead else []
    said += [f"no step was made on {', '.join(silent)} ({last})"] if silent else []
    reasons = [
        f"  {host}: {state['outcome']['reason']}"
        for host, state in reached.items()
        if (state["outcome"] or {}).get("reason")
    ]
    head = f"The run {run_id} did not start: {'; '.join(said) or 'a unit could not be started'}."
    again = f"When that is mended: ansible-playbook train.yml -e run_id={run_id}"
    others = others_active(states, run_id)
    errors = launch_errors(reached)[1:]
    look = ["Why the hosts do not meet: ansible-playbook doctor.yml"] if launch_unmet(states) else []
    return screen([*errors, *([""] if errors else []), head, *reasons, *others, "", *look, again])


def launch_started(states: Mapping[str, State], run_id: str) -> str:
    """What train.yml says once every rank has made a step: what was predicted before, and how it goes."""
    beat = rank_zero(states)
    parts = [f"step {beat.get('step')} of {beat.get('num_iterations')}"]
    if beat.get("loss") is not None:
        parts.append(f"loss {beat['loss']:.4f}")
    if beat.get("tok_per_s") is not None:
        parts.append(f"{beat['tok_per_s']:,.0f} tok/s")
    if beat.get("eta_seconds"):
        parts.append(f"{duration(beat['eta_seconds'])} left")
    predicted = [state["prediction"] for state in answered(states).values() if state.get("prediction")]
    goes = f"The run {run_id} trains on {', '.join(states)}: {', '.join(parts)}."
    see = f"See it: ansible-playbook status.yml -e run_id={run_id}"
    end = f"End it: ansible-playbook stop.yml -e run_id={run_id}"
    return screen([*"".join(predicted[:1]).splitlines(), goes, see, end])


def launch_idle(states: Mapping[str, State], run_id: str) -> str:
    """That there is nothing to stop, and where."""
    reached = answered(states)
    if not reached:
        return "No host answered."
    runs = {run["run_id"]: run["active"] for state in reached.values() for run in state["runs"]}
    what = f"The run {run_id} is not running" if run_id in runs else f"There is no run {run_id}"
    others = [run for run, active in runs.items() if active]
    rest = f" Active: {', '.join(others)}." if others else ""
    return f"{what if run_id else 'Nothing runs'} on {', '.join(reached)}.{rest}"


def launch_several_up(states: Mapping[str, State]) -> str:
    """Which runs are up, where there are several: a stop without a name must not choose among them."""
    up = _runs_up(states)
    if len(up) < 2:
        return ""
    runs = "; ".join(f"{run} on {', '.join(hosts)}" for run, hosts in up.items())
    return (
        f"Several runs are up: {runs}. Nothing was changed. "
        f"Say which one ends: ansible-playbook stop.yml -e run_id={next(iter(up))}"
    )


def launch_can_save(states: Mapping[str, State]) -> bool:
    """Whether a run can be asked to save: its coordinator answers and has made a step in this attempt."""
    return any(
        ((state["run_file"] or {}).get("hosts") or [""])[0] == host
        and state["stepped"]
        and not is_over(state)
        for host, state in answered(states).items()
    )


def launch_stop_expected(states: Mapping[str, State], run_id: str) -> str:
    """What a stop that saves will take, said before it is asked for."""
    beat = rank_zero(states)
    lost = [host for host in states if host not in answered(states)]
    kept = max((checkpoint_step(state) for state in answered(states).values()), default=0)
    last = f"the last checkpoint is that of step {kept:,}" if kept else "none was saved yet"
    if not launch_can_save(states):
        return f"The run {run_id} makes no steps at present, so it ends without saving: {last}."
    took = f" ({duration(beat['step_seconds'])})" if beat.get("step_seconds") is not None else ""
    at = f" is at step {beat['step']} of {beat.get('num_iterations')} and" if beat.get("step") else ""
    said = f"The run {run_id}{at} ends after one more step{took} and one save."
    if lost:
        said += f" Without {', '.join(lost)}, which did not answer, that may fail: then {last}."
    return f"{said} Without saving, within 15 s: -e stop_now=true"


def launch_stopped(
    states: Mapping[str, State],
    run_id: str,
    ended: Mapping[str, Sequence[Any]],
    at_once: Mapping[str, str] | None = None,
) -> str:
    """The report of a stop. ended: host -> processes that systemctl had to end; at_once: host -> its run."""
    reached = answered(states)
    alone = left_to(reached)
    rows = []
    for host in states:
        state = reached.get(host)
        how = str((state["outcome"] or {}).get("outcome") or "no outcome") if state else "-"
        how = "not needed" if state and alone and not state["found"] else how
        unit = str(state["unit"]["active_state"]) if state else "unreachable"
        rows.append([host, unit, how, str(len(ended.get(host, []))) if state else "-"])
    lines = [f"Run {run_id}", "", *table(("host", "unit", "outcome", "processes ended"), rows), ""]
    found = {host: state for host, state in reached.items() if state["found"]}
    lines += standing(found) + ending(found)
    if len(reached) == len(states):
        lines.append("No process of the run and no listener on its port is left.")
    lines += [
        f"Also ended:  run {other} on {host}, at once; nothing was saved."
        for host, other in (at_once or {}).items()
        if other and other != run_id
    ]
    lines += others_active(states, run_id)
    if not any((state["outcome"] or {}).get("outcome") == "finished" for state in reached.values()):
        lines.append(f"Go on with it: ansible-playbook train.yml -e run_id={run_id}")
    return screen(lines)


def launch_begins(plan: Mapping[str, Any], states: Sequence[State]) -> str:
    """What is started, and from which step: said before it is. states: of every host in rank order."""
    alone = " alone (left to it by sync=auto)" * bool(plan["file"].get("chosen_from"))
    run = f"the run {plan['run_id']} on {', '.join(plan['file']['hosts'])}{alone}"
    if plan["action"] != "resume":
        return f"Starting {run}."
    step = checkpoint_step(states[0])
    if not step:
        return f"Starting {run} anew: no checkpoint was saved yet."
    age = states[0]["time"] - (states[0].get("checkpoint_time") or states[0]["time"])
    return f"Resuming {run} from its checkpoint of step {step:,}, {duration(age)} old."


def checkpoint_step(state: State) -> int:
    """The step of a host's last checkpoint; 0 if it has none."""
    return int((state.get("checkpoint") or "step_0").rsplit("_", 1)[1])


def launch_expected(plan: Mapping[str, Any], states: Sequence[State], threads: Sequence[int]) -> str:
    """How long the run may take, in a sentence: by an equal run's measured rate, else by a rough figure."""
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
        return "How long it takes is said once the steps and their size are derived on the hosts."
    if plan.get("step_seconds"):
        seconds, source = float(plan["step_seconds"]), "as its ranks have just predicted"
    elif alike:
        seconds = tokens / float(alike[0]["tok_per_s"])
        source = f"measured in {alike[0]['run_id']}"
    else:
        seconds = tokens * _flops_per_token(config) / (GFLOPS_A_THREAD * 1e9 * max(1, sum(threads)))
        source = "a rough figure until the first steps are measured"
    done = checkpoint_step(states[0]) if plan["action"] == "resume" else 0
    left = max(0, steps - done)
    return f"Expected: {duration(seconds)} a step, {duration(seconds * left)} for {left:,} steps ({source})."


def _flops_per_token(config: Mapping[str, Any]) -> float:
    """Six per weight and the attention over whole contexts; near enough for a guess."""
    width = -(-config["depth"] * config["aspect_ratio"] // config["head_dim"]) * config["head_dim"]
    weights = 12 * config["depth"] * width**2 + USUAL_VOCABULARY * width
    return 6 * weights + 12 * config["depth"] * width * config["sequence_len"]


def duration(seconds: float | None) -> str:
    """Seconds in words: 1.8 s, 2m34s, 3h05m, 2d04h."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.095:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
