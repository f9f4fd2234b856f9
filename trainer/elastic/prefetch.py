"""With sync=local, a rank receives the shared state before it joins, while the others train.

The rank asks for it with the key fetch/NUMBER. A thread of the coordinator sends it over connections of this
pair alone, so that a rank that is slow or lost holds up nobody. When the rank has joined, only those
parameters are sent again that a sync round has changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.exchange import flatten, unflatten
from trainer.distributed.tensor_format import empty_tensors, formats_of
from trainer.elastic.snapshot import CHUNK_BYTES
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.local import Local

CONNECT_TIMEOUT = timedelta(seconds=6)  # Gloo gives up connecting after five times that
PIECE_TIMEOUT = timedelta(seconds=60)  # for CHUNK_BYTES
SENDER, RECEIVER = 0, 1  # ranks of the pair


def send_state(store: dist.Store, sync: Local, optimizer: MuonAdamW) -> None:
    """Send the outer state and the optimizer state of this rank to one that has asked. Raises RuntimeError.

    store: only this pair uses it. sync, optimizer: another thread may train with them. The optimizer state
    is then not that of one step, which an optimizer forgets.
    """
    pair = _connect(store, SENDER)
    for state in sync.copy_outer():
        _send(pair, state)
    _send(pair, {})
    _send(pair, flatten(optimizer.state_dict()))


def receive_state(store: dist.Store, sync: Local, optimizer: MuonAdamW) -> float:
    """Receive what `send_state` sends, and load it; returns its size in MB. Raises RuntimeError."""
    pair = _connect(store, RECEIVER)
    size = 0

    def fragments() -> Iterator[Mapping[str, Tensor]]:
        nonlocal size
        while state := _receive(pair):
            size += _size(state)
            yield state

    sync.load_outer(fragments())
    state = _receive(pair)
    optimizer.load_state_dict(unflatten(state))
    return (size + _size(state)) / 1e6


def _connect(store: dist.Store, rank: int) -> Any:
    """Connect the pair; its methods send and recv are not in torch's type stubs."""
    return dist.ProcessGroupGloo(store, rank, 2, CONNECT_TIMEOUT)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _send(pair: Any, tensors: Mapping[str, Tensor]) -> None:
    """Send tensors: the length of their formats (see formats_of), the formats, then the bytes in chunks."""
    formats = torch.tensor(list(formats_of(tensors)), dtype=torch.uint8)
    pair.send([torch.tensor([len(formats)])], RECEIVER, 0).wait(PIECE_TIMEOUT)
    pair.send([formats], RECEIVER, 0).wait(PIECE_TIMEOUT)
    for tensor in tensors.values():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        for chunk in data.split(CHUNK_BYTES) if len(data) else ():
            pair.send([chunk], RECEIVER, 0).wait(PIECE_TIMEOUT)


def _receive(pair: Any) -> dict[str, Tensor]:
    """Receive the tensors of one `_send`."""
    length = torch.zeros(1, dtype=torch.int64)
    pair.recv([length], SENDER, 0).wait(PIECE_TIMEOUT)
    formats = torch.zeros(int(length), dtype=torch.uint8)
    pair.recv([formats], SENDER, 0).wait(PIECE_TIMEOUT)
    tensors = empty_tensors(formats.numpy().tobytes())
    for tensor in tensors.values():
        data = tensor.view(-1).view(torch.uint8)
        for chunk in data.split(CHUNK_BYTES) if len(data) else ():
            pair.recv([chunk], SENDER, 0).wait(PIECE_TIMEOUT)
    return tensors
