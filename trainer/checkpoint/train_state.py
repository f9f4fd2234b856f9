"""The progress of a run between two steps, as meta.json of a checkpoint has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """Step, losses and newest checkpoint of a run; `step` is the number of completed steps."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    val_bpb: float | None = None
    val_bpb_step: int | None = None
    best_val_bpb: float | None = None
    checkpoint: str | None = None

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> TrainState:
        """The progress in `meta`, the content of a checkpoint's meta.json; `checkpoint` is not in it."""
        names = ("step", "first_loss", "loss", "val_bpb", "val_bpb_step", "best_val_bpb")
        return cls(**{name: meta[name] for name in names if name in meta})
