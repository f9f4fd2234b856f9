"""The run status of one rank: one record for its heartbeat file and for the messages to its peers.

    record.heartbeat()                   # the content of heartbeat-<rank>.json
    record.message()                     # what a peer receives through the store or from the health endpoint
    RunStatusRecord.load(values)         # the record of a heartbeat or message

Only the standard library is imported, so that a controller without torch can read a heartbeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

IN_BOTH = ("host", "phase", "step", "cpu", "temperature", "throttled")
FOR_PEERS = (
    *("stage", "phase_seconds", "waits", "interface", "up", "received", "endpoint", "ended"),
    *("line", "stacks"),
)


class RankEnd(NamedTuple):
    """The end of a rank that it publishes to the other ranks: outcome and reason, as in its outcome file."""

    outcome: str
    reason: str
    is_echo: bool  # it ends only because another rank is lost


class SavedCheckpoint(TypedDict):
    """A completely written checkpoint. `path` is relative to the run directory."""

    step: int
    time: float  # seconds since the epoch
    path: str


@dataclass(slots=True)
class RunFigures:
    """The figures that both run status and outcome have. None: not known."""

    run_id: str | None = None
    step: int = 0  # steps done
    num_iterations: int | None = None
    loss: float | None = None
    val_bpb: float | None = None
    tok_per_s: float | None = None


@dataclass(slots=True)
class OutcomeRecord(RunFigures):
    """The figures of an attempt in outcome.json; tok_per_s is the mean over recent steps."""

    first_loss: float | None = None
    checkpoint: str | None = None  # path relative to the run directory
    sample: str | None = None
    alone: dict[str, Any] | None = None  # the host to which the run is transferred


@dataclass(slots=True)
class RunStatusRecord(RunFigures):
    """Rank, progress and condition of one rank. None: not known, or not measured on this host."""

    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    pid: int | None = None

    phase: str = ""
    entered: float | None = None  # seconds since the epoch at which the phase began
    tok_per_s_average: float | None = None
    step_seconds: float | None = None  # of the median step
    eta_seconds: float | None = None
    sync_share: float | None = None  # of a step's seconds
    shares: list[int] | None = None  # rows per rank
    checkpoint: SavedCheckpoint | None = None  # the newest
    stall_seconds: float | None = None
    blame: str | None = None  # the diagnosis of a late step
    warning: str | None = None
    time: float | None = None  # seconds since the epoch at which the file was written

    cpu: float | None = None  # share of a core
    temperature: float | None = None  # degrees Celsius
    throttled: bool | None = None

    stage: str = ""  # the unit of work that the watchdog times: step, or a phase outside of steps
    phase_seconds: float = 0.0
    waits: bool = False  # in a collective
    interface: str = ""
    up: bool | None = None  # whether the interface is
    received: float | None = None  # bytes per second at the interface
    endpoint: str = ""  # the address of the health endpoint
    ended: RankEnd | None = None
    line: str = ""  # on request: the innermost line of the main thread
    stacks: str = ""  # on request: the stacks of all threads

    def heartbeat(self) -> dict[str, Any]:
        """The content of the heartbeat file: all fields except those in FOR_PEERS."""
        return {name: getattr(self, name) for name in _IN_FILE}

    def message(self) -> dict[str, Any]:
        """The fields that this rank sends to other ranks: name -> value of those in IN_BOTH and FOR_PEERS."""
        return {name: getattr(self, name) for name in IN_BOTH + FOR_PEERS}

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> RunStatusRecord:
        """The record of a heartbeat or message; ignores other keys. TypeError for a malformed `ended`."""
        known = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        if known.get("ended"):
            known["ended"] = RankEnd(*known["ended"])
        return cls(**known)

    @property
    def is_empty(self) -> bool:
        """Whether this is no received status but an empty record: every published status has a phase."""
        return not self.phase

    @property
    def position(self) -> str:
        """Phase and step as text: "backward of step 812", "load", "evaluate after step 250"."""
        phase = self.phase or "load"
        if self.stage == "step":
            return f"{phase} of step {self.step + 1}"
        return f"{phase} after step {self.step}" if phase in ("evaluate", "checkpoint", "done") else phase


_IN_FILE = tuple(f.name for f in dataclasses.fields(RunStatusRecord) if f.name not in FOR_PEERS)
