"""The state of the run in the memory of the coordinator, from which the members continue after a loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainer.checkpoint.exchange import gather_optimizer
from trainer.checkpoint.state_copy import StateCopy
from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Collectives
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.mode import SyncMode


class Snapshot:
    """The newest complete state on the coordinator; other ranks only send their parts of it.

    A state that is being gathered does not replace the one before until it is complete: a member may be lost
    meanwhile. So the coordinator keeps two.
    """

    def __init__(self) -> None:
        self._state: State | None = None
        self._copy, self._spare = StateCopy(), StateCopy()
        self.seconds = 0.0  # that the newest one took
        self.taken_at = time.monotonic()

    def take(
        self,
        group: Collectives,
        sync: SyncMode,
        optimizer: MuonAdamW,
        parameters: Mapping[str, Tensor],
        make_meta: Callable[[], dict[str, Any]],
    ) -> None:
        """Gather the state on the coordinator. All ranks call it, within `sync.shared_parameters`."""
        began = time.monotonic()
        optim = gather_optimizer(group, sync, optimizer, self._spare.room)
        if group.rank == 0:
            self._state = self._spare.take(State(make_meta(), dict(parameters), optim))
            self._copy, self._spare = self._spare, self._copy
        self.taken_at = time.monotonic()
        self.seconds = self.taken_at - began

    def state(self) -> State | None:
        """The state; None on other ranks and before the first `take`. Its tensors must not be changed."""
        if self._state is None:
            return None
        optim = {name: dict(tensors) for name, tensors in self._state.optim.items()}
        return State(dict(self._state.meta), dict(self._state.model), optim)
