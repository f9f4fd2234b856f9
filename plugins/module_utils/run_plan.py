"""Decisions of train.yml on the controller: configuration and name of a run, and whether it may start.

Pure functions of results of the module run_state in rank order, so that tests need no host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_refusals as refusals
from ansible_collections.nanofleet.fleet.trainer import config as trainer
from ansible_collections.nanofleet.fleet.trainer.optim import lr_schedule as schedule

RESERVED = {"tracker", "none"}
"""Names that a run cannot have: nanofleet-tracker.service is the tracker's unit."""
State = Mapping[str, Any]
Ends = dict[str, list[str]]


def run_name(given: Mapping[str, Any], run_id: str = "") -> str:
    """`run_id` if it is set, else the default name for the configuration. given: settings of the run.

    Raises AnsibleFilterError for settings that RunConfig refuses.
    """
    try:
        return run_id or str(trainer.RunConfig.from_strings(given).default_run_id())
    except trainer.ConfigError as error:
        raise AnsibleFilterError(str(error)) from None


def plan_run(
    given: Mapping[str, Any],
    run_id: str,
    states: Sequence[State],
    hosts: Sequence[str],
    manifest_sha256: str = "",
    shares: str = "",
    nproc_per_node: int = 1,
) -> dict[str, Any]:
    """The decision about the run that was asked for: start, resume, none or refuse.

    given: settings that were set; run_id: name that was asked for, "" for the default; states: results of
    run_state of `hosts`, in rank order; shares: auto, equal or rows by rank, "" for those of an earlier
    attempt. Returns {"run_id", "file" (content of run.json; None on refuse), "action", "message", "ends"
    (host -> units that cannot continue and are ended first), "saves" (whether the run is asked to save before
    that)}.
    """
    name = run_id
    try:
        name = run_name(given, run_id)
        if name in RESERVED:
            raise refusals.RefusedError(
                f"run_id {name!r} is taken by nanofleet itself: choose another, -e run_id=NAME."
            )
        for host, state in zip(hosts, states, strict=False):
            if state.get("run_id") == name and state.get("run_file"):
                trainer.check_schema(state["run_file"].get("schema", 1), f"The run {name} on {host}")
        stored = stored_run(name, states)
        before = stored or {}
        # An existing run keeps its own values for every setting that is not given anew.
        config = trainer.RunConfig.resumed(before.get("config") or {}, given)
        own, chosen_from = _own_hosts(before, hosts)
        by_rank = before.get("hosts") == own or isinstance(before.get("shares"), str)
        rows = trainer.parse_shares(shares or (before.get("shares") if by_rank else "") or "")
        ranks = 1 if chosen_from else len(own) * int(nproc_per_node)
        if rows and not isinstance(rows, str) and len(rows) != ranks:
            how = "sync=auto transferred the run to it" if chosen_from else "-e shares=auto finds them"
            raise refusals.RefusedError(
                f"shares is {','.join(map(str, rows))}: it must be {ranks} number(s), one for each rank on "
                f"{', '.join(own)}, that make up the rows of a step; {how}."
            )
        run_file = trainer.RunFile(
            name, config, tuple(own), trainer.code_digest(), manifest_sha256, rows, tuple(chosen_from)
        )
        fleet = dict(zip(hosts, states, strict=True))
        action, message, ends = _decide(run_file, stored, fleet)
        file, first = run_file.to_dict(), fleet[run_file.hosts[0]]
        saves = set(run_file.hosts) <= set(ends) and _trains(first)
    except (trainer.ConfigError, refusals.RefusedError) as error:
        file, action, message, ends, saves = None, "refuse", str(error), {}, False
    return {
        "run_id": name,
        "file": file,
        "action": action,
        "message": message,
        "ends": ends,
        "saves": saves,
    }


def _own_hosts(before: Mapping[str, Any], hosts: Sequence[str]) -> tuple[list[str], list[str]]:
    """(hosts of the run, hosts that sync=auto chose them from; [] without such a choice).

    before: the run file of an earlier attempt, or {}.
    """
    chosen_from, own = list(before.get("chosen_from") or []), list(before.get("hosts") or [])
    return (own, chosen_from) if chosen_from and set(own) <= set(hosts) else (list(hosts), [])


