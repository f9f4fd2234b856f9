"""Transfer of checkpoint state between ranks: optimizer state to rank 0, and from rank 0 to other ranks.

In a transfer, and in the state file of a rank, the optimizer state is a flat dict:
{"PARAMETER/STATE": tensor}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Collectives
from trainer.distributed.tensor_format import empty_tensors, formats_of
from trainer.distributed.transfer import broadcast_tensors, send_tensor, send_to_coordinator
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

COMMON = "outer_"  # prefix of the state of the sync mode, in optim.pt
Room = Callable[[str, torch.Size, torch.dtype], Tensor]  # PARAMETER/STATE, shape, dtype -> a CPU tensor


def new_tensor(path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor: the default `room` of `gather_optimizer`. path: ignored."""
    return torch.empty(shape, dtype=dtype)


def flatten(optim: Mapping[str, Mapping[str, Tensor]], prefix: str = "") -> dict[str, Tensor]:
    """Optimizer state as one dict: {PREFIX + "PARAMETER/STATE": tensor}.

    optim: {parameter name: {state name: tensor}}. prefix: text before each key.
    """
    return {f"{prefix}{name}/{key}": t for name, tensors in optim.items() for key, t in tensors.items()}


def unflatten(flat: Mapping[str, Tensor], prefix: str = "") -> dict[str, ParameterState]:
    """Optimizer state {parameter name: {state name: tensor}} from the result of `flatten`.

    prefix: the prefix that `flatten` has added; keys without this prefix are ignored.
    """
    optim: dict[str, ParameterState] = {}
    for path, tensor in flat.items():
        if path.startswith(prefix):
            name, _, key = path.removeprefix(prefix).rpartition("/")
            optim.setdefault(name, {})[key] = tensor
    return optim


def gather_optimizer(
    group: Collectives, sync: SyncMode, optimizer: MuonAdamW, room: Room = new_tensor
) -> dict[str, ParameterState]:
    """Gather the optimizer state of all owner ranks on rank 0: {parameter name: {state name: tensor}}.

    All ranks call it. The result is complete on rank 0 only. group: the ranks. sync: the sync mode, whose own
    state is included with the prefix COMMON in each state name. optimizer: the optimizer of this rank.
    room: called as room("PARAMETER/STATE", shape, dtype) for each state that is sharded by rows; returns the
    CPU tensor into which the rows are gathered, such as `CheckpointWriter.room`.
    """
    state = optimizer.state_dict()
    gathered: dict[str, ParameterState] = {}
    for name, shape in optimizer.shapes().items():  # one at a time, as each transfer takes memory
        mine, owner = state.get(name, {}), sync.owner_of(name)
        if sync.owned_rows(name, 0) is not None:
            gathered[name] = _gather_rows(group, sync, name, shape, mine, room)
        elif owner in (None, group.rank):
            gathered[name] = mine
        if owner:
            gathered |= unflatten(send_to_coordinator(group, flatten({name: mine}), owner))
    add_common_state(gathered, sync.common_state())
    return {name: tensors for name, tensors in gathered.items() if tensors}


def add_common_state(optim: dict[str, ParameterState], common: Mapping[str, ParameterState]) -> None:
    """Add `common` to `optim`, the optimizer state of a checkpoint, with the prefix COMMON in state names.

    common: {parameter name: {state name: tensor}}, the state of the sync mode that is equal on all ranks.
    """
    for name, tensors in common.items():
        optim.setdefault(name, {}).update({f"{COMMON}{key}": tensor for key, tensor in tensors.items()})


def _gather_rows(
    group: Collectives, sync: SyncMode, name: str, shape: torch.Size, mine: ParameterState, room: Room
) -> ParameterState:
    """On rank 0, the state of a parameter that is sharded by rows; {} on the other ranks."""
    whole: ParameterState = {}
    for owner in range(group.world_size):
        for key, part in send_to_coordinator(group, mine, owner).items():
            if part.dim() == 0:  # the number of steps, which is equal on all ranks
                whole[key] = part
                continue
            if key not in whole:
                whole[key] = room(f"{name}/{key}", torch.Size([shape[0], *part.shape[1:]]), part.dtype)
            whole[key][sync.owned_rows(name, owner)] = part.cpu()
    return whole


def pop_common_state(tensors: ParameterState) -> ParameterState:
    """Remove and return those tensors of a parameter's state that belong to the sync mode: {name: tensor}.

    tensors: {state name: tensor} of one parameter. Names are returned without the prefix COMMON.
    """
    return {key.removeprefix(COMMON): tensors.pop(key) for key in list(tensors) if key.startswith(COMMON)}


