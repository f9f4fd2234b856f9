"""Decisions of train.yml on the controller: configuration and name of a run, and whether it may start.

Pure functions of results of the module run_state in rank order, so that tests need no host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import holder
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_use import other_port
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import (
    ADDED,
    added_hosts,
    checkpoint_step,
    coordinator,
    is_elastic,
    resume_command,
    run_of_unit,
    unit_of_run,
)
from ansible_collections.nanofleet.fleet.trainer import config as trainer
from ansible_collections.nanofleet.fleet.trainer.code_digest import code_digest
from ansible_collections.nanofleet.fleet.trainer.optim import lr_schedule as schedule
from ansible_collections.nanofleet.fleet.trainer.stages import SFT

RESERVED = {"tracker", "serve", "none"}
"""Names that a run cannot have: nanofleet-tracker.service is the tracker's unit, for example."""
FAILOVER_SETTINGS = ("elastic", "coordinator_failover")
EVALUATION = "eval:"
"""Prefix of the name of an evaluation. A run cannot have such a name."""
State = Mapping[str, Any]
Ends = dict[str, list[str]]


class RunRefusedError(Exception):
    """Raised if the run must not start. The text of the error is the message of train.yml."""


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
    ranks_on: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The decision of train.yml about the requested run, as a dict.

    given: {setting: value} of the settings that were set. run_id: requested name, "" for the default. states:
    results of run_state of `hosts`, in rank order. manifest_sha256: of the data's manifest. shares: the
    requested batch split: auto, equal or the rows of each rank; "" for that of an earlier attempt.
    ranks_on: {host: number of ranks there}; None: one on each host. Keys of the result:
    run_id: name of the run. file: content of run.json; None if the run is refused.
    action: start, resume, join (hosts join an elastic run), none or refuse. message: about the action.
    ends: {host: units that cannot continue and are ended first}.
    saves: whether the run saves a checkpoint before its units are ended.
    joins: hosts that join an elastic run. Those that are not in its run file yet are in added_hosts of
    `file`.
    elastic: whether hosts may leave and join while the run trains.
    failover: whether the hosts of the run elect another coordinator if the coordinator is lost.
    """
    name = run_id
    try:
        name = run_name(given, run_id)
        if name in RESERVED or name.startswith(EVALUATION):
            raise RunRefusedError(
                f"run_id {name!r} is reserved by nanofleet. Choose another name: -e run_id=NAME."
            )
        for host, state in zip(hosts, states, strict=False):
            if state.get("run_id") == name and state.get("run_file"):
                trainer.check_schema(
                    state["run_file"].get("schema", 1), f"The file run.json of the run {name} on {host}"
                )
        stored = stored_run(name, states)
        before = stored or {}
        # An existing run keeps its own values for every setting that is not given.
        config = trainer.RunConfig.resumed(before.get("config") or {}, given)
        if config.stage == SFT and given.get("stage") != SFT:
            raise RunRefusedError(
                f"The run {name} fine-tunes {config.parent}. To resume it, repeat the command that started "
                f"it: {resume_command(name, dict(zip(hosts, states, strict=False)))}"
            )
        chosen_from, own = list(before.get("chosen_from") or []), list(before.get("hosts") or [])
        if not (chosen_from and set(own) <= set(hosts)):
            chosen_from, own = [], list(hosts)
        by_rank = before.get("hosts") == own or isinstance(before.get("shares"), str)
        rows = trainer.parse_shares(shares or (before.get("shares") if by_rank else "") or "")
        ranks_on = ranks_on or dict.fromkeys(hosts, 1)
        ranks = 1 if chosen_from else sum(ranks_on.get(host, 1) for host in own)
        step_rows = config.total_batch_size // config.sequence_len
        is_active = any(unit_of_run(name) in state.get("active_units", []) for state in states)
        if config.total_batch_size and step_rows < ranks and not is_active:
            raise RunRefusedError(
                f"total_batch_size {config.total_batch_size} is {step_rows} sequence(s) of "
                f"{config.sequence_len} tokens, too few for {ranks} ranks on {', '.join(own)}: use "
                f"-e total_batch_size={ranks * config.sequence_len} or more, or fewer hosts or ranks a host."
            )
        if rows and not isinstance(rows, str) and len(rows) != ranks:
            where, remedy = ", ".join(own), "-e shares=auto"
            if chosen_from:
                where, remedy = f"{where}, to which sync=auto has transferred the run", "-e shares=equal"
            raise RunRefusedError(
                f"shares is {','.join(map(str, rows))}: {len(rows)} number(s), but the run has {ranks} "
                f"rank(s) on {where}. Repeat the command with a number for each rank (its rows of a step), "
                f"or with {remedy}."
            )
        run_file = trainer.RunFile(
            name, config, tuple(own), code_digest(), manifest_sha256, rows, tuple(chosen_from)
        )
        fleet = dict(zip(hosts, states, strict=True))
        action, message, ends = _decide(run_file, stored, fleet, sum(ranks_on.values()))
        file, first = run_file.to_dict(), fleet[coordinator(fleet, run_file.hosts)]
        joins = _absent(before, fleet, unit_of_run(name)) if action == "join" else []
        if joins:  # the run file that its members have
            added = [*added_hosts(states), *(host for host in joins if host not in before["hosts"])]
            file = {**before, **({ADDED: list(dict.fromkeys(added))} if added else {})}
        saves = set(run_file.hosts) <= set(ends) and _trains(first)
    except (trainer.ConfigError, RunRefusedError) as error:
        file, action, message, ends, saves, joins = None, "refuse", str(error), {}, False, []
    plan = {"run_id": name, "file": file, "action": action, "message": message, "ends": ends}
    failover = has_failover(file)
    return {**plan, "saves": saves, "joins": joins, "elastic": is_elastic(file), "failover": failover}


def has_failover(file: Mapping[str, Any] | None) -> bool:
    """Whether the hosts of a run elect another coordinator when the coordinator is lost.

    file: content of its run.json; None for no run.
    """
    if not file:
        return False
    # Only these: a newer release may have written the file, with values that this one refuses.
    needed = {name: value for name, value in file["config"].items() if name in FAILOVER_SETTINGS}
    config = trainer.RunConfig.load(needed)[0]
    return bool(config.has_failover(len(file["hosts"])))


def _absent(stored: Mapping[str, Any], fleet: Mapping[str, State], unit: str) -> list[str]:
    """The hosts of `fleet` on which the run's `unit` is not active, those of the run file `stored` first."""
    hosts = [*(host for host in stored.get("hosts", []) if host in fleet), *fleet]
    return [host for host in dict.fromkeys(hosts) if unit not in fleet[host].get("active_units", [])]


