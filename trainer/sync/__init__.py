"""How gradients travel between ranks: one class a sync mode, all behind the same four calls.

sync = make_sync("dense", group, model, optimizer)
sync.zero_grad(); loss.backward()
sync.reduce_gradients(tokens)          # gradients: summed over ranks, divided once by all tokens
sync.step()                            # this rank's part of the optimizer's work
sync.hand_out()                        # its results to all: every rank holds the same bytes again
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from trainer.config import ConfigError
from trainer.optim import MuonAdamW
from trainer.sync.group import Group


class Sync(Protocol):
    """What the loop asks of a sync mode."""

    def zero_grad(self) -> None:
        """Start a step with empty gradients."""

    def reduce_gradients(self, tokens: int) -> None:
        """Bring the gradients to where they are needed: summed over ranks, divided by the step's tokens."""

    def step(self) -> None:
        """Do this rank's part of the optimizer's work."""

    def hand_out(self) -> None:
        """Give all ranks what owners have computed."""

    def owner_of(self, name: str) -> int | None:
        """The rank that keeps the optimizer state of a parameter alone; None where every rank keeps it."""


def make_sync(mode: str, group: Group, model: nn.Module, optimizer: MuonAdamW) -> Sync:
    """The sync mode of that name over this model's parameters."""
    from trainer.sync.dense import Dense

    modes = {"dense": Dense}
    if mode not in modes:
        raise ConfigError(f"sync is {mode!r}: it must be {' or '.join(modes)}.")
    return modes[mode](group, model, optimizer)
