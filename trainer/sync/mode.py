"""The interface of a sync mode.

sync = make_sync("dense", group, model, optimizer)
sync.begin_step(active, by_rank); loss.backward()
with sync.last_backward(tokens): loss.backward()
sync.reduce_gradients(tokens, mine)    # starts the sums over ranks
sync.step()                            # the optimizer step of this rank
sync.broadcast()                       # its results to all ranks
with sync.shared_parameters(): evaluate(model)    # equal on all ranks, in every mode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from trainer.optim.muon_adamw import ParameterState


class SyncMode(Protocol):
    """The methods of a sync mode that the training loop calls, the first five of them in each step.

    `last_backward` and the methods from `is_idle` on have defaults for a mode that sends all gradients after
    the last backward, and whose ranks hold equal bytes after each step.
    optimizing: context around optimizer steps that are taken during backward.
    """

    optimizing: Callable[[], AbstractContextManager[None]] = nullcontext

    def begin_step(self, active: Tensor, by_rank: Sequence[Tensor] = ()) -> None:
        """Set all gradients to 0 for a new step; exact and fast also fetch active embedding rows.

        active: the token ids in the inputs of all ranks, each once, ascending: the active embedding rows.
        by_rank: the same for the inputs of each rank, on the CPU; it may be left out with one rank.
        """

    def last_backward(self, tokens: int) -> AbstractContextManager[None]:
        """Context of the last backward of a step.

        In it, a mode may send gradients once they are final, and step parameters that this backward no longer
        reads. tokens: as for `reduce_gradients`.
        """
        return nullcontext()

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """Start to reduce the gradients. Afterwards no rank necessarily holds all reduced gradients.

        The gradient of a Muon matrix, or of a row with an owner rank, is reduced to the owner rank only,
        every other gradient to all ranks; the sums are divided by `tokens`. dense completes this here, exact
        and fast in `step`. local sends nothing: each rank divides its own gradients by `mine`.
        tokens: the number of target tokens with a loss in the step, over all ranks. mine: this number for
        this rank alone; 0: `tokens` divided by the number of ranks.
        """

    def step(self) -> None:
        """Take the optimizer step for the parameters that this rank owns and those that every rank steps."""

    def broadcast(self) -> None:
        """Complete the broadcast of the parameters that owner ranks have stepped."""

    def is_idle(self) -> bool:
        """Whether this rank has no transfer in flight between two steps. The result is equal on all ranks."""
        return True

    def owner_of(self, name: str) -> int | None:
        """The owner rank of the parameter `name` and its optimizer state; None if every rank steps it."""
        return None

    def owned_rows(self, name: str, rank: int) -> Tensor | None:
        """Indices of those rows of the parameter `name` for which only `rank` has the optimizer state.

        They are int64, (rows,), in the order of the optimizer state. None if the parameter is not sharded by
        rows.
        """
        return None

    def is_current(self, name: str) -> bool:
        """Whether all ranks have the same values of the parameter `name` after each step."""
        return True

    def finish(self) -> None:
        """Complete all transfers after the last step, so that all ranks hold equal parameters."""

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Context in which the model holds parameters that are equal on all ranks, for reading only.

        All ranks enter it after the same step. It does not change the training.
        """
        return nullcontext()

    def common_state(self) -> dict[str, ParameterState]:
        """The state of the mode that is equal on all ranks: {parameter name: {name: tensor}}.

        It is for a checkpoint. All ranks call it, within `shared_parameters`. It waits for transfers in
        flight and includes them.
        """
        return {}

    def rank_state(self) -> dict[str, Tensor]:
        """The state of the mode that differs between ranks: {name: tensor}; {} if ranks are equal.

        It is for a checkpoint. Call it within `shared_parameters`. The state of the optimizer is not
        included.
        """
        return {}

    def load(self, step: int, common: Mapping[str, ParameterState], own: Mapping[str, Tensor]) -> None:
        """Restore the mode as it was after `step`, the number of completed steps.

        common, own: the results of `common_state` and `rank_state` after this step. The model must already
        hold the shared parameters; a rank whose `own` is empty continues from these parameters.
        """