def _decide(
    run_file: Any, stored: State | None, fleet: Mapping[str, State], n_ranks: int
) -> tuple[str, str, Ends]:
    """(action, message, {host: units to end first}), see `plan_run`.

    run_file: the RunFile of this attempt. stored: the content of run.json of an earlier attempt, or None.
    fleet: {host: result of run_state} of every host, including those that sync=auto did not choose. n_ranks:
    number of ranks on all hosts of `fleet`. Raises RunRefusedError if the run must not start.
    """
    name, before, notes = run_file.run_id, run_file.config, []
    if stored:
        before, unknown = trainer.RunConfig.load(stored["config"])
        if unknown:
            notes = [trainer.note_of_dropped(unknown, stored["config"], f"The run {name}")]
        if differing := run_file.config.differences(before, trainer.IDENTITY):
            names = " and ".join(change.split()[0] for change in differing)
            raise RunRefusedError(
                f"The run {name} exists with another configuration: {'; '.join(differing)}. To resume it, "
                f"leave {names} out; for a new run choose another name: -e run_id=NAME."
            )
    unit = unit_of_run(name)
    active = [host for host, state in fleet.items() if unit in state.get("active_units", [])]
    ends: Ends = {}
    messages = []
    if active:
        # After a boot, a host that is no longer part of the run waits for the earlier hosts.
        members = [host for host in active if host in (stored or {}).get("hosts", active)] or active
        absent = [] if run_file.chosen_from else _absent(stored or {}, fleet, unit)  # one host is enough
        if before.is_elastic and absent and coordinator(fleet, run_file.hosts) in active:
            ranks = [*(stored or {}).get("hosts", []), *added_hosts(fleet.values())]
            removed = [host for host in ranks if host not in fleet]
            rows = before.total_batch_size // before.sequence_len or n_ranks
            if removed or rows < n_ranks:  # a rank has a row of each step
                return "none", _active_message(run_file, before, members, fleet, stored or {}), {}
            where = ", ".join(active)
            if _is_finishing([fleet[host] for host in active], [fleet[host] for host in absent]):
                return "none", f"The run {name} has made all its steps, and is about to end on {where}.", {}
            joining = f"The run {name} trains on {where}; {', '.join(absent)} will join it."
            return "join", " ".join([joining, *notes]), {}
        cause = _restart_cause(run_file, stored or {}, members, fleet)
        if not cause:
            return "none", _active_message(run_file, before, members, fleet, stored or {}), {}
        hosts = ", ".join(run_file.hosts)
        messages.append(f"{cause}: its units are ended, and it resumes on {hosts} from its last checkpoint.")
        ends = {host: [unit] for host in active}
    for host, left in _units_of_ended_runs(fleet, unit).items():
        ends[host] = ends.get(host, []) + left
        messages.append(
            f"{', '.join(left)} on {host} belongs to a run that has ended on other hosts: it is ended."
        )
    own = {host: fleet[host] for host in run_file.hosts}
    if problem := other_holder(own, unit, ends):
        raise RunRefusedError(problem)
    outcomes = [s["outcome"] for s in own.values() if s.get("outcome") and s.get("run_id") == name]
    outcome = max(outcomes, key=lambda end: float(end.get("time") or 0.0), default=None)
    steps_before = before.num_iterations or int((outcome or {}).get("num_iterations") or 0)
    steps = run_file.config.num_iterations
    if 0 < steps < steps_before:  # its learning rates follow the longer length
        raise RunRefusedError(
            f"The run {name} has {steps_before} steps. The command asks for {steps} steps, but a run can "
            "become longer, not shorter. To resume it, leave steps out; for a new run choose another name: "
            "-e run_id=NAME."
        )
    length = run_file.config.differences(before, trainer.HORIZON)
    extended = bool(length) and steps != steps_before
    if stored and outcome and outcome.get("outcome") == "finished" and not active and not extended:
        return "none", _finished_message(name, outcome), {}
    if note := refuse_lost_checkpoint(name, own, run_file.config.checkpoint_copies):
        messages.append(note)
    messages += _changes(run_file.config, before, steps_before, own[coordinator(own, run_file.hosts)])
    return ("resume" if stored else "start"), " ".join(messages + notes), ends


