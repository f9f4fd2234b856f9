"""The state of a run, combined from the reports of its hosts. It does no output."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import run_status as status
from ansible_collections.nanofleet.fleet.plugins.module_utils import typed_commands as commands

from fleet.text import Point, number
from trainer.health.status_record import RunStatusRecord

ENDED = ("finished", "stopped", "retryable", "final")


def is_report(result: object) -> bool:
    """Whether the result of a task is that of the module ``run_state``: a host's report on a run."""
    return isinstance(result, dict) and "found" in result and "heartbeats" in result


@dataclass
class Rank:
    """The phase and step of one rank; of a host that has reported none yet, only the host."""

    host: str
    rank: int | None = None
    phase: str = ""
    step: int | None = None


@dataclass
class Ending:
    """The end of the run on one host. ended: it is not active there; found: the host knows the run.

    outcome and reason: from outcome.json; errors: error lines of the log.
    """

    ended: bool = False
    found: bool = False
    outcome: str = ""
    reason: str = ""
    errors: list[str] = field(default_factory=list)


@dataclass
class RunView:
    """The state of a run from all reports so far. Losses are in nats, ``val_bpb`` in bits per byte.

    ``lost``: host that cannot be reached -> reason. ``states``: host -> its last report. ``losses``: step ->
    loss. ``options``: options that a typed command needs to reach the hosts, such as ``-i PATH ``.
    """

    options: str = ""
    run_id: str = ""
    plan: str = ""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    endings: dict[str, Ending] = field(default_factory=dict)
    coordinator: str = ""
    step: int | None = None
    num_iterations: int | None = None
    val_bpb: float | None = None
    tok_per_s: float | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    seconds: float | None = None
    sample: str = ""
    checkpoint: str = ""
    run_dir: str = ""
    lost: dict[str, str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name of the run on the screen."""
        return f"run {self.run_id}" if self.run_id else "the run"

    @property
    def curve(self) -> list[Point]:
        """The known losses as (step, loss), in the order of steps."""
        return sorted(self.losses.items())

    @property
    def first_loss(self) -> float | None:
        """The loss of the earliest step in `losses`; None without any."""
        return self.losses[min(self.losses)] if self.losses else None

    @property
    def loss(self) -> float | None:
        """The loss of the latest step in `losses`; None without any."""
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def found(self) -> bool:
        """Whether any host that has reported knows the run."""
        return any(ending.found for ending in self.endings.values())

    @property
    def trains(self) -> bool:
        """Whether the ranks of all reachable hosts are training: then speed and remaining time are valid."""
        found = {host: s for host, s in self.states.items() if s.get("found") and host not in self.lost}
        return bool(status.is_training(found))

    @property
    def rebooted(self) -> dict[str, float]:
        """The reachable hosts whose reboot has ended the run's unit there: host -> boot time (Unix).

        Empty if the run is settled.
        """
        found = {host: state for host, state in self.states.items() if state.get("found")}
        hosts: dict[str, float] = status.rebooted(found)
        return {host: moment for host, moment in hosts.items() if host not in self.lost}

    @property
    def returning(self) -> list[str]:
        """The hosts of `rebooted` that are about to start the run again by themselves."""
        hosts: list[str] = status.returning({host: self.states[host] for host in self.rebooted})
        return hosts

    @property
    def reboots(self) -> list[str]:
        """One line for each host of `rebooted`, with the command that starts the run's unit again."""
        lines: list[str] = status.reboots({host: self.states[host] for host in self.rebooted}, self.run_id)
        return [commands.typed(line, self.options) for line in lines]

    @property
    def screen(self) -> list[str]:
        """The lines of status.yml about the hosts and the run, without its title."""
        order = [rank.host for rank in self.ranks] + list(self.states)
        states = {
            host: {"unreachable": True} if host in self.lost else self.states[host]
            for host in [*order, *self.lost]
            if host in self.lost or host in self.states
        }
        lines: list[str] = status.hosts_and_facts(states, self.run_id)
        return [commands.typed(line, self.options) for line in lines]

    @property
    def ended(self) -> bool:
        """Whether the run has ended on every host that has reported and can still be reached."""
        heard = [ending for host, ending in self.endings.items() if host not in self.lost]
        return bool(heard) and all(ending.ended for ending in heard)

    @property
    def settled(self) -> bool:
        """Whether a host reports an outcome that no other attempt follows."""
        return any((state.get("outcome") or {}).get("settled") for state in self.states.values())

    @property
    def outcome(self) -> str:
        """The outcome of the run, that of the coordinator first; "" while it has not ended."""
        if not self.ended or not self.found:
            return ""
        return self._verdict()[1].outcome or "ended without an outcome"

    @property
    def reason(self) -> str:
        """The reason of the outcome, with the host that reported it unless the run has finished."""
        host, ending = self._verdict()
        return (
            f"{ending.reason} ({host})" if ending.reason and ending.outcome != "finished" else ending.reason
        )

    def fold(self, host: str, state: dict[str, Any]) -> None:
        """Update the state with the report of one host, the result of the module ``run_state``."""
        self.endings[host] = _ending(state)
        self.states[host] = state
        self.lost.pop(host, None)
        if not state.get("found"):
            return
        self.run_id = state.get("run_id") or self.run_id
        run_file = state.get("run_file") or {}
        hosts = run_file.get("hosts") or []
        self.plan = plan(run_file.get("config") or {}) or self.plan
        beats = [RunStatusRecord.load(beat) for beat in state.get("heartbeats") or []]
        own = [Rank(host, beat.rank, beat.phase, beat.step) for beat in beats]
        if not own:
            own = [Rank(host, hosts.index(host) if host in hosts else None)]
        self.ranks = [rank for rank in self.ranks if rank.host != host] + own
        self.ranks.sort(key=lambda one: (one.rank is None, one.rank or 0, one.host))
        if own[0].rank == 0:
            self._lead(host, state, beats[0] if beats else None)

    def history(self, lines: Iterable[str]) -> None:
        """Add the losses of metrics.jsonl, one JSON object per line."""
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # a line that is still being written
            if isinstance(entry, dict):
                self._saw(entry)

    def _lead(self, host: str, state: dict[str, Any], beat: RunStatusRecord | None) -> None:
        """Update the fields that come from the coordinator: step, losses, speed, checkpoint, sample."""
        self.coordinator = host
        self.run_dir = state.get("run_dir") or self.run_dir
        self.checkpoint = state.get("checkpoint") or self.checkpoint
        outcome = state.get("outcome") or {}
        known = beat.heartbeat() if beat else {}
        for entry in (known, state.get("metrics"), state.get("evaluation"), outcome):
            self._saw(entry or {})
        for key in ("step", "num_iterations", "tok_per_s", "step_seconds", "eta_seconds"):
            if (value := getattr(beat, key, None)) is not None:
                setattr(self, key, value)
        for key in ("step", "num_iterations", "seconds", "sample", "checkpoint"):
            if outcome.get(key) is not None:
                setattr(self, key, outcome[key])

    def _saw(self, entry: dict[str, Any]) -> None:
        if entry.get("step") is not None and entry.get("loss") is not None:
            self.losses[int(entry["step"])] = float(entry["loss"])
        if entry.get("val_bpb") is not None:
            self.val_bpb = float(entry["val_bpb"])

    def _verdict(self) -> tuple[str, Ending]:
        order = [self.coordinator, *sorted(self.endings)]
        known = [host for host in order if host in self.endings]
        reported = [host for host in known if self.endings[host].outcome]
        host = (reported or known or [""])[0]
        return host, self.endings.get(host, Ending())


def plan(config: dict[str, Any]) -> str:
    """The settings of a run in a few words: depth, tokens per step, row length; "" without a config."""
    if not config:
        return ""
    parts = [f"depth {config.get('depth')}"]
    if config.get("total_batch_size"):
        parts.append(f"{number(int(config['total_batch_size']))} tokens a step")
    if config.get("sequence_len"):
        parts.append(f"rows of {number(int(config['sequence_len']))}")
    return " · ".join(parts)


def _ending(state: dict[str, Any]) -> Ending:
    outcome = state.get("outcome") or {}
    return Ending(
        ended=bool(state.get("ended")),
        found=bool(state.get("found")),
        outcome=outcome.get("outcome") or "",
        reason=outcome.get("reason") or "",
        errors=[str(line) for line in state.get("error") or []],
    )
