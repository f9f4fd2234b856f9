"""The state of a run, combined from the reports of its hosts. It does no output."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import run_status as status
from ansible_collections.nanofleet.fleet.plugins.module_utils import typed_commands as commands

from fleet.text import Point, number
from trainer.health.status_record import RunStatusRecord


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
    coordinator: str = ""
    step: int | None = None
    num_iterations: int | None = None
    val_bpb: float | None = None
    tok_per_s: float | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
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
        """Whether any host knows a run."""
        return any(state.get("found") for state in self.states.values())

    @property
    def unknown(self) -> str:
        """The message that no host has the run, with the runs that there are."""
        asked = next((state["run_id"] for state in self.states.values() if state.get("run_id")), "")
        if asked:
            return str(status.no_such_run(self.states, asked))
        return "No host has a run. To start one, type: python -m fleet train -e depth=4"

    @property
    def trains(self) -> bool:
        """Whether the ranks of all hosts that answer are at work, so that their pace is true."""
        return bool(status.is_training(self._known))

    @property
    def returning(self) -> list[str]:
        """Rebooted hosts that start the run again by themselves, just now."""
        hosts: list[str] = status.returning(self._known)
        return hosts

    @property
    def reboots(self) -> list[str]:
        """A line for each host that came up again without the run's unit, with what starts it again."""
        lines: list[str] = status.reboots(self._known, self.run_id)
        return [commands.typed(line, self.options) for line in lines]

    @property
    def _known(self) -> dict[str, dict[str, Any]]:
        """The states of the hosts that answer and have a part of the run."""
        found = {host: state for host, state in self.states.items() if state.get("found")}
        return {host: state for host, state in found.items() if host not in self.lost}

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
        """Whether the run is over on every host that has reported and has not been lost since."""
        heard = [state for host, state in self.states.items() if host not in self.lost]
        return bool(heard) and all(state.get("ended") for state in heard)

    @property
    def outcome(self) -> str:
        """The outcome of the run, that of the coordinator first; "" while it has not ended."""
        if not self.ended or not self.found:
            return ""
        return str(self._verdict()[1].get("outcome") or "ended without an outcome")

    @property
    def reason(self) -> str:
        """Why it ended so, with the host whose word it is."""
        host, outcome = self._verdict()
        reason = str(outcome.get("reason") or "")
        return f"{reason} ({host})" if reason and outcome["outcome"] != "finished" else reason

    def fold(self, host: str, state: dict[str, Any]) -> None:
        """Take one host's report into account."""
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
        for key in ("step", "num_iterations", "sample", "checkpoint"):
            if outcome.get(key) is not None:
                setattr(self, key, outcome[key])

    def _saw(self, entry: dict[str, Any]) -> None:
        if entry.get("step") is not None and entry.get("loss") is not None:
            self.losses[int(entry["step"])] = float(entry["loss"])
        if entry.get("val_bpb") is not None:
            self.val_bpb = float(entry["val_bpb"])

    def _verdict(self) -> tuple[str, dict[str, Any]]:
        """The host whose outcome counts, and that outcome."""
        for host in (self.coordinator, *sorted(self.states)):
            outcome = self.states.get(host, {}).get("outcome") or {}
            if outcome.get("outcome"):
                return host, outcome
        return "", {}


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