def _is_finishing(active: Sequence[State], ended: Sequence[State]) -> bool:
    """Whether an active run has made all its steps, so that no host can join it.

    True if the outcome of a host in `ended` is finished, with the number of steps that the run has now.
    active: results of run_state on the hosts where the run's unit is active. ended: those on the other hosts.
    """
    lengths = [status.get("num_iterations") for state in active for status in state.get("heartbeats", [])]
    outcomes = [state.get("outcome") or {} for state in ended]
    return any(
        each.get("outcome") == "finished" and each.get("num_iterations") in lengths for each in outcomes
    )


def stored_run(run_id: str, states: Sequence[State]) -> Mapping[str, Any] | None:
    """The content of run.json of an earlier attempt, from the first host in rank order that has it.

    run_id: name of the run. states: results of run_state, in rank order. None if no host has it.
    """
    for state in states:
        if state.get("run_id") == run_id and isinstance((state.get("run_file") or {}).get("config"), Mapping):
            return state["run_file"]
    return None


def _changes(config: Any, before: Any, steps_before: int, state: State) -> Iterator[str]:
    """Sentences about the settings that a resumed run changes. state: of the coordinator."""
    length = config.differences(before, trainer.HORIZON)
    if length and steps_before and config.num_iterations:
        if config.num_iterations > steps_before:
            rates = (config.warmup_steps, config.warmdown_ratio, config.final_lr_frac)
            step = checkpoint_step(state)
            yield schedule.describe_extension(step, steps_before, config.num_iterations, *rates)
    elif length:
        yield f"Another length is requested ({'; '.join(length)}); the log shows the number of steps."
    if changed := config.differences(before, trainer.RUNTIME):
        yield f"Changed settings: {'; '.join(changed)}."


