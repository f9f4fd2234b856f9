"""Facts about a run from the states of all its hosts: its name, where it is active, which hosts are lost.

Pure functions of results of the module run_state, by host in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PREFIX = "nanofleet-"  # of the names of all units
State = Mapping[str, Any]
ADDED = "added_hosts"
"""Key of run.json on a host that was added to an active run: the added hosts, in the order of their ranks."""
NOT_MET = ("DistStoreError", "DistNetworkError", "RendezvousTimeoutError", "The ranks did not connect")


def summary(states: Mapping[str, State], run_id: str = "") -> dict[str, Any]:
    """The facts about a run that conditions of tasks use, as a dict.

    states: {host: result of run_state, or of a task that failed}. run_id: the requested run, "" for none.
    Keys of the result:
    run_id: name of the run. known: whether a host has the run. active: whether the run is active on a host.
    at_boot: whether a host restarts the run when the host boots. lost: hosts that did not answer.
    several: a message if several runs are active, else "". can_save: see `can_save`. not_met: see `not_met`.
    transfer: result of `transferred`. coordinator: the host of rank 0, which saves checkpoints.
    speaker: the host from whose log the steps are shown. saved_on: the first host in rank order with the
        newest checkpoint; "" if no host has one.
    """
    reached = answered(states)
    saved = [host for host, state in reached.items() if state.get("checkpoint")]
    return {
        "run_id": run_shown(states, run_id),
        "known": any(state["found"] for state in reached.values()),
        "active": any(not state["ended"] for state in reached.values()),
        "at_boot": any(state.get("at_boot") for state in reached.values()),
        "lost": [host for host in states if host not in reached],
        "several": several_active(states),
        "can_save": can_save(states),
        "not_met": not_met(states),
        "transfer": transferred(states),
        "coordinator": coordinator(states),
        "speaker": next((host for host, state in reached.items() if state["found"]), ""),
        "saved_on": max(saved, key=lambda host: checkpoint_step(reached[host]), default=""),
    }


def unreachable(state: State | None) -> bool:
    """Whether the state of a host could not be read: the host did not answer, or the task failed there.

    state: the result of run_state; None if there is no result, which counts as not read.
    """
    return not state or bool(state.get("unreachable")) or "unit" not in state


def answered(states: Mapping[str, State]) -> dict[str, State]:
    """The states of the hosts whose state could be read: {host: result of run_state}.

    states: {host: result of the task}. A host that was unreachable, or whose task failed, is left out.
    """
    return {host: state for host, state in states.items() if not unreachable(state)}


def is_over(state: State) -> bool:
    """Whether the attempt has ended on a host, also if its unit is about to start the next attempt.

    state: the result of run_state.
    """
    return bool(state["ended"] or state.get("between"))


def rank_zero(states: Mapping[str, State]) -> Mapping[str, Any]:
    """The newest run status of rank 0, else the newest run status of any rank, else {}.

    states: host -> result of run_state. Several hosts can have a run status of rank 0, if another coordinator
    was elected.
    """
    known = [status for state in answered(states).values() for status in state["heartbeats"]]
    newest_first = sorted(known, key=lambda status: -float(status.get("time") or 0.0))
    return min(newest_first, key=lambda status: status.get("rank") != 0, default={})


def coordinator(states: Mapping[str, State], hosts: Sequence[str] = ()) -> str:
    """The host of rank 0; "" if it is not known.

    It is the host with the newest run status of rank 0, because the hosts of an elastic run may have elected
    another coordinator. If no host has one, it is the first of `hosts`, else the first host of the run file.
    states: {host: result of run_state}. hosts: the hosts of the run in rank order; if it is empty, those of
    the run file. A run status from a host outside of this list is ignored, unless the list is empty.
    """
    found = answered(states)
    published = [
        (float(status.get("time") or 0.0), host)
        for host, state in found.items()
        for status in state.get("heartbeats", [])
        if status.get("rank") == 0
    ]
    files = [state["run_file"] for state in found.values() if state.get("run_file")]
    named = list(hosts) or (list(files[0].get("hosts") or []) if files else [])
    known = [each for each in published if not named or each[1] in named]
    return max(known)[1] if known else (named or [""])[0]


def is_elastic(file: Mapping[str, Any] | None) -> bool:
    """Whether a run is elastic: it continues without some of its hosts.

    file: content of its run.json; None for no run.
    """
    return str(((file or {}).get("config") or {}).get("elastic", "")).lower() == "true"


def added_hosts(states: Iterable[State]) -> list[str]:
    """The hosts that were added to an active run, in the order of their ranks.

    states: results of run_state. The run file of each added host also lists the hosts that were added
    earlier.
    """
    known = [list((state.get("run_file") or {}).get(ADDED) or []) for state in states]
    return max(known, key=len, default=[])


def transferred_to(found: Mapping[str, State]) -> str:
    """The host to which sync=auto transferred the run; "" if it did not.

    found: {host: result of run_state}.
    """
    files = [state["run_file"] or {} for state in found.values()]
    return next((str(file["hosts"][0]) for file in files if file.get("chosen_from")), "")


def run_shown(states: Mapping[str, State], run_id: str = "") -> str:
    """The name of the run to show: `run_id`, else an active run, else the newest one.

    states: {host: result of run_state}. run_id: the requested run, "" for none.
    """
    named = [state for state in answered(states).values() if state["found"]]
    active = [state["run_id"] for state in named if state["active_units"]]
    runs = [run for state in named for run in state["runs"]]
    newest = max(runs, key=lambda run: run["time"], default={"run_id": ""})
    return run_id or str(active[0] if active else newest["run_id"])


def unit_of_run(run_id: str) -> str:
    """The name of the unit of a run: nanofleet-d4.service for d4."""
    return f"{PREFIX}{run_id}.service"


def run_of_unit(unit: str) -> str:
    """The name of the run of a unit: d4 for nanofleet-d4.service."""
    return unit.removeprefix(PREFIX).removesuffix(".service")


def checkpoint_step(state: State) -> int:
    """The step of the newest checkpoint on a host; 0 without one. state: the result of run_state there."""
    return int((state.get("checkpoint") or "step_0").rsplit("_", 1)[1])


def active_runs(states: Mapping[str, State]) -> dict[str, list[str]]:
    """{name of an active run: hosts on which it is active}. states: {host: result of run_state}."""
    active: dict[str, list[str]] = {}
    for host, state in answered(states).items():
        for unit in state["active_units"]:
            active.setdefault(run_of_unit(unit), []).append(host)
    return active


def new_hosts(states: Mapping[str, State]) -> dict[str, Any]:
    """The active elastic run, and the hosts that do not have this run, such as hosts that were just set up.

    states: {host: result of run_state}. Keys of the result:
    run_id: name of the run; "" unless exactly one run is active, it is elastic, sync=auto has not
        transferred it to one host, and its data are those of setup.yml: the conversations of a fine-tuning
        come with train.yml.
    hosts: the hosts that answered and do not have the run; [] if run_id is "". A host that has left the run
    still has it.
    """
    active, reached = active_runs(states), answered(states)
    run_id, on = next(iter(active.items()), ("", []))
    known = {host: {run["run_id"]: run for run in state["runs"]} for host, state in reached.items()}
    config = next((runs[run_id]["config"] for runs in known.values() if run_id in runs), None) or {}
    elastic = len(active) == 1 and is_elastic({"config": config})
    chosen = any((reached[host].get("run_file") or {}).get("chosen_from") for host in on)
    can_join = elastic and not chosen and config.get("stage") != "sft"
    hosts = [host for host, runs in known.items() if host not in on and run_id not in runs]
    return {"run_id": run_id, "hosts": hosts} if can_join else {"run_id": "", "hosts": []}


def several_active(states: Mapping[str, State]) -> str:
    """A message with all active runs if there are several, else "". states: {host: result of run_state}.

    stop.yml shows it if no run_id is given, instead of stopping one of these runs.
    """
    active = active_runs(states)
    if len(active) < 2:
        return ""
    runs = "; ".join(f"{run} on {', '.join(hosts)}" for run, hosts in active.items())
    return (
        f"The active runs are {runs}. No run was stopped. "
        f"Fix: name the run: ansible-playbook stop.yml -e run_id={next(iter(active))}"
    )


def can_save(states: Mapping[str, State]) -> bool:
    """Whether a run can save on request: its coordinator answers and has made a step in this attempt.

    states: {host: result of run_state}.
    """
    state = answered(states).get(coordinator(states))
    return bool(state and state["stepped"] and not is_over(state))


def not_met(states: Mapping[str, State]) -> bool:
    """Whether a log or an outcome shows that the ranks did not find each other at the rendezvous store.

    states: host -> result of run_state.
    """
    return any(
        error in text
        for state in answered(states).values()
        for text in [*(state["error"] or []), str((state["outcome"] or {}).get("reason"))]
        for error in NOT_MET
    )


def transferred(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The decision of the ranks to continue the run on one faster host; {} if there is no such decision.

    states: host -> result of run_state. The result has host, seconds (predicted step time on that host),
    together (predicted step time on all ranks) and table (the predictions).
    """
    for state in states.values():
        outcome = state.get("outcome") or {}
        transfer = outcome.get("transfer") or {}
        if outcome.get("outcome") == "final" and transfer.get("host") in states:
            return dict(transfer)
    return {}


def resume_command(run_id: str, states: Mapping[str, Any]) -> str:
    """The command that resumes a run. states: host -> result of run_state.

    A fine-tuning also needs its conversations, with the same content as before.
    """
    configs = [(state.get("run_file") or {}).get("config") for state in states.values()]
    tuned = (each for each in configs if isinstance(each, Mapping) and each.get("stage") == "sft")
    base = next((str(each.get("parent")).split("/")[0] for each in tuned), "")
    more = f" -e stage=sft -e from_run={base} -e conversations=FILE.jsonl" if base else ""
    return f"ansible-playbook train.yml -e run_id={run_id}{more}"
