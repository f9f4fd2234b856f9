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
    """The end of a rank, as published to the other ranks.

    outcome, reason: as in its outcome file. is_echo: whether the rank ends only because another rank is lost.
    """

    outcome: str
    reason: str
    is_echo: bool


class SavedCheckpoint(TypedDict):
    """A completely written checkpoint.

    step: number of completed steps. time: Unix time at which the checkpoint was written. path: its path,
    relative to the run directory.
    """

    step: int
    time: float
    path: str


@dataclass(slots=True)
class RunFigures:
    """The figures that both the run status and the outcome file have. None: not known.

    run_id: name of the run. step: number of completed steps. num_iterations: number of steps of the run.
    loss: training loss of the last step, in nats per token.
    val_bpb: result of the last evaluation, in bits per byte.
    tok_per_s: tokens per second, over all ranks.
    """

    run_id: str | None = None
    step: int = 0
    num_iterations: int | None = None
    loss: float | None = None
    val_bpb: float | None = None
    tok_per_s: float | None = None


@dataclass(slots=True)
class OutcomeRecord(RunFigures):
    """The figures of an attempt in outcome.json, besides those of RunFigures.

    tok_per_s: here the mean over recent steps.
    first_loss: loss of the first step of the run.
    checkpoint: path of the newest checkpoint, relative to the run directory.
    sample: the last generated text.
    transfer: if the run is transferred to one host, a dict with host, seconds, together and table (see
        TransferToHost in trainer/outcome.py); else None.
    """

    first_loss: float | None = None
    checkpoint: str | None = None
    sample: str | None = None
    transfer: dict[str, Any] | None = None


@dataclass(slots=True)
class RunStatusRecord(RunFigures):
    """The run status of one rank: the fields of RunFigures and those below. None: not known, or not measured.

    rank: its number. world_size: the number of ranks. host: name of its host. pid: PID of its process.
    phase: the current phase, one of PHASES in run_status.py. entered: Unix time at which the phase began.
    tok_per_s: here of the last step. tok_per_s_average: tokens per second over recent steps.
    step_seconds: seconds of the median step. eta_seconds: expected seconds for all remaining steps.
    sync_share: the part of a step's seconds that the phase sync takes, from 0 to 1.
    shares: rows per rank. checkpoint: the newest checkpoint.
    stall_seconds: the stall time, the shortest time in seconds after which a step is late.
    `diagnosis`: the diagnosis of a late step. warning: a sentence.
    time: Unix time at which the heartbeat file was written.
    cpu: share of a core that the training thread uses; 1.0 is a whole core. temperature: of the CPU, in
        degrees Celsius. throttled: whether the CPU is slowed.
    stage: unit of work that the watchdog times: "step", or a phase outside of steps. phase_seconds: seconds
        since the phase began. waits: whether the rank waits in a collective.
    interface: name of the network interface. up: whether the interface is active. received: bytes per second
        that arrive at it.
    endpoint: address of the health endpoint as text. ended: how the rank has ended; None before.
    line, stacks: the line that the main thread executes, and the stacks of all threads; "" unless requested.
    """

    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    pid: int | None = None

    phase: str = ""
    entered: float | None = None
    tok_per_s_average: float | None = None
    step_seconds: float | None = None
    eta_seconds: float | None = None
    sync_share: float | None = None
    shares: list[int] | None = None
    checkpoint: SavedCheckpoint | None = None
    stall_seconds: float | None = None
    diagnosis: str | None = None
    warning: str | None = None
    time: float | None = None

    cpu: float | None = None
    temperature: float | None = None
    throttled: bool | None = None

    stage: str = ""
    phase_seconds: float = 0.0
    waits: bool = False
    interface: str = ""
    up: bool | None = None
    received: float | None = None
    endpoint: str = ""
    ended: RankEnd | None = None
    line: str = ""
    stacks: str = ""

    def heartbeat(self) -> dict[str, Any]:
        """The content of the heartbeat file: {field: value} of all fields except those in FOR_PEERS."""
        return {name: getattr(self, name) for name in _IN_FILE}

    def message(self) -> dict[str, Any]:
        """What this rank sends to other ranks: {field: value} of the fields in IN_BOTH and FOR_PEERS."""
        return {name: getattr(self, name) for name in IN_BOTH + FOR_PEERS}

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> RunStatusRecord:
        """The run status with the fields in `values`, a heartbeat or message; other keys are ignored.

        Raises TypeError if the value of `ended` is malformed.
        """
        known = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        if known.get("ended"):
            known["ended"] = RankEnd(*known["ended"])
        return cls(**known)

    @property
    def is_empty(self) -> bool:
        """Whether no status was received, so that this is an empty record: a published status has a phase."""
        return not self.phase

    @property
    def position(self) -> str:
        """Phase and step as text: "backward of step 812", "load", "evaluate after step 250"."""
        phase = self.phase or "load"
        if self.stage == "step":
            return f"{phase} of step {self.step + 1}"
        return f"{phase} after step {self.step}" if phase in ("evaluate", "checkpoint", "done") else phase


_IN_FILE = tuple(f.name for f in dataclasses.fields(RunStatusRecord) if f.name not in FOR_PEERS)