def _restart_cause(run_file: Any, stored: State, active: Sequence[str], states: Mapping[str, State]) -> str:
    """Why the active units are ended and the run is resumed, as a clause; "" if they are left unchanged.

    A run that trains is left unchanged. A run whose unit is missing on a host cannot train: the other hosts
    wait for that host. Raises RunRefusedError if the coordinator has lost the run directory.
    """
    run, before = f"The run {run_file.run_id}", list(stored.get("hosts") or run_file.hosts)
    missing = [host for host in before if host in states and host not in active]
    deleted = [host for host in active if not states[host]["found"]]
    if before[0] in deleted:
        raise RunRefusedError(
            f"The directory of the run {run_file.run_id} is missing on {before[0]}, its coordinator "
            f"({states[before[0]]['run_dir']}), with its checkpoints; nothing was changed. First end the "
            f"run: ansible-playbook stop.yml -e run_id={run_file.run_id} -e stop_now=true. Then restore the "
            "directory, if you have a copy (such as one from fetch.yml), and repeat the train command. "
            "Without a copy, the run resumes from a checkpoint that another host keeps (checkpoint_copies), "
            "or else starts at step 0."
        )
    if deleted:
        return (
            f"{run} is active on {', '.join(active)}, but its directory is missing on {', '.join(deleted)} "
            f"({states[deleted[0]]['run_dir']})"
        )
    if unable := [host for host in active if _cannot_start(states[host])]:
        return f"systemd cannot start the unit of the run {run_file.run_id} on {', '.join(unable)}"
    ending = any((states[host].get("outcome") or {}).get("settled") for host in missing)
    if ending and all(states[host].get("stepped") and not states[host].get("between") for host in active):
        return ""  # the other hosts are about to end as well
    if missing:
        return f"{run} waits on {', '.join(active)} for {', '.join(missing)}, where its unit is not active"
    if _is_changed(before, run_file, states) and not all(_trains(states[host]) for host in active):
        return f"{run} makes no steps on {', '.join(before)}"
    return ""


def _is_changed(before: Sequence[str], run_file: Any, states: Mapping[str, State]) -> bool:
    """Whether the hosts of the run so far differ from those in `run_file`. before: the hosts at its start."""
    added = added_hosts(states.values())
    return list(before) != [host for host in run_file.hosts if host not in added or host in before]


def _cannot_start(state: State) -> bool:
    """Whether systemd failed to restart the unit.

    Then its result is `resources`, or its exit status is one of systemd's own (200 to 243).
    """
    unit = state["unit"]
    failed = unit.get("result") == "resources" or 200 <= unit.get("exit_status", 0) < 244
    return bool(state.get("between")) and failed


def _trains(state: State) -> bool:
    """Whether all ranks of a host have a recent run status without a diagnosis, and one has made a step."""
    known = state.get("heartbeats", [])
    slow = max([float(status.get("step_seconds") or 0) for status in known], default=0.0)
    limit = max(30.0, 5 * slow)
    recent = all(status.get("age", 0.0) < limit and not status.get("diagnosis") for status in known)
    return bool(known) and recent and bool(state.get("stepped")) and not state.get("between")


def _units_of_ended_runs(fleet: Mapping[str, State], unit: str) -> Ends:
    """{host: active units} of runs that have ended on the other hosts.

    Such a host was unreachable when its run was stopped or ended for good.
    """
    left: Ends = {}
    for host, state in fleet.items():
        others = [run for s in fleet.values() if s is not state for run in s.get("runs", [])]
        for other in state.get("active_units", []):
            same = [run for run in others if run["run_id"] == run_of_unit(other)]
            ended = any(run.get("settled") for run in same) and not any(run.get("active") for run in same)
            if other != unit and ended:
                left.setdefault(host, []).append(other)
    return left


def _active_message(
    run_file: Any, before: Any, active: Sequence[str], fleet: Mapping[str, State], stored: State
) -> str:
    """The message that the run is active and unchanged. before: its configuration; active: its hosts."""
    run_id = run_file.run_id
    known = [
        status
        for state in fleet.values()
        for status in state.get("heartbeats", [])
        if status.get("step") is not None
    ]
    at = f" at step {known[0]['step']} of {known[0].get('num_iterations')}" if known else ""
    other = " sync=auto transferred it to that host." * bool(run_file.chosen_from)
    if _is_changed(list(stored.get("hosts") or run_file.hosts), run_file, fleet):
        other = (
            f" The inventory now lists {', '.join(run_file.hosts)}: to continue on these, stop it, which "
            "saves, and start it again."
        )
    changed = run_file.config.differences(before, *trainer.MUTABLE)
    apply = f" To apply what has changed ({'; '.join(changed)}), stop it, which saves, and start it again."
    return (
        f"The run {run_id} is active{at} on {', '.join(active)}; nothing was changed.{other} "
        f"See it: ansible-playbook status.yml. End it: ansible-playbook stop.yml -e run_id={run_id}"
        + apply
        * bool(changed)
    )


