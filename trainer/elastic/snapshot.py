"""Copies of the state of a run in the memory of the coordinator, from which members continue after a loss.

    copies = Snapshots(group)           # new for each process group
    copies.start(parts, meta)           # every rank copies its part; a thread sends it to the coordinator
    copies.finish()                     # until it has arrived

The part of a rank is what the coordinator does not have: the optimizer state of the matrices and rows that
the rank owns, and those rows of embeddings and lm_head themselves. Training continues while it is sent, over
connections of its own. A copy that is complete replaces the one before; the coordinator keeps two, because a
member may be lost while one is sent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Collectives, PeerLost, formats_of, tensors_of
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

CHUNK_BYTES = 4 * 2**20
MODEL = "model"  # of a path MODEL/NAME; other paths are NAME/STATE


@dataclass
class Copy:
    """The state of a run after a step, as parts that the ranks have sent to the coordinator.

    meta: content of meta.json of a checkpoint of this step.
    formats: for each rank, names, data types and shapes of the tensors in its part (see formats_of).
    parts: for each rank, the bytes of these tensors, uint8, flat; on another rank its own part only.
    rows: {parameter name: for each rank, the numbers of the rows that it owns}.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    formats: list[bytes] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)


class Snapshots:
    """Makes copies of the state of a run in the memory of the coordinator, for one process group.

    newest: on the coordinator, the last complete copy; None without one.
    pause: seconds for which training paused to make the newest copy.
    megabytes: data that the coordinator receives for it.
    seconds: how long the transfer of it took.
    """

    def __init__(self, group: Collectives, newest: Copy | None) -> None:
        self._group, self.newest = group, newest
        self._channel = group.open_channel("copies")
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._spare: list[Tensor] = []
        self._started_at = time.monotonic()
        self.seconds = 0.0  # in which the newest copy arrived
        self.pause = 0.0  # seconds for which training paused for the newest copy
        self.megabytes = 0.0  # that the coordinator receives for it

    @property
    def age(self) -> float:
        """Seconds since a copy was started, or since the process group was opened."""
        return time.monotonic() - self._started_at

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being sent."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self, parameters: Mapping[str, Tensor], sync: SyncMode, optimizer: MuonAdamW, meta: dict[str, Any]
    ) -> None:
        """Copy the part of this rank and start to send it to the coordinator.

        All ranks call it after the same step. parameters: {name: tensor} of the model. sync, optimizer: have
        the state of this rank. meta: on the coordinator, content of meta.json for this step. Raises PeerLost
        if the transfer of the copy before has failed.
        """
        self.finish()
        began = self._started_at = time.monotonic()
        part = _part_of(self._group.rank, parameters, sync, optimizer)
        formats = self._group.gather_bytes(formats_of(part))
        mine = _pack(part, self._spare.pop(0) if self._spare else None)
        sizes = self._group.gather_int64(torch.tensor([mine.numel()])).flatten().tolist()
        rows = {name: found for name in parameters if (found := _rows_by_rank(name, sync, self._group))}
        copy = Copy(meta, formats, [mine], rows)
        self.megabytes = sum(sizes[1:]) / 1e6
        self.pause = time.monotonic() - began
        self._thread = threading.Thread(target=self._send, args=(copy, sizes), name="copy", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the started copy has arrived. Raises PeerLost if a member is lost meanwhile."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def stop(self) -> None:
        """After a loss, wait until the thread that sends a copy has given up."""
        with contextlib.suppress(PeerLost):
            self.finish()

    def _send(self, copy: Copy, sizes: list[int]) -> None:
        rank, began = self._group.rank, time.monotonic()
        try:
            received = [torch.empty(size if rank == 0 else 0, dtype=torch.uint8) for size in sizes[1:]]
            for start in range(0, max(sizes[1:], default=0), CHUNK_BYTES):
                lengths = [max(0, min(CHUNK_BYTES, size - start)) for size in sizes]
                lengths[0] = 0
                sends = [lengths[rank], *[0] * (len(sizes) - 1)]
                receives = lengths if rank == 0 else [0] * len(sizes)
                chunk = copy.parts[0][start : start + lengths[rank]] if rank else copy.parts[0][:0]
                arrived = self._channel.exchange(chunk, sends, receives)
                for into, piece in zip(received, arrived.split(receives)[1:], strict=True):
                    into[start : start + len(piece)] = piece
        except Exception as error:  # in a thread: `finish` raises it on the training one
            self._problem = error
            return
        if rank == 0:
            copy.parts += received
            old, self.newest = self.newest, copy
            self._spare = old.parts[:1] if old else []
        else:
            self._spare = copy.parts
        self.seconds = time.monotonic() - began


def state_of(copy: Copy | None) -> State | None:
    """The state of the run that `copy` contains, as of a checkpoint; None if `copy` is None."""
    if copy is None:
        return None
    model: dict[str, Tensor] = {}
    optim: dict[str, ParameterState] = {}
    for rank, (formats, data) in enumerate(zip(copy.formats, copy.parts, strict=True)):
        for path, tensor in tensors_of(formats, data).items():
            group, _, last = path.rpartition("/")
            name = last if group == MODEL else group
            into = model if group == MODEL else optim.setdefault(name, {})
            if tensor.dim() == 0 or name not in copy.rows:
                into[last] = tensor
                continue
            own = copy.rows[name]
            if group == MODEL and rank == 0:  # the coordinator has all rows; those of others may be stale
                into[last] = tensor.clone()
            elif last not in into:
                into[last] = tensor.new_empty(sum(map(len, own)), *tensor.shape[1:])
            if not (group == MODEL and rank == 0):
                into[last][own[rank]] = tensor
    return State(dict(copy.meta), model, optim)


def _part_of(
    rank: int, parameters: Mapping[str, Tensor], sync: SyncMode, optimizer: MuonAdamW
) -> dict[str, Tensor]:
    """What this rank has and the coordinator lacks; on the coordinator, all that it has."""
    part: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        rows = sync.owned_rows(name, rank)
        if rank == 0:
            part[f"{MODEL}/{name}"] = tensor
        elif rows is not None:
            part[f"{MODEL}/{name}"] = tensor[rows]
    for name, tensors in optimizer.state_dict().items():
        is_own = sync.owned_rows(name, rank) is not None or sync.owner_of(name) == rank
        if rank == 0 or is_own:
            part |= {f"{name}/{key}": tensor for key, tensor in tensors.items()}
    return part


def _rows_by_rank(name: str, sync: SyncMode, group: Collectives) -> list[Tensor]:
    rows = [sync.owned_rows(name, rank) for rank in range(group.world_size)]
    return [each for each in rows if each is not None]


def _pack(part: Mapping[str, Tensor], into: Tensor | None) -> Tensor:
    """The bytes of all tensors, one after another; in `into` if it has the right length."""
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in part.values()]
    size = sum(map(len, flat))
    out = into if into is not None and len(into) == size else torch.empty(size, dtype=torch.uint8)
    return torch.cat(flat, out=out)
