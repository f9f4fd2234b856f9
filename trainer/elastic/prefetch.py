"""With sync=local, a rank receives the shared state before it joins, while the other ranks train.

The shared state is the outer parameters, their momentum, and the optimizer state of the coordinator. The rank
asks for it with the key fetch/NUMBER (keys.py). A thread of the coordinator sends it over a connection that
only these two ranks have, so that a slow or lost rank does not delay the others. After the rank has joined,
it receives again only the outer parameters that a sync round has changed since.
"""

from __future__ import annotations

import time
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
PASSES = 8  # over the fragments, at most; in each but the first, those that have changed
STEP_SECONDS = 30.0  # to wait for the end of a step, below PIECE_TIMEOUT
POLL_SECONDS = 0.02


def send_state(store: dist.Store, sync: Local, optimizer: MuonAdamW) -> None:
    """Send the shared state of this rank, the coordinator, to the rank that has asked for it.

    store: a store that only these two ranks use, to connect. sync, optimizer: those of this rank; another
    thread may train with them meanwhile. The optimizer state that is sent may then mix the states of several
    steps, an error that fades as the receiver trains. Fragments (parts of the outer parameters) that an outer
    step has changed since they were sent are sent again, in up to PASSES passes. The transfer ends after the
    first pass that ends in a step without an outer step: the receiver then has the current fragments. Raises
    RuntimeError if the connection fails.
    """
    pair = _connect(store, SENDER)
    _send(pair, flatten(optimizer.state_dict()))
    known: dict[int, tuple[int, int]] = {}
    for _ in range(PASSES):
        for state in sync.copy_outer(known):
            _send(pair, state)
        step, began = sync.completed_steps + 1, time.monotonic()
        if not sync.takes_outer_step(step):
            break
        while sync.takes_outer_step(step) and time.monotonic() - began < STEP_SECONDS:
            time.sleep(POLL_SECONDS)
    _send(pair, {})


def receive_state(store: dist.Store, sync: Local, optimizer: MuonAdamW) -> float:
    """Receive the state that `send_state` sends, and load it into `sync` and `optimizer`.

    store: a store that only these two ranks use, to connect. Returns the size of the state in MB. Raises
    RuntimeError if the connection fails.
    """
    pair = _connect(store, RECEIVER)
    state = _receive(pair)
    optimizer.load_state_dict(unflatten(state))
    size = _size(state)

    def fragments() -> Iterator[Mapping[str, Tensor]]:
        nonlocal size
        while state := _receive(pair):
            size += _size(state)
            yield state

    sync.load_outer(fragments())
    return size / 1e6


def _connect(store: dist.Store, rank: int) -> Any:
    """A new process group of the two ranks. Its methods send and recv are not in torch's type stubs."""
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
