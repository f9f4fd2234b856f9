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

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.distributed.process_group import Group
from trainer.optim.muon_adamw import MuonAdamW, ParameterState

if TYPE_CHECKING:
    from trainer.sync.local import Outer


class Sync(Protocol):
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


def make_sync(
    mode: str, group: Group, model: nn.Module, optimizer: MuonAdamW, outer: Outer | None = None
) -> Sync:
    """The sync mode of that name over this model's parameters; `outer` is how ranks meet in `local`."""
    from trainer.sync.dense import Dense
    from trainer.sync.exact import Exact
    from trainer.sync.fast import Fast
    from trainer.sync.local import Local

    if mode == "local":
        return Local(group, model, optimizer, outer)
    modes: dict[str, Callable[[Group, nn.Module, MuonAdamW], Sync]]
    modes = {"dense": Dense, "exact": Exact, "fast": Fast if group.world_size > 1 else Exact}
    if mode not in modes:
        raise ConfigError(f"sync is {mode!r}: it must be {', '.join(modes)} or local.")
    return modes[mode](group, model, optimizer)