def _finished_message(run_id: str, outcome: Mapping[str, Any]) -> str:
    loss = f", loss {outcome['loss']:.4f}" if isinstance(outcome.get("loss"), float) else ""
    return (
        f"The run {run_id} has finished: step {outcome.get('step')} of {outcome.get('num_iterations')}{loss}."
        f" Nothing was changed. To train it further: -e steps=N, more than {outcome.get('step')}. "
        "For a new run: -e run_id=NAME"
    )


def other_holder(own: Mapping[str, State], unit: str, ends: Ends) -> str:
    """Why the hosts cannot take a run, as a message; "" if they can.

    The reason is another run that is active on a host, or another process that uses the port of the
    rendezvous store. own: host -> result of run_state, the coordinator first. unit: the name of the run's
    unit. ends: {host: units that are ended before the run starts}.
    """
    for host, state in own.items():
        for other in state.get("active_units", []):
            if other in ends.get(host, []):
                continue
            other_id = run_of_unit(other)
            return (
                f"{host} is busy with another run, {other_id} (unit {other}). "
                f"See it: ansible-playbook status.yml. End it: ansible-playbook stop.yml -e run_id={other_id}"
            )
    # Only the coordinator opens the port of the rendezvous store.
    first = next(iter(own))
    for held in own[first].get("listeners", []):
        if held.get("unit") in (unit, *ends.get(first, [])):
            continue
        process, end = holder(held, held["port"])
        return (
            f"Port {held['port']} of {first}, which the rendezvous store of the run needs, is in use by "
            f"{process}. Fix: {end}  (on {first}); or {other_port('store')}"
        )
    return ""


def busy(state: State, host: str, run_id: str) -> str:
    """Why a host cannot take the run, as a message; "" if it can.

    state: the result of run_state on `host`. run_id: the name of the run.
    """
    unit = unit_of_run(run_id)
    return other_holder({host: state}, unit, {host: [unit]})


def refuse_lost_checkpoint(run_id: str, own: Mapping[str, State], copies: int = 1) -> str:
    """A sentence if the run resumes from the checkpoint of another host than the coordinator, else "".

    run_id: name of the run. own: {host: result of run_state}, the coordinator first. copies: the setting
    checkpoint_copies. Raises RunRefusedError if the coordinator has no checkpoint, another host has one, and
    `copies` is 1, so that no host sends a checkpoint.
    """
    first = next(iter(own))
    if copies > 1:
        there = {host: state for host, state in own.items() if state.get("run_id") == run_id}
        newest = max(there, key=lambda host: checkpoint_step(there[host]), default=first)
        step = checkpoint_step(own[newest])
        if step <= checkpoint_step(own[first]):
            return ""
        has = "has none" if not own[first].get("checkpoint") else "has an older one"
        return (
            f"The run {run_id} resumes from the checkpoint of step {step:,} on {newest}, which sends it to "
            f"{first}: {first} {has}."
        )
    if own[first].get("checkpoint"):
        return ""
    for host, state in own.items():
        if state.get("checkpoint") and state.get("run_id") == run_id:
            raise RunRefusedError(
                f"The run {run_id} has its checkpoints on {host}, its former coordinator; {first} has none."
                f" Repeat the command with -e checkpoint_copies=2, by which {host} sends them, or make "
                f"{host} the coordinator again."
            )
    return ""


def transfer_plan(plan: Mapping[str, Any], transfer: Mapping[str, Any]) -> dict[str, Any]:
    """The decision for a run that continues on one faster host, made from the decision for all hosts.

    plan: the result of `plan_run`. transfer: the result of run_summary.transferred. The result has the keys
    of `plan`, and step_seconds, the predicted seconds of a step on that host.
    """
    hosts, host, run_id = plan["file"]["hosts"], transfer["host"], plan["run_id"]
    free = ", ".join(each for each in hosts if each != host)
    moved = f"The run {run_id} is transferred to {host}{f'; {free} is free' * bool(free)}."
    return {
        **plan,
        "file": {**plan["file"], "hosts": [host], "chosen_from": hosts},
        "message": f"{transfer['table']}\n{moved}",
        "ends": {each: [unit_of_run(run_id)] for each in hosts},
        "step_seconds": transfer["seconds"],
    }
