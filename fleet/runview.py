"""The state of a run, combined from the reports of its hosts. This module prints nothing."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import run_status as status
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_summary
from ansible_collections.nanofleet.fleet.plugins.module_utils import typed_commands as commands

from fleet.text import Point, number
from trainer.health.status_record import RunStatusRecord


def is_report(result: object) -> bool:
    """Whether the result of a task comes from the module ``run_state``: a host's report on a run."""
    return isinstance(result, dict) and "found" in result and "heartbeats" in result


@dataclass
class RunView:
    """The state of a run from all reports of its hosts so far.

    options: options that a command in a message needs to reach the same hosts, such as ``-i PATH ``.
    run_id: name of the run. plan: its settings in a few words. run_dir: its directory on the coordinator.
    states: {host: last result of run_state}. lost: {unreachable host: reason}.
    ranks: run status of each rank, in rank order. coordinator: host of rank 0.
    figures: the latest known fields of the coordinator's metrics, run status and outcome, such as step and
        val_bpb.
    losses: {step: loss in nats}.
    """

    options: str = ""
    run_id: str = ""
    plan: str = ""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: list[RunStatusRecord] = field(default_factory=list)
    coordinator: str = ""
    run_dir: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
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
        """The loss of the earliest step in `losses`; None if `losses` is empty."""
        return self.losses[min(self.losses)] if self.losses else None

    @property
    def loss(self) -> float | None:
        """The loss of the latest step in `losses`; None if `losses` is empty."""
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def found(self) -> bool:
        """Whether any reporting host has the run."""
        return any(state.get("found") for state in self.states.values())

    @property
    def unknown(self) -> str:
        """The message that no host has the run.

        It has the names of the known runs if a run was requested by name, else the command that starts a run.
        """
        run_id = next((state["run_id"] for state in self.states.values() if state.get("run_id")), "")
        if run_id:
            return str(status.no_such_run(self.states, run_id))
        return "No host has a run. To start one, type: python -m fleet train -e depth=4"

    @property
    def is_training(self) -> bool:
        """Whether all ranks of the reachable hosts make progress; if not, the known speed is outdated."""
        return bool(status.is_training(self._known))

    @property
    def returning(self) -> list[str]:
        """The rebooted hosts that are restarting the run by themselves."""
        hosts: list[str] = status.returning(self._known)
        return hosts

    @property
    def reboots(self) -> list[str]:
        """A line for each host whose reboot ended the run's unit.

        The line has the command that restarts the unit, unless the host restarts the unit by itself.
        """
        lines: list[str] = status.reboots(self._known, self.run_id)
        return [commands.typed(line, self.options) for line in lines]

    @property
    def _known(self) -> dict[str, dict[str, Any]]:
        """The states of the reachable hosts that have the run."""
        found = {host: state for host, state in self.states.items() if state.get("found")}
        return {host: state for host, state in found.items() if host not in self.lost}

    @property
    def screen(self) -> list[str]:
        """The lines that status.yml prints about the hosts and the run, without the title."""
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
        reached = [state for host, state in self.states.items() if host not in self.lost]
        return bool(reached) and all(state.get("ended") for state in reached)

    @property
    def outcome(self) -> str:
        """The outcome of the run; "" while the run has not ended.

        It is the outcome on the coordinator if the coordinator has one, else the outcome on another host.
        """
        if not self.ended or not self.found:
            return ""
        return str(self._decisive_outcome()[1].get("outcome") or "ended without an outcome")

    @property
    def reason(self) -> str:
        """The reason of the run's outcome; "" if there is none.

        If the outcome is not `finished`, the name of the host that reported it follows in parentheses.
        """
        host, outcome = self._decisive_outcome()
        reason = str(outcome.get("reason") or "")
        return f"{reason} ({host})" if reason and outcome["outcome"] != "finished" else reason

    def fold(self, host: str, state: dict[str, Any]) -> None:
        """Update the view with a report. host: name of the host. state: result of run_state on this host."""
        self.states[host] = state
        self.lost.pop(host, None)
        if not state.get("found"):
            return
        self.run_id = state.get("run_id") or self.run_id
        run_file = state.get("run_file") or {}
        hosts = run_file.get("hosts") or []
        self.plan = plan(run_file.get("config") or {}) or self.plan
        rank = hosts.index(host) if host in hosts else None
        own = [RunStatusRecord.load({**known, "host": host}) for known in state.get("heartbeats") or []]
        own = own or [RunStatusRecord(host=host, rank=rank)]
        self.ranks = [known for known in self.ranks if known.host != host] + own
        self.ranks.sort(key=lambda known: (known.rank is None, known.rank or 0, known.host))
        if own[0].rank == 0 and host == run_summary.coordinator(self.states):
            self.coordinator = host
            self.run_dir = state.get("run_dir") or self.run_dir
            published = own[0].heartbeat() if own[0].phase else {}
            current = {**published, "checkpoint": state.get("checkpoint")}
            for entry in (state.get("evaluation"), state.get("metrics"), current, state.get("outcome")):
                self._add_loss(entry or {})
                known = {name: value for name, value in (entry or {}).items() if value is not None}
                self.figures.update(known)

    def history(self, lines: Iterable[str]) -> None:
        """Add the losses in `lines`, and figures that are not known yet.

        lines: the lines of metrics.jsonl, each of which is a JSON object. Another thread than that of `fold`
        may call this method.
        """
        found: dict[str, Any] = {}
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # a line that is still being written
            if isinstance(entry, dict):
                self._add_loss(entry)
                found.update({name: value for name, value in entry.items() if value is not None})
        for name, value in found.items():
            self.figures.setdefault(name, value)

    def _add_loss(self, entry: dict[str, Any]) -> None:
        if entry.get("step") is not None and entry.get("loss") is not None:
            self.losses[int(entry["step"])] = float(entry["loss"])

    def _decisive_outcome(self) -> tuple[str, dict[str, Any]]:
        """(host, outcome) of the coordinator if it has an outcome, else of the first host that has one."""
        for host in (self.coordinator, *sorted(self.states)):
            outcome = self.states.get(host, {}).get("outcome") or {}
            if outcome.get("outcome"):
                return host, outcome
        return "", {}


def plan(config: dict[str, Any]) -> str:
    """The settings of a run in a few words: depth, tokens per step, tokens per sequence.

    config: {setting: value}. The result is "" if `config` is empty.
    """
    if not config:
        return ""
    parts = [f"depth {config.get('depth')}"]
    if config.get("total_batch_size"):
        parts.append(f"{number(int(config['total_batch_size']))} tokens a step")
    if config.get("sequence_len"):
        parts.append(f"rows of {number(int(config['sequence_len']))}")
    return " · ".join(parts)
