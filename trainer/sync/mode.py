"""How gradients travel between ranks: one class a sync mode, all behind the same calls.

sync = make_sync("dense", group, model, optimizer)
sync.begin_step(touched); loss.backward()
with sync.last_backward(): loss.backward()
sync.reduce_gradients(tokens, mine)    # gradients: summed over ranks, divided once by all tokens
sync.step()                            # this rank's part of the optimizer's work
sync.hand_out()                        # its results to all: every rank holds the same bytes again
with sync.agreed(): evaluate(model)    # on parameters that are the same on all ranks, in every mode
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from trainer.optim.muon_adamw import ParameterState


class SyncMode(Protocol):
    """What the loop asks of a sync mode.

    From `owner_of` on, the answers of a mode whose ranks hold the same bytes after every step.
    """

    def begin_step(self, touched: Tensor) -> None:
        """Start a step with empty gradients. `touched`: all ranks' input ids of it, each once, ascending."""

    def last_backward(self) -> AbstractContextManager[None]:
        """The backward inside is the step's last: what it has finished may leave at once."""

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """Bring the gradients to where they are needed, or on their way there.

        `tokens` of the whole step, `mine` on this rank; 0 for an equal share.
        """

    def step(self) -> None:
        """Do this rank's part of the optimizer's work."""

    def hand_out(self) -> None:
        """Give all ranks what owners have computed."""

    def at_rest(self) -> bool:
        """Between two steps: whether nothing is on its way between ranks. The same on all of them."""
        return True

    def owner_of(self, name: str) -> int | None:
        """The rank that keeps the optimizer state of a parameter alone; None where rank 0's is the run's."""
        return None

    def finish(self) -> None:
        """The last step is done: bring together what ranks have not shared yet."""

    def agreed(self) -> AbstractContextManager[None]:
        """Inside, the model's parameters are the run's, the same bytes on all ranks: to look at alone.

        All ranks enter it after the same step. However often they do, the training takes the same course.
        """
        return nullcontext()

    def common_state(self) -> dict[str, ParameterState]:
        """What the mode itself keeps of parameters, the same on all ranks. All take it, within `agreed`.

        What is in flight between ranks is part of it, once its bytes are there.
        """
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """What this rank has for itself, beside its optimizer's state. Taken within `agreed`."""
        return {}

    def load(self, step: int, common: Mapping[str, ParameterState], own: Mapping[str, Tensor]) -> None:
        """Go on after `step`: the model holds the run's parameters. Without `own` a rank begins with them."""
