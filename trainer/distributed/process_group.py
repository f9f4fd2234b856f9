"""All ranks as one group, and what they say to each other. With one rank nothing here sends a byte.

Tensors of a CPU, words among them, go over Gloo and those of a GPU over NCCL.

Every failure of a collective means that a peer is gone or cut off; it becomes PeerLost, which names it.
Bytes are counted as Gloo's algorithms send them: ring all-reduce and all-gather, gather to one, binomial
broadcast.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.host.rank_env import Place
from trainer.outcome import Final, Retryable

# Gloo gives up connecting after five times its time-out, so this is 45 s.
FIRST_TIMEOUT = timedelta(seconds=9)
FIRST_NCCL_TIMEOUT = timedelta(seconds=60)  # to find and join all GPUs
# Until a step has been measured: loading a checkpoint, compiling, the first step of a slow host.
UNMEASURED_TIMEOUT = timedelta(minutes=10)
CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
CHUNK_BYTES = 32 * 2**20
# A collective that fails or is late must raise where it is waited for. By default NCCL's watchdog ends the
# process instead, without a word that could become an outcome.
NCCL_RAISES = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


Pending = Callable[[], Any]  # what was started, to be waited for with Group.wait


class PeerLost(Retryable):
    """A collective failed: a peer is gone, frozen or cut off."""


@dataclass(frozen=True)
class Peer:
    """A rank as the others speak of it."""

    rank: int
    host: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Group:
    """The ranks of a run. Make it with `open`, which returns only when all of them have met."""

    def __init__(self, place: Place, peers: list[Peer]) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.peers = peers
        self.owner_speeds: list[float] = []  # relative, by rank; none: all alike
        self.bytes_sent = 0
        self.waits = False  # whether the main thread is in a collective
        self.seconds_waited = 0.0

    @classmethod
    def open(
        cls,
        place: Place,
        peers: list[Peer],
        store: dist.Store | None,
        device: torch.device = CPU,
    ) -> Group:
        """Connect every rank with every other; raises PeerLost if that does not succeed within a minute.

        On a GPU, NCCL has a minute more. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the interface.
        """
        group = cls(place, peers)
        if group.world_size > 1:
            assert store is not None
            with group._naming_the_peer():
                if device.type == "cuda":
                    os.environ.update(NCCL_RAISES)
                dist.init_process_group(
                    BACKENDS[device.type],
                    store=dist.PrefixStore("gloo", store),
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=FIRST_TIMEOUT,
                )
                dist.all_reduce(torch.zeros(1))
                if device.type == "cuda":
                    group.set_timeout(FIRST_NCCL_TIMEOUT)
                    dist.all_reduce(torch.zeros(1, device=device))
            group.set_timeout(UNMEASURED_TIMEOUT)
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may last from now on. A private call: torch has no public one."""
        if self.world_size > 1:
            dist.distributed_c10d._set_pg_timeout(timeout)

    def close(self) -> None:
        """Part in order, so that nobody takes the end for a failure."""
        if self.world_size > 1 and dist.is_initialized():
            with self._naming_the_peer():
                dist.all_reduce(torch.zeros(1))  # a barrier, over Gloo on a GPU too
                dist.destroy_process_group()

    # -- tensors ---------------------------------------------------------------------------------------

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each flat tensor by its sum over all ranks: the same bytes everywhere."""
        self.wait([self.start_sum(tensor) for tensor in tensors])

    def hand_out(self, owned: Mapping[int, Tensor]) -> None:
        """Give every rank each owner's bytes."""
        self.wait([self.start_hand_out(tensor, owner) for owner, tensor in owned.items()])

    def wait(self, pending: Iterable[Pending]) -> list[Any]:
        """Until all of these are done, whatever they return; the time it takes is counted.

        What is started must be started in the same order on all ranks.
        """
        began = time.monotonic()
        with self._naming_the_peer():
            results = [wait() for wait in pending]
        self.seconds_waited += time.monotonic() - began
        return results

    def start_sum(self, tensor: Tensor) -> Pending:
        """Begin to replace a flat tensor by its sum over all ranks."""
        n = self.world_size
        return self._start(
            tensor, 2 * (n - 1) / n, lambda part: dist.all_reduce(part, op=dist.ReduceOp.SUM, async_op=True)
        )

    def start_collect(self, tensor: Tensor, owner: int) -> Pending:
        """Begin to add the others' flat tensors to the owner's. Gloo's own reduce has the owner send too."""
        if self.rank != owner or self.world_size == 1:
            return self.start_gather(tensor, None, owner)
        table = tensor.new_empty(self.world_size, tensor.numel())
        gathered = self.start_gather(tensor, table, owner)

        def add_up() -> None:
            gathered()
            for rank, values in enumerate(table):
                if rank != owner:
                    tensor.add_(values)

        return add_up

    def start_gather(self, tensor: Tensor, table: Tensor | None, owner: int) -> Pending:
        """Begin to bring all flat tensors to the owner's `table`, (world_size, n), which others lack."""
        rows = list(table.unbind()) if table is not None else None
        return self._start(
            tensor,
            0.0 if self.rank == owner else 1.0,
            lambda part: dist.gather(part, rows, dst=owner, async_op=True),
            whole=True,
        )

    def start_gather_all(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Begin to bring all flat tensors, of one length, to every rank: (world_size, n), once waited for."""
        table = tensor.expand(self.world_size, -1).clone()
        rows = list(table.unbind())
        pending = self._start(
            tensor,
            self.world_size - 1,
            lambda part: dist.all_gather(rows, part, async_op=True),
            whole=True,
        )
        return table, pending

    def start_hand_out(self, tensor: Tensor, owner: int) -> Pending:
        """Begin to give every rank the owner's flat tensor."""
        return self._start(
            tensor,
            broadcast_sends((self.rank - owner) % self.world_size, self.world_size),
            lambda part: dist.broadcast(part, src=owner, async_op=True),
        )

    def _start(
        self, tensor: Tensor, copies: float, start: Callable[[Tensor], Any], whole: bool = False
    ) -> Pending:
        if self.world_size == 1 or not tensor.numel():
            return lambda: None
        self.bytes_sent += round(copies * tensor.numel() * tensor.element_size())
        parts = (tensor,) if whole else tensor.split(max(1, CHUNK_BYTES // tensor.element_size()))
        return self._launch(start, parts)

    def _launch(self, start: Callable[[Tensor], Any], parts: Iterable[Tensor]) -> Pending:
        with self._naming_the_peer():
            works = [start(part) for part in parts]
        return lambda: [work.wait() for work in works]

    # -- words -----------------------------------------------------------------------------------------

    def gather_int64(self, values: Tensor) -> Tensor:
        """Every rank's int64 values, shape (world_size, n), on every rank."""
        if self.world_size == 1:
            return values[None]
        table = values.new_empty((self.world_size, values.numel()))
        self.bytes_sent += values.numel() * values.element_size() * (self.world_size - 1)
        with self._naming_the_peer():
            dist.all_gather(list(table.unbind()), values)
        return table

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's words, of any length, on every rank."""
        lengths = self.gather_int64(torch.tensor([len(mine)])).flatten().tolist()
        if not any(lengths):
            return [b""] * self.world_size
        padded = torch.zeros(max(lengths), dtype=torch.int64)
        padded[: len(mine)] = torch.tensor(list(mine))
        table = self.gather_int64(padded).to(torch.uint8)
        return [row[:length].numpy().tobytes() for row, length in zip(table, lengths, strict=True)]

    def agree(self, problem: str | None) -> None:
        """End the run on every rank if one has a problem, with that rank's sentence."""
        if self.world_size == 1:
            if problem:
                raise Final(problem)
            return
        for peer, said in zip(self.peers, self.gather_bytes((problem or "").encode()), strict=True):
            if said:
                raise Final(f"{peer}: {said.decode()}")

    def broadcast_named(self, tensors: Mapping[str, Tensor] | None, source: int = 0) -> dict[str, Tensor]:
        """Give every rank the named tensors of `source`; the others pass None and get them on the CPU.

        Nothing is pickled.
        """
        if self.world_size == 1:
            return dict(tensors or {})
        header = _header(tensors or {})
        size = torch.tensor([len(header)])
        self.hand_out({source: size})
        packed = torch.tensor(list(header), dtype=torch.uint8) if tensors is not None else None
        if packed is None or self.rank != source:
            packed = torch.empty(int(size), dtype=torch.uint8)
        self.hand_out({source: packed})
        out = dict(tensors) if tensors is not None and self.rank == source else _allocate(packed)
        for tensor in out.values():
            self.hand_out({source: _flat_on_cpu(tensor)})
        return out

    def bring_to_coordinator(self, tensors: Mapping[str, Tensor], owner: int) -> dict[str, Tensor]:
        """Give rank 0 the named tensors of `owner`; returns them there, on the CPU, and nothing elsewhere."""
        if owner == 0:
            return dict(tensors) if self.rank == 0 else {}
        with self._naming_the_peer():
            if self.rank == owner:
                header = _header(tensors)
                dist.send(torch.tensor([len(header)]), dst=0)
                dist.send(torch.tensor(list(header), dtype=torch.uint8), dst=0)
                for tensor in tensors.values():
                    dist.send(_flat_on_cpu(tensor), dst=0)
            elif self.rank == 0:
                size = torch.empty(1, dtype=torch.int64)
                dist.recv(size, src=owner)
                packed = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(packed, src=owner)
                out = _allocate(packed)
                for tensor in out.values():
                    dist.recv(tensor.view(-1), src=owner)
                return out
        return {}

    # -- failures --------------------------------------------------------------------------------------

    @contextmanager
    def _naming_the_peer(self) -> Iterator[None]:
        before, self.waits = self.waits, True
        try:
            yield
        except torch.OutOfMemoryError:  # of a GPU; no peer's fault
            raise
        except RuntimeError as error:
            raise PeerLost(self._blame(str(error))) from None
        finally:
            self.waits = before

    def _blame(self, message: str) -> str:
        """Gloo names the other end by address; say whose it is."""
        cause = re.sub(r"^\[[^\]]*\]\s*", "", (message.strip().splitlines() or ["no reason given"])[0])
        cause = cause.split(". This ")[0]  # general advice follows
        others = [peer for peer in self.peers if peer.rank != self.rank]
        named = [peer for peer in others if peer.address and f"{peer.address}]" in message] or others
        who = " or ".join(map(str, named[:4])) + (" or another" if len(named) > 4 else "")
        if "Timed out" in message or "timeout" in message.lower():
            return f"{who} did not answer in time: it is frozen, slow or cut off ({cause})."
        return f"Lost {who}: its process or its host is gone ({cause})."


def broadcast_sends(virtual_rank: int, world_size: int) -> int:
    """To how many ranks Gloo's binomial broadcast makes a rank send; the source is virtual rank 0."""
    return sum(
        1
        for bit in range((world_size - 1).bit_length())
        if virtual_rank < 2**bit and virtual_rank + 2**bit < world_size
    )


def _flat_on_cpu(tensor: Tensor) -> Tensor:
    """A tensor's values in a row on the CPU: the tensor's own memory where it lies so already."""
    return tensor.detach().cpu().contiguous().view(-1)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    return json.dumps(described).encode()


def _allocate(packed: Tensor) -> dict[str, Tensor]:
    described = json.loads(packed.numpy().tobytes())
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