def _decide(run_file: Any, stored: State | None, fleet: Mapping[str, State]) -> tuple[str, str, Ends]:
    """(action, message, units to end first by host). Raises refusals.RefusedError.

    stored: the run file of an earlier attempt, or None. fleet: the state of every host, including those that
    sync=auto did not choose.
    """
    name = run_file.run_id
    before, dropped = _settings_before(run_file, stored)
    if stored:
        refusals.refuse_another_identity(run_file, before)
    unit = f"nanofleet-{name}.service"
    active = [host for host, state in fleet.items() if unit in state.get("active_units", [])]
    ends: Ends = {}
    message = ""
    if active:
        # A host that has left the run and boots again waits there for the hosts of before.
        members = [host for host in active if host in (stored or {}).get("hosts", active)] or active
        message = _says_taken_over(run_file, stored or {}, members, fleet)
        if not message:
            return (
                "none",
                _says_active(run_file, members, fleet, stored or {}) + _says_waits(run_file, before),
                {},
            )
        ends = {host: [unit] for host in active}
    for host, left in _left_by_ended_runs(fleet, unit).items():
        ends[host] = ends.get(host, []) + left
        message += (
            f" {', '.join(left)} on {host} is of a run that has ended elsewhere: it is ended there too."
        )
    own = {host: fleet[host] for host in run_file.hosts}
    refusals.refuse_other_holders(own, unit, ends)
    outcome = next((s["outcome"] for s in own.values() if s.get("outcome") and s.get("run_id") == name), None)
    steps_before = before.num_iterations or int((outcome or {}).get("num_iterations") or 0)
    refusals.refuse_shorter(run_file, steps_before)
    extended = bool(_horizon(run_file.config, before)) and run_file.config.num_iterations != steps_before
    if stored and outcome and outcome.get("outcome") == "finished" and not active and not extended:
        return "none", _says_finished(name, outcome), {}
    refusals.refuse_lost_checkpoint(name, own)
    changes = [*_says_changed(run_file, before, steps_before, own[run_file.hosts[0]]), *dropped]
    return ("resume" if stored else "start"), " ".join([message, *changes]).strip(), ends


def stored_run(run_id: str, states: Sequence[State]) -> Mapping[str, Any] | None:
    """The run file of an earlier attempt, from the first host in rank order that has one."""
    for state in states:
        if state.get("run_id") == run_id and isinstance((state.get("run_file") or {}).get("config"), Mapping):
            return state["run_file"]
    return None


def _settings_before(run_file: Any, stored: State | None) -> tuple[Any, list[str]]:
    """(configuration of the earlier attempt, else the new one; notes on settings that no longer exist)."""
    if not stored:
        return run_file.config, []
    before, unknown = trainer.RunConfig.load(stored["config"])
    what = f"The run {run_file.run_id}"
    return before, [trainer.note_of_dropped(unknown, stored["config"], what)] if unknown else []


def _horizon(config: Any, before: Any) -> list[str]:
    """The settings of the run's length that differ from `before`, as texts."""
    return list(config.differences(before, trainer.HORIZON))


def _says_changed(run_file: Any, before: Any, steps_before: int, state: State) -> Iterator[str]:
    """Sentences about the settings that a resumed run changes. state: of the coordinator."""
    config = run_file.config
    if _horizon(config, before) and steps_before and config.num_iterations:
        if config.num_iterations > steps_before:
            step = int((state.get("checkpoint") or "step_0").rsplit("_", 1)[1])
            rates = (config.warmup_steps, config.warmdown_ratio, config.final_lr_frac)
            yield schedule.describe_extension(step, steps_before, config.num_iterations, *rates)
    elif _horizon(config, before):
        yield f"Another length is asked for ({'; '.join(_horizon(config, before))}): its log has the steps."
    changed = config.differences(before, trainer.RUNTIME)
    if changed:
        yield f"Other settings than before: {'; '.join(changed)}."


def _says_waits(run_file: Any, before: Any) -> str:
    """A sentence about changed settings that take effect when the active run is restarted; else empty."""
    changed = run_file.config.differences(before, *trainer.MUTABLE)
    if not changed:
        return ""
    return f" To apply what has changed ({'; '.join(changed)}), stop it, which saves, and start it again."


def _says_taken_over(run_file: Any, stored: State, active: Sequence[str], hosts: Mapping[str, State]) -> str:
    """Why the active units are ended and the run is resumed; "" if the active run is left alone.

    A run that trains is left alone. A run whose unit is missing on a host cannot train: the other hosts wait
    for that host. Raises RefusedError if the coordinator has lost the run directory.
    """
    before = list(stored.get("hosts") or run_file.hosts)
    missing = [host for host in before if host in hosts and host not in active]
    gone = [host for host in active if not hosts[host]["found"]]
    if before[0] in gone:
        raise refusals.RefusedError(
            f"The directory of the run {run_file.run_id} is gone on {before[0]}, its coordinator "
            f"({hosts[before[0]]['run_dir']}), and its checkpoints with it; nothing was changed. End it: "
            f"ansible-playbook stop.yml -e run_id={run_file.run_id} -e stop_now=true. Then restore the "
            "directory from a copy, such as one that fetch.yml made, and type this again; without a copy the "
            "run starts at step 0."
        )
    if gone:
        return (
            f"The run {run_file.run_id} is active on {', '.join(active)}, but its directory is gone on "
            f"{', '.join(gone)} ({hosts[gone[0]]['run_dir']}), where it could not start again: it is taken "
            "over, and resumed on all hosts from its last checkpoint."
        )
    unable = [host for host in active if _cannot_start(hosts[host])]
    if unable:
        return (
            f"The unit of the run {run_file.run_id} cannot start on {', '.join(unable)}: the run is taken "
            "over, and resumed on all hosts from its last checkpoint."
        )
    ending = any((hosts[host].get("outcome") or {}).get("settled") for host in missing)
    if ending and all(hosts[host].get("stepped") and not hosts[host].get("between") for host in active):
        return ""  # the others are about to end as well
    if missing:
        return (
            f"The run {run_file.run_id} waits on {', '.join(active)} for {', '.join(missing)}, where its "
            "unit is gone: it is taken over, and resumed on all hosts from its last checkpoint."
        )
    if before != list(run_file.hosts) and not all(_trains(hosts[host]) for host in active):
        return (
            f"The run {run_file.run_id} does not come further on {', '.join(before)}: it is taken over, and "
            f"resumed on {', '.join(run_file.hosts)} from its last checkpoint."
        )
    return ""


