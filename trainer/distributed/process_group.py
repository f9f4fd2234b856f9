"""The process group of a run and its collectives. With one rank nothing is sent.

Tensors on a CPU go over Gloo, those on a GPU over NCCL.

A collective that fails raises PeerLost, which names the peer that is gone or unreachable.
Bytes are counted as Gloo's algorithms send them: a ring for all-reduce and all-gather, a binomial tree for
broadcast, and each piece of an exchange once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed import abandoned
from trainer.host.memory import is_out_of_memory
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final, Retryable

# Gloo gives up connecting after five times its time-out, so this is 45 s.
FIRST_TIMEOUT = timedelta(seconds=9)
FIRST_NCCL_TIMEOUT = timedelta(seconds=60)  # to find and join all GPUs
# Until steps are measured: loading a checkpoint, compiling, the first step of a slow host.
UNMEASURED_TIMEOUT = timedelta(minutes=10)
SLOWEST = 10  # another rank may take this many times as long as this rank for the same work
CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
CHUNK_BYTES = 32 * 2**20
# Gloo sends only what the receiver has announced to receive, and this announcement waits behind the data that
# is being sent to the sender. So two ranks that send each other much at once would take turns. With pieces of
# this size both directions are in use.
PIECE_BYTES = 512 * 2**10
CHANGED = "The members of the run have changed."
WAIT_SLICE = timedelta(milliseconds=200)
# A collective that fails or times out must raise where it is waited for. By default NCCL's watchdog ends the
# process instead, without an exception that could become an outcome.
NCCL_RAISES = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


Pending = Callable[[], Any]  # a started collective, for Collectives.wait


class PeerLost(Retryable):
    """Raised if a collective failed because a peer is gone, frozen or unreachable."""


@dataclass(frozen=True)
class Peer:
    """A rank as the other ranks know it. Messages name it "rank 1 (laptop)".

    rank: its number. host: name of its host. address: IP address of the host.
    """

    rank: int
    host: str
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Collectives:
    """The collectives of the ranks of a run. `open` connects the ranks and creates the object.

    rank: the number of this rank. world_size: the number of ranks. peers: all ranks, in rank order.
    owner_speeds: relative speed of each rank, by which matrices are assigned to owner ranks; empty: equal.
    launch_ranks: by rank, the number that the rank had when it started. In an elastic run a rank keeps this
        number when other ranks are lost or join. n_launch_ranks: an upper bound; each number is lower.
    bytes_sent: the number of bytes that this rank has sent so far, without those of a Channel or Subgroup.
    is_waiting: whether the main thread waits in a collective.
    interruption: function that returns the reason to stop waiting for other ranks, or "" if there is none;
        None: a wait ends only with its collective.
    """

    def __init__(self, env: RankEnv, peers: list[Peer]) -> None:
        self.rank = env.rank
        self.world_size = env.world_size
        self.peers = peers
        self.owner_speeds: list[float] = []  # relative, by rank; empty: all equal
        self.launch_ranks: Sequence[int] = range(env.world_size)
        self.n_launch_ranks = env.world_size
        self.bytes_sent = 0
        self.is_waiting = False  # whether the main thread waits in a collective
        # Why to give up waiting for the other ranks, or "". None: a wait ends only with its collective.
        self.interruption: Callable[[], str] | None = None
        self._others: list[Any] = []  # further process groups of its ranks
        self._sockets: set[int] = set()  # of all its process groups: see abandoned.watched_sockets
        self._store_port = env.master_port
        self.timeout = UNMEASURED_TIMEOUT  # of collectives
        self._timeout = FIRST_TIMEOUT  # to connect; Gloo gives up after five times that
        self._is_abandoned = False
        self._starting = threading.Lock()  # while another thread starts a collective
        self._in_flight: dict[int, tuple[Any, Any]] = {}  # id -> (work, its tensors)
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # entered by `wait`

    @classmethod
    def open(
        cls,
        env: RankEnv,
        peers: list[Peer],
        store: dist.Store | None,
        device: torch.device = CPU,
    ) -> Collectives:
        """Start the process group of torch.distributed; returns when all ranks are connected.

        env: environment of this rank. peers: all ranks, in rank order. store: the rendezvous store; None with
        one rank. device: the device of the tensors to reduce; for a GPU, NCCL connects too, with a time-out
        of a minute. Raises PeerLost if a rank cannot be connected.
        The environment variables NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select the network interface.
        """
        group = cls(env, peers)
        group.connect(store, device)
        return group

    def connect(
        self,
        store: dist.Store | None,
        device: torch.device = CPU,
        name: str = "gloo",
        timeout: timedelta = FIRST_TIMEOUT,
    ) -> None:
        """Start the process group, as `open` does. If it raises PeerLost, `abandon` ends the connections.

        name: the prefix of the group's keys in `store`, different for each group. timeout: Gloo gives up
        connecting after five times this time.
        """
        self._timeout = timeout
        if self.world_size == 1:
            return
        assert store is not None
        if device.type == "cuda":
            os.environ.update(NCCL_RAISES)
        before = abandoned.watched_sockets()
        with self._peer_errors():
            try:
                dist.init_process_group(
                    BACKENDS[device.type],
                    store=dist.PrefixStore(name, store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timeout,
                )
            finally:  # also those of a group that is not complete
                self._sockets = abandoned.watched_sockets() - before
            dist.all_reduce(torch.zeros(1))
            if device.type == "cuda":
                self.set_timeout(FIRST_NCCL_TIMEOUT)
                dist.all_reduce(torch.zeros(1, device=device))
        self.set_timeout(UNMEASURED_TIMEOUT)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of the collectives of this group. torch has only a private function for this."""
        self.timeout = timeout
        if self.world_size > 1:
            dist.distributed_c10d._set_pg_timeout(timeout)

    def wait_for_slower(self, seconds: float) -> None:
        """Raise the time-out of collectives to SLOWEST times `seconds`, if it is shorter.

        seconds: the time that this rank has computed before a collective that slower ranks join later.
        """
        if SLOWEST * seconds > self.timeout.total_seconds():
            self.set_timeout(timedelta(seconds=SLOWEST * seconds))

    def close(self) -> None:
        """Wait until all ranks call this, then end the process group, so that no rank reports a lost peer."""
        if self.world_size > 1 and dist.is_initialized():
            with self._peer_errors():
                dist.all_reduce(torch.zeros(1))  # a barrier, over Gloo on a GPU too
                dist.destroy_process_group()

    def abandon(self) -> None:
        """End the process group although collectives may be in flight, so that another one can be opened.

        If another thread waits for a collective, its wait ends with PeerLost. Collectives in flight may still
        write into their tensors, and the destructor of a process group would wait for them. So a background
        thread keeps the groups and tensors until these collectives have ended (see abandoned.py).
        """
        with self._starting:
            self._is_abandoned = True
        if dist.is_initialized():
            held = [dist.group.WORLD, *self._others], self._in_flight, self._sockets, self._store_port
            self._in_flight, self._others, self._sockets = {}, [], set()
            ending = threading.Thread(target=dist.destroy_process_group, name="abandoned group", daemon=True)
            ending.start()
            ending.join()
            threading.Thread(target=abandoned.drop, args=held, name="abandoned tensors", daemon=True).start()

    # -- tensors ---------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replace each flat tensor in place by its sum over all ranks, with the same bytes on each rank."""
        self.wait([self.start_all_reduce(tensor) for tensor in tensors])

    def broadcast_owned(self, owned: Mapping[int, Tensor]) -> None:
        """Broadcast the flat tensor of each owner rank; the other ranks receive it in place.

        owned: {owner rank: tensor}, with the same keys on all ranks.
        """
        self.wait(self.start_broadcasts(owned).values())

    def wait(self, pending: Iterable[Pending]) -> list[Any]:
        """Wait for started collectives and return their results, in order.

        All ranks must start collectives in the same order. Raises PeerLost if a collective fails.
        """
        with self.waiting(), self._peer_errors():
            return [wait() for wait in pending]

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Start to replace a flat tensor in place by its sum over all ranks; `wait` completes it."""
        n = self.world_size
        return self._start(
            tensor, 2 * (n - 1) / n, lambda part: dist.all_reduce(part, op=dist.ReduceOp.SUM, async_op=True)
        )

    def start_reduces(self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None) -> Pending:
        """Start to add, for each owner rank, the flat tensors of all other ranks to its own, in place.

        parts: {owner rank: flat tensor}, with the same keys and sizes on all ranks. `wait` returns when this
        rank has its sum, if it is an owner, and has sent its tensors to the other owners. The owner adds the
        tensors of the other ranks to its own tensor in rank order. dtype: the number format in which tensors
        are sent; None: that of `parts`. Gloo's reduce is not used because the owner would send data too, and
        Gloo's gather because it needs twice the memory of the received data.
        """
        return _all([self._start_sum(pieces, dtype) for pieces in self._pieces(parts)])

    def _start_sum(self, pieces: Mapping[int, Tensor], dtype: torch.dtype | None) -> Pending:
        """Start the reduce of one piece for each owner rank. pieces: as `_pieces` yields them."""
        first = next(iter(pieces.values()))
        own = pieces.get(self.rank, first[:0])
        nothing = first.new_empty(0, dtype=dtype or first.dtype)
        room = nothing.new_empty((self.world_size - 1) * own.numel())
        into = list(room.split(own.numel())) if own.numel() else [nothing] * (self.world_size - 1)
        into.insert(self.rank, nothing)
        sent = [
            pieces[rank].to(nothing.dtype) if rank in pieces and rank != self.rank else nothing
            for rank in range(self.world_size)
        ]
        self.bytes_sent += sum(each.numel() * each.element_size() for each in sent)
        received = self._start_piece(sent, into, room)

        def add_up() -> None:
            received()
            for values in room.view(self.world_size - 1, own.numel()):
                own.add_(values)

        return add_up

    def start_broadcasts(self, parts: Mapping[int, Tensor]) -> dict[int, Pending]:
        """Start to broadcast the flat tensors of several owner ranks, as `start_broadcast` does for one.

        parts: {owner rank: flat tensor}, with the same keys and sizes on all ranks. Returns {owner rank:
        pending}. The owner ranks take turns after each piece, so that all directions are in use.
        """
        waits: dict[int, list[Pending]] = {owner: [] for owner in parts}
        for pieces in self._pieces(parts):
            for owner, piece in pieces.items():
                waits[owner].append(self.start_broadcast(piece, owner))
        return {owner: _all(started) for owner, started in waits.items()}

    def _pieces(self, parts: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
        """Split each tensor of `parts` into pieces; yield {owner rank: piece}, the first pieces first.

        parts: {owner rank: flat tensor}. A tensor without further pieces is left out. Yields nothing with one
        rank.
        """
        split = {owner: part.split(self._piece_size(part, PIECE_BYTES)) for owner, part in parts.items()}
        turns = max(map(len, split.values()), default=0) if self.world_size > 1 else 0
        for turn in range(turns):
            yield {owner: pieces[turn] for owner, pieces in split.items() if turn < len(pieces)}

    def _piece_size(self, tensor: Tensor, piece_bytes: int) -> int:
        """The number of values of `tensor` in `piece_bytes` bytes; on a GPU in CHUNK_BYTES."""
        return max(1, (CHUNK_BYTES if tensor.is_cuda else piece_bytes) // tensor.element_size())

    def start_exchange(
        self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int], largest: int = 0
    ) -> tuple[Tensor, Pending]:
        """Start to send a part of the flat `tensor` to each rank, and to receive one from each rank.

        sends, receives: by rank, the number of values sent to that rank and received from it; 0 for this rank
        itself. `tensor` and the tensor received have the parts one after another, in rank order. largest: the
        largest number of values that a rank sends to another one, equal on all ranks: the parts are then sent
        in pieces, so that both directions are in use; 0 if it is not known. Returns the tuple (received,
        pending). `self.wait([pending])` fills `received`, a flat tensor.
        """
        received = tensor.new_empty(sum(receives))
        if self.world_size == 1:
            return received, lambda: None
        self.bytes_sent += tensor.numel() * tensor.element_size()
        if not largest:
            return received, self._start_all_to_all(tensor, received, sends, receives)
        sent, into = tensor.split(list(sends)), received.split(list(receives))
        size, waits = self._piece_size(tensor, PIECE_BYTES), []
        for start in range(0, largest, size):
            pieces, rooms = ([part[start : start + size] for part in parts] for parts in (sent, into))
            waits.append(self._start_piece(pieces, rooms))
        return received, _all(waits)

    def _start_piece(
        self, sent: Sequence[Tensor], into: Sequence[Tensor], room: Tensor | None = None
    ) -> Pending:
        """Start to send the flat tensor sent[rank] to each rank, and to receive into[rank] from it.

        room: a flat tensor of which `into` has consecutive views; None if it does not.
        """
        sends, receives = [each.numel() for each in sent], [each.numel() for each in into]
        # With two ranks, each has one tensor that is not empty, and nothing is copied.
        sources, targets = ([each for each in tensors if each.numel()] for tensors in (sent, into))
        piece = sources[0] if len(sources) == 1 else torch.cat(list(sent))
        copied = None
        if room is None:
            room = targets[0] if len(targets) == 1 else into[0].new_empty(sum(receives))
            copied = room if len(targets) > 1 else None
        wait = self._start_all_to_all(piece, room, sends, receives)

        def finish() -> None:
            wait()
            if copied is not None:
                for view, values in zip(into, copied.split(receives), strict=True):
                    view.copy_(values)

        return finish

    def _start_all_to_all(
        self, sent: Tensor, received: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> Pending:
        sizes = list(receives), list(sends)
        return self._launch(
            lambda part: dist.all_to_all_single(received, part, *sizes, async_op=True), [sent]
        )

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Start to gather flat tensors of equal length on every rank.

        tensor: (n,). Returns the tuple (table, pending). `self.wait([pending])` fills `table`, (world_size,
        n), which has a row for each rank, in rank order.
        """
        table = tensor.expand(self.world_size, -1).clone()

        def start(rows: Sequence[Tensor], piece: Tensor) -> Pending:
            return self._start(
                piece, self.world_size - 1, lambda part: dist.all_gather(list(rows), part, async_op=True)
            )

        size = self._piece_size(tensor, PIECE_BYTES)
        rows = zip(*(row.split(size) for row in table), strict=True)
        waits = [start(each, piece) for each, piece in zip(rows, tensor.split(size), strict=True)]
        return table, _all(waits)

    def start_broadcast(self, tensor: Tensor, owner: int) -> Pending:
        """Start to broadcast the flat tensor of `owner`; the other ranks receive it in place."""
        return self._start(
            tensor,
            broadcast_sends((self.rank - owner) % self.world_size, self.world_size),
            lambda part: dist.broadcast(part, src=owner, async_op=True),
        )

    def _start(self, tensor: Tensor, copies: float, start: Callable[[Tensor], Any]) -> Pending:
        if self.world_size == 1 or not tensor.numel():
            return lambda: None
        self.bytes_sent += round(copies * tensor.numel() * tensor.element_size())
        return self._launch(start, tensor.split(self._piece_size(tensor, CHUNK_BYTES)))

    def _launch(self, start: Callable[[Tensor], Any], parts: Iterable[Tensor]) -> Pending:
        with self._peer_errors():
            works = [(start(part), part) for part in parts]
            self._in_flight.update({id(work): (work, part) for work, part in works})

        def finish() -> None:
            for work, part in works:
                self.finish(work, part)

        return finish

    def start_on_other(self, start: Callable[[], Any]) -> Any:
        """Call `start`, which starts a collective of another process group of these ranks.

        Returns the result of `start`. Raises PeerLost if `abandon` has ended the process groups of these
        ranks.
        """
        with self._starting:
            if self._is_abandoned:
                raise PeerLost(CHANGED)
            return start()

    def finish(self, work: Any, tensors: Any) -> None:
        """Wait for `work`, torch's handle of a started collective that reads or writes `tensors`.

        Raises RuntimeError if the collective fails, and PeerLost as soon as `interruption` returns a reason.
        After PeerLost the collective continues, and this object keeps `tensors` for it.
        """
        self._in_flight[id(work)] = work, tensors
        if self.interruption is None:
            work.wait()
        else:
            self._wait_in_slices(work)
        self._in_flight.pop(id(work), None)

    def _wait_in_slices(self, work: Any) -> None:
        """Wait for a Gloo collective, WAIT_SLICE at a time; a wait that times out does not end it.

        work: torch's handle of the collective. Errors: as for `finish`.
        """
        while True:
            try:
                work.wait(WAIT_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error of the work, if it has one
                    return
                if self._is_abandoned:
                    raise PeerLost(CHANGED) from None
                if self.interruption and (reason := self.interruption()):
                    raise PeerLost(reason) from None

    # -- small messages --------------------------------------------------------------------------------

    def gather_int64(self, values: Tensor) -> Tensor:
        """Gather the int64 `values`, shape (n,), of all ranks on every rank: shape (world_size, n)."""
        if self.world_size == 1:
            return values[None]
        table = values.new_empty((self.world_size, values.numel()))
        self.bytes_sent += values.numel() * values.element_size() * (self.world_size - 1)
        rows = list(table.unbind())
        with self._peer_errors():
            self.finish(dist.all_gather(rows, values, async_op=True), (rows, values))
        return table

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Gather the bytes `mine` of all ranks on every rank, in rank order. The lengths may differ."""
        lengths = self.gather_int64(torch.tensor([len(mine)])).flatten().tolist()
        if not any(lengths):
            return [b""] * self.world_size
        size = torch.int64.itemsize
        padded = torch.zeros(-(-max(lengths) // size) * size, dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        table = self.gather_int64(padded.view(torch.int64)).view(torch.uint8)
        return [row[:length].numpy().tobytes() for row, length in zip(table, lengths, strict=True)]

    def raise_problems(self, problem: str | None) -> None:
        """Raise Final on every rank if any rank passes a `problem`, a sentence. None or "": no problem."""
        if self.world_size == 1:
            if problem:
                raise Final(problem)
            return
        for peer, sentence in zip(self.peers, self.gather_bytes((problem or "").encode()), strict=True):
            if sentence:
                raise Final(f"{peer}: {sentence.decode()}")

    def open_channel(self, name: str) -> Channel:
        """Connect the ranks a second time; returns the channel, for use by another thread. All ranks call it.

        name: a name for the new process group, equal on all ranks. Raises PeerLost if a rank cannot be
        connected.
        """
        if self.world_size == 1:
            return Channel(self, None)
        with self._peer_errors():
            return Channel(self, self.connect_again(name))

    def connect_again(self, name: str, ranks: Sequence[int] | None = None) -> Any:
        """Open another process group beside this one; returns torch's handle of it. All ranks call it.

        name: description of the new group. ranks: the ranks of the new group; None: all. Connecting has the
        time-out of the first connection. Collectives of the new group have UNMEASURED_TIMEOUT. Raises
        PeerLost if a rank is lost before it connects, RuntimeError if it cannot be connected.
        """
        # If a rank is lost already, this collective fails at once; connecting would fail at its time-out.
        self.gather_int64(torch.tensor([0]))
        before = abandoned.watched_sockets()
        made = dist.new_group(ranks, self._timeout, backend="gloo", group_desc=name)
        self._sockets |= abandoned.watched_sockets() - before
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.distributed_c10d._set_pg_timeout(UNMEASURED_TIMEOUT, made)
        self._others.append(made)  # its destructor would wait for a transfer that was given up: see abandon
        return made

    # -- failures --------------------------------------------------------------------------------------

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        before, self.is_waiting = self.is_waiting, True
        try:
            yield
        except RuntimeError as error:
            raise self.peer_lost(error) from None
        finally:
            self.is_waiting = before

    def peer_lost(self, error: RuntimeError) -> Exception:
        """The exception for a failed collective: `error` itself if it is out of memory, else PeerLost."""
        return error if is_out_of_memory(error) else PeerLost(self._name_peer(str(error)))

    def _name_peer(self, message: str) -> str:
        """A sentence on a failed collective: the lost peer, or all peers that it may be, and the cause.

        message: Gloo's error, in which a lost peer has only its address, or no name at all.
        """
        cause = re.sub(r"^\[[^\]]*\]\s*", "", (message.strip().splitlines() or ["no reason given"])[0])
        cause = cause.split(". This ")[0]  # general advice follows
        others = [peer for peer in self.peers if peer.rank != self.rank]
        named = [peer for peer in others if peer.address and f"{peer.address}]" in message] or others
        names = " or ".join(map(str, named[:4])) + (" or another" if len(named) > 4 else "")
        if "Timed out" in message or "timeout" in message.lower():
            return f"{names} did not answer in time: it is frozen, slow or unreachable ({cause})."
        return f"Lost {names}: its process or its host is gone ({cause})."


class Channel:
    """A second process group of the same ranks, which another thread may use while the first is in use.

    group: the first process group. process_group: torch's handle of the second one; None with one rank.
    """

    def __init__(self, group: Collectives, process_group: Any) -> None:
        self._group, self._process_group = group, process_group

    def exchange(
        self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Exchange parts of `tensor` as `Collectives.start_exchange` does; returns the flat tensor received.

        out: the flat tensor to receive into, of sum(receives) values; None: a new one. Raises PeerLost if the
        exchange fails; `out` must then not be used again.
        """
        received = tensor.new_empty(sum(receives)) if out is None else out
        if self._process_group is None:
            return received
        try:
            sizes = list(receives), list(sends)
            work = self._group.start_on_other(
                lambda: dist.all_to_all_single(received, tensor, *sizes, self._process_group, async_op=True)
            )
            self._group.finish(work, (received, tensor))
        except RuntimeError as error:
            raise self._group.peer_lost(error) from None
        return received


def _all(waits: Sequence[Pending]) -> Pending:
    """A function that calls all of `waits`, in order."""

    def wait() -> None:
        for each in waits:
            each()

    return wait


def broadcast_sends(virtual_rank: int, world_size: int) -> int:
    """The number of ranks to which a rank sends in Gloo's binomial broadcast.

    virtual_rank: (rank - source rank) % world_size, so that the source has 0.
    """
    return sum(
        1
        for bit in range((world_size - 1).bit_length())
        if virtual_rank < 2**bit and virtual_rank + 2**bit < world_size
    )