def broadcast_meta(group: Collectives, state: State | None) -> State:
    """Broadcast the meta of rank 0's `state`; the other ranks pass None.

    On rank 0, returns `state`. On the other ranks, returns a State that has the same meta and no tensors; the
    tensors are sent later, one at a time.
    """
    if group.world_size == 1:
        assert state is not None
        return state
    described = None
    if state is not None:
        text = json.dumps([state.meta, list(state.optim)]).encode()
        described = {"meta": torch.tensor(list(text), dtype=torch.uint8)}
    meta, names = json.loads(broadcast_tensors(group, described)["meta"].numpy().tobytes())
    return state or State(meta, {}, {name: {} for name in names})


def send_optimizer(group: Collectives, optimizer: MuonAdamW, receivers: Sequence[int]) -> None:
    """Send the optimizer state of rank 0 to the ranks `receivers`, which load it into `optimizer`.

    All ranks call it after the same step.
    """
    if not receivers:
        return
    mine, received = flatten(optimizer.state_dict()) if group.rank == 0 else {}, {}
    for name, tensor in empty_tensors(group.gather_bytes(formats_of(mine))[0]).items():
        received[name] = send_tensor(group, mine.get(name, tensor), 0, receivers)
    if group.rank in receivers:
        optimizer.load_state_dict(unflatten(received))


def scatter_optimizer(
    group: Collectives, sync: SyncMode, state: State
) -> tuple[dict[str, ParameterState], dict[str, ParameterState]]:
    """Send the optimizer state in rank 0's `state` to the ranks. All ranks call it.

    group: the ranks. sync: the sync mode. If a parameter or its rows have owner ranks, their state is sent to
    the owner ranks only, other state to all ranks. Returns (optimizer state of this rank, state of the sync
    mode, which is equal on all ranks), both {parameter name: {state name: tensor}}. One tensor is sent at a
    time, so that a rank that owns only some of the state needs no memory for all of it. At the end, `state`
    has no optimizer state.
    """
    mine: dict[str, ParameterState] = {}
    common: dict[str, ParameterState] = {}
    header = formats_of(flatten(state.optim)) if group.rank == 0 else b""
    for path, dtype, shape in json.loads(group.gather_bytes(header)[0]):
        name, _, key = path.rpartition("/")
        whole = state.optim[name].pop(key) if group.rank == 0 else None
        is_common = key.startswith(COMMON)
        sharded = bool(shape) and not is_common and sync.owned_rows(name, 0) is not None
        if sharded or (sync.owner_of(name) is not None and not is_common):
            part = _scatter(group, sync, name, whole, getattr(torch, dtype), shape, sharded)
            if part is not None:
                mine.setdefault(name, {})[key] = part
            continue
        tensor = broadcast_tensors(group, None if whole is None else {key: whole})[key]
        of_all, key = (common, key.removeprefix(COMMON)) if is_common else (mine, key)
        of_all.setdefault(name, {})[key] = tensor
    state.optim.clear()
    return mine, common


def _scatter(
    group: Collectives,
    sync: SyncMode,
    name: str,
    whole: Tensor | None,
    dtype: torch.dtype,
    shape: list[int],
    sharded: bool,
) -> Tensor | None:
    """Send a tensor of rank 0, or its rows, to the owner ranks; returns the part of this rank.

    whole: the tensor on rank 0; None on the other ranks. dtype, shape: of this tensor. If it is sharded by
    rows, the part of a rank without rows is empty. Otherwise the owner rank gets the tensor, the others None.
    """
    ranks = range(group.world_size)
    rows = [sync.owned_rows(name, rank) for rank in ranks] if sharded else []
    lengths = [len(each) for each in rows if each is not None]
    lengths = lengths or [shape[0] * (rank == sync.owner_of(name)) for rank in ranks]
    counts = [length * math.prod(shape[1:]) for length in lengths]
    sends, receives = [0] * len(counts), [0] * len(counts)
    flat = torch.empty(0, dtype=dtype)
    if whole is None:
        receives[0] = counts[group.rank]
    else:
        parts = [whole[each] for each in rows if each is not None] or [whole]
        flat = torch.cat([part.reshape(-1).cpu() for part in parts])
        sends[1:] = counts[1:]
    first = counts[0] if whole is not None else 0  # rank 0 keeps its own part
    received, pending = group.start_exchange(flat[first:], sends, receives)
    group.wait([pending])
    part = received if whole is None else flat[:first]
    return part.view(lengths[group.rank], *shape[1:]) if sharded or counts[group.rank] else None
