"""The interface of a sync mode.

sync = make_sync("dense", group, model, optimizer)
sync.begin_step(active); loss.backward()
with sync.last_backward(): loss.backward()
sync.reduce_gradients(tokens, mine)    # sum over ranks, divided once by all tokens
sync.step()                            # the optimizer step of this rank
sync.broadcast()                       # its results to all ranks
with sync.shared_parameters(): evaluate(model)    # equal on all ranks, in every mode
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from trainer.optim.muon_adamw import ParameterState


class SyncMode(Protocol):
    """What the training loop calls.

    The methods from `is_idle` on have defaults for a mode whose ranks hold equal bytes after each step.
    """

    def begin_step(self, active: Tensor) -> None:
        """Start a step with zero gradients. `active`: the input ids of all ranks, each once, ascending."""

    def last_backward(self) -> AbstractContextManager[None]:
        """Within it, the last backward of the step runs: finished gradients may be sent at once."""

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """Reduce the gradients to the ranks that need them, or start to.

        tokens: of the step; mine: of this rank, 0 for an equal part.
        """

    def step(self) -> None:
        """Step the parameters that this rank owns, and those that every rank steps."""

    def broadcast(self) -> None:
        """Broadcast the parameters that owner ranks have stepped."""

    def is_idle(self) -> bool:
        """Whether no transfer is in flight between two steps; equal on all ranks."""
        return True

    def owner_of(self, name: str) -> int | None:
        """The owner rank of a parameter's optimizer state; None if rank 0 has all of it."""
        return None

    def finish(self) -> None:
        """After the last step: complete transfers, so that all ranks hold equal parameters."""

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Within it, the model has parameters that are equal on all ranks, for reading only.

        All ranks enter it after the same step. It does not change the training.
        """
        return nullcontext()

    def common_state(self) -> dict[str, ParameterState]:
        """The state of the mode by parameter, equal on all ranks. All call it, within `shared_parameters`.

        Transfers in flight are waited for and included.
        """
        return {}

    def rank_state(self) -> dict[str, Tensor]:
        """The state that differs between ranks, besides that of the optimizer; within `shared_parameters`."""
        return {}

    def load(self, step: int, common: Mapping[str, ParameterState], own: Mapping[str, Tensor]) -> None:
        """Resume after `step`; the model holds the shared parameters, the start of a rank without `own`."""