def _cannot_start(state: State) -> bool:
    """Whether systemd cannot start the unit again.

    Then its result is `resources`, or its exit status is one of systemd's own (200 to 243).
    """
    unit = state["unit"]
    waits = bool(state.get("between"))
    return waits and (unit.get("result") == "resources" or 200 <= unit.get("exit_status", 0) < 244)


def _trains(state: State) -> bool:
    """Whether the ranks of a host train.

    They made a step in this attempt, their heartbeats are recent, and none of them reports a delay.
    """
    beats = state.get("heartbeats", [])
    slow = max([float(beat.get("step_seconds") or 0) for beat in beats], default=0.0)
    fresh = all(beat.get("age", 0.0) < max(30.0, 5 * slow) and not beat.get("blame") for beat in beats)
    return bool(beats) and fresh and bool(state.get("stepped")) and not state.get("between")


def _left_by_ended_runs(fleet: Mapping[str, State], unit: str) -> Ends:
    """{host: active units} of runs that have ended on the other hosts.

    Such a host was unreachable when its run was stopped or ended for good.
    """
    left: Ends = {}
    for host, state in fleet.items():
        for other in state.get("active_units", []):
            run_id = other.removeprefix("nanofleet-").removesuffix(".service")
            elsewhere = [
                run
                for s in fleet.values()
                if s is not state
                for run in s.get("runs", [])
                if run["run_id"] == run_id
            ]
            ended = any(run.get("settled") for run in elsewhere)
            if other != unit and ended and not any(run.get("active") for run in elsewhere):
                left.setdefault(host, []).append(other)
    return left


def _says_active(run_file: Any, active: Sequence[str], fleet: Mapping[str, State], stored: State) -> str:
    run_id, hosts = run_file.run_id, run_file.hosts
    beats = [
        beat
        for state in fleet.values()
        for beat in state.get("heartbeats", [])
        if beat.get("step") is not None
    ]
    at = f" at step {beats[0]['step']} of {beats[0].get('num_iterations')}" if beats else ""
    before = list(stored.get("hosts") or hosts)
    other = (
        f" The inventory now lists {', '.join(hosts)}: to continue on these, stop it, which saves, and "
        "start it again."
        if before != list(hosts)
        else " sync=auto transferred it to that host." * bool(run_file.chosen_from)
    )
    return (
        f"The run {run_id} is active{at} on {', '.join(active)}; nothing was changed.{other} "
        f"See it: ansible-playbook status.yml. End it: ansible-playbook stop.yml -e run_id={run_id}"
    )


def _says_finished(run_id: str, outcome: Mapping[str, Any]) -> str:
    loss = outcome.get("loss")
    closing = f", loss {loss:.4f}" if isinstance(loss, float) else ""
    steps = f"step {outcome.get('step')} of {outcome.get('num_iterations')}"
    return (
        f"The run {run_id} has finished: {steps}{closing}."
        f" Nothing was changed. To train it further: -e steps=N, more than {outcome.get('step')}. "
        "For a new run: -e run_id=NAME"
    )


def trainer_digest() -> str:
    """The digest of this release's trainer, which hosts must have installed."""
    return str(trainer.code_digest())


def transfer_plan(plan: Mapping[str, Any], transfer: Mapping[str, Any]) -> dict[str, Any]:
    """`plan` for a run that is transferred to one host: run file, message, units to end, step_seconds.

    transfer: result of run_summary.transferred.
    """
    hosts, host, run_id = plan["file"]["hosts"], transfer["host"], plan["run_id"]
    free = ", ".join(each for each in hosts if each != host)
    goes = f"The run {run_id} is transferred to {host}{f'; {free} is free' * bool(free)}."
    return {
        **plan,
        "file": {**plan["file"], "hosts": [host], "chosen_from": hosts},
        "message": f"{transfer['said']}\n{goes}",
        "ends": {each: [f"nanofleet-{run_id}.service"] for each in hosts},
        "step_seconds": transfer["seconds"],
    }
