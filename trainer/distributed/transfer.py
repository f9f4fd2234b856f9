"""Tensors that one rank sends to others. Nothing is pickled: the format of named tensors is sent as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.distributed.process_group import CHUNK_BYTES, Collectives
from trainer.distributed.tensor_format import empty_tensors, formats_of


def broadcast_tensors(group: Collectives, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Broadcast the tensors of rank 0; returns them on every rank as {name: tensor}.

    tensors: on rank 0 {name: tensor}; None on the other ranks, which receive CPU tensors.
    """
    if group.world_size == 1:
        return dict(tensors or {})
    header = None
    if tensors is not None:
        header = torch.tensor(list(formats_of(tensors)), dtype=torch.uint8)
    size = torch.tensor([0 if header is None else len(header)])
    group.broadcast_owned({0: size})
    header = torch.empty(int(size), dtype=torch.uint8) if header is None else header
    group.broadcast_owned({0: header})
    if tensors is None:
        tensors = empty_tensors(header.numpy().tobytes())
    for tensor in tensors.values():
        group.broadcast_owned({0: tensor.detach().cpu().contiguous().view(-1)})  # a view of a received one
    return dict(tensors)


def send_to_coordinator(group: Collectives, tensors: Mapping[str, Tensor], owner: int) -> dict[str, Tensor]:
    """Send the tensors of rank `owner` to rank 0. All ranks call it.

    tensors: {name: tensor}; those of ranks other than the owner are ignored. Rank 0 returns the tensors:
    on the CPU, or unchanged if rank 0 is the owner. Other ranks return {}.
    """
    if owner == 0:
        return dict(tensors) if group.rank == 0 else {}
    is_owner, received = group.rank == owner, {}
    mine = {name: tensor.detach().cpu() for name, tensor in tensors.items()} if is_owner else {}
    for name, dtype, shape in json.loads(group.gather_bytes(formats_of(mine))[owner]):
        empty = torch.empty(0, dtype=getattr(torch, dtype))
        sends, receives = ([0] * group.world_size for _ in range(2))
        sends[0] = math.prod(shape) * is_owner
        receives[owner] = math.prod(shape) * (group.rank == 0)
        sent = mine[name].contiguous().view(-1) if is_owner else empty
        flat, pending = group.start_exchange(sent, sends, receives)
        group.wait([pending])
        if group.rank == 0:
            received[name] = flat.view(shape)
    return received


def send_tensor(group: Collectives, tensor: Tensor, owner: int, receivers: Sequence[int]) -> Tensor:
    """Send the CPU tensor of rank `owner` to the ranks `receivers`.

    All ranks call it, each with a tensor of the same shape. Returns the received tensor on `receivers`,
    and the values of `tensor` on other ranks.
    """
    flat, is_receiver = tensor.detach().contiguous().view(-1), group.rank in receivers
    result = torch.empty_like(flat) if is_receiver else flat
    size = max(1, CHUNK_BYTES // tensor.element_size())
    for chunk, into in zip(flat.split(size), result.split(size), strict=True):
        sends, receives = [0] * group.world_size, [0] * group.world_size
        if group.rank == owner:
            sends = [len(chunk) * (rank in receivers) for rank in range(group.world_size)]
        receives[owner] = len(chunk) * is_receiver
        sent = chunk.repeat(len(receivers)) if group.rank == owner else chunk[:0]
        received, pending = group.start_exchange(sent, sends, receives)
        group.wait([pending])
        if is_receiver:
            into.copy_(received)
    return result.view(tensor.shape)
