"""Transfer of checkpoint state between ranks: optimizer state to rank 0, and the whole state to all ranks.

In transit and in files of one rank, the optimizer state is flat: "PARAMETER/STATE" -> tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Collectives
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

COMMON = "outer_"  # prefix of the state of the sync mode, in optim.pt


def flatten(optim: Mapping[str, Mapping[str, Tensor]], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of {parameter: {state name: tensor}} by their path PREFIX + PARAMETER/STATE."""
    return {f"{prefix}{name}/{key}": t for name, tensors in optim.items() for key, t in tensors.items()}


def unflatten(flat: Mapping[str, Tensor], prefix: str = "") -> dict[str, ParameterState]:
    """The reverse of `flatten`. Paths that do not start with `prefix` are ignored."""
    optim: dict[str, ParameterState] = {}
    for path, tensor in flat.items():
        if path.startswith(prefix):
            name, _, key = path.removeprefix(prefix).rpartition("/")
            optim.setdefault(name, {})[key] = tensor
    return optim


def gather_optimizer(group: Collectives, sync: SyncMode, optimizer: MuonAdamW) -> dict[str, ParameterState]:
    """The whole optimizer state on rank 0, gathered from the owner ranks; a part of it on the other ranks.

    It maps parameter name -> state name -> tensor. The state of the sync mode is included, with the prefix
    COMMON.
    """
    state = optimizer.state_dict()
    gathered = {name: tensors for name, tensors in state.items() if sync.owner_of(name) in (None, group.rank)}
    for owner in range(1, group.world_size):
        own = {name: tensors for name, tensors in state.items() if sync.owner_of(name) == owner}
        gathered |= unflatten(group.send_to_coordinator(flatten(own), owner))
    for name, tensors in sync.common_state().items():
        gathered.setdefault(name, {}).update({f"{COMMON}{key}": tensor for key, tensor in tensors.items()})
    return gathered


def pop_common_state(optim: dict[str, ParameterState]) -> dict[str, ParameterState]:
    """Remove the state of the sync mode from `optim` and return it, without the prefix COMMON."""
    common: dict[str, ParameterState] = {}
    for name, tensors in optim.items():
        for key in [key for key in tensors if key.startswith(COMMON)]:
            common.setdefault(name, {})[key.removeprefix(COMMON)] = tensors.pop(key)
    return common


def broadcast_state(group: Collectives, state: State | None) -> State:
    """Broadcast the state of rank 0, which every rank returns; the other ranks pass None."""
    if group.world_size == 1:
        assert state is not None
        return state
    flat: dict[str, Tensor] | None = None
    if state is not None:
        flat = {"meta": torch.tensor(list(json.dumps(state.meta).encode()), dtype=torch.uint8)}
        flat |= {f"model/{name}": tensor for name, tensor in state.model.items()}
        flat |= flatten(state.optim, "optim/")
    flat = group.broadcast_tensors(flat)
    meta = json.loads(flat.pop("meta").numpy().tobytes())
    model = {path[6:]: tensor for path, tensor in flat.items() if path.startswith("model/")}
    return State(meta, model, unflatten(flat, "optim/"))
