"""How gradients travel between ranks: one class a sync mode, all behind the same calls.

sync = make_sync("dense", group, model, optimizer)
sync.begin_step(touched); loss.backward()
with sync.last_backward(): loss.backward()
sync.reduce_gradients(tokens)          # gradients: summed over ranks, divided once by all tokens
sync.step()                            # this rank's part of the optimizer's work
sync.hand_out()                        # its results to all: every rank holds the same bytes again
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.optim import MuonAdamW
from trainer.sync.group import Group


class Sync(Protocol):
    """What the loop asks of a sync mode."""

    def begin_step(self, touched: Tensor) -> None:
        """Start a step with empty gradients. `touched`: all ranks' input ids of it, each once, ascending."""

    def last_backward(self) -> AbstractContextManager[None]:
        """The backward inside is the step's last: what it has finished may leave at once."""

    def reduce_gradients(self, tokens: int) -> None:
        """Bring the gradients to where they are needed, or on their way there; `tokens` of the whole step."""

    def step(self) -> None:
        """Do this rank's part of the optimizer's work."""

    def hand_out(self) -> None:
        """Give all ranks what owners have computed."""

    def owner_of(self, name: str) -> int | None:
        """The rank that keeps the optimizer state of a parameter alone; None where every rank keeps it."""


def make_sync(mode: str, group: Group, model: nn.Module, optimizer: MuonAdamW) -> Sync:
    """The sync mode of that name over this model's parameters."""
    from trainer.sync.dense import Dense
    from trainer.sync.exact import Exact
    from trainer.sync.fast import Fast

    modes: dict[str, Callable[[Group, nn.Module, MuonAdamW], Sync]]
    modes = {"dense": Dense, "exact": Exact, "fast": Fast if group.world_size > 1 else Exact}
    if mode not in modes:
        raise ConfigError(f"sync is {mode!r}: it must be {' or '.join(modes)}.")
    return modes[mode](group, model, optimizer)
