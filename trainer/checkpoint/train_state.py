"""The state of a run between two steps, as meta.json of a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """Step, losses and newest checkpoint of a run; `step` counts the updates done."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    val_bpb: float | None = None
    val_bpb_step: int | None = None
    best_val_bpb: float | None = None
    checkpoint: str | None = None

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> TrainState:
        """As a checkpoint's meta.json has it."""
        names = ("step", "first_loss", "loss", "val_bpb", "val_bpb_step", "best_val_bpb")
        return cls(**{name: meta[name] for name in names if name in meta})
