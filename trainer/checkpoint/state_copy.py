"""A copy of a run's state in memory, whose tensors are reused by the next copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.checkpoint.storage import State
from trainer.optim.muon_adamw import ParameterState


class StateCopy:
    """Copies states of equal shapes into the same CPU tensors: only the first copy allocates memory."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, state: State) -> State:
        """A copy of `state`. It is valid until the next one."""
        model = self._copies_of("model", state.model)
        optim = {name: self._copies_of(name, tensors) for name, tensors in state.optim.items()}
        return State(state.meta, model, optim)

    def room(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The CPU tensor for the tensor PARAMETER/STATE; `take` does not copy what was written to it."""
        if path not in self._copies or self._copies[path].shape != shape:
            self._copies[path] = torch.empty(shape, dtype=dtype)
        return self._copies[path]

    def _copies_of(self, group: str, tensors: Mapping[str, Tensor]) -> ParameterState:
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = self.room(f"{group}/{name}", tensor.shape, tensor.dtype)
            if copies[name] is not tensor:  # it was not gathered there
                copies[name].copy_(tensor.detach())
        return copies
