"""Copies of the state of a run in the memory of its ranks, from which members continue after a loss.

    copies = Snapshots(group, newest, [0, 1], view)       # new for each process group
    copies.start(step, model, sync, optimizer, meta)      # every rank copies its part; a thread sends it
    copies.finish()                                       # wait until the copy has arrived
    held = held_of(copies.newest)                         # what this rank has after a loss

The ranks that have the whole state are the holders: the coordinator and, with coordinator_failover, the first
rank of the next host, which is the first candidate if the coordinator is lost. Each rank sends its part,
which the holders lack: the optimizer state of the matrices and rows that the rank owns, and the values of
these rows of embeddings. Training continues during the transfer, which has its own connections.
With coordinator_failover each other rank keeps what it had itself at that step, so that it receives little
after a loss. A complete copy replaces the previous one. A rank that keeps copies has memory for two, because
a member may be lost while a copy is sent.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Collectives, PeerLost
from trainer.distributed.tensor_format import formats_of, tensors_of
from trainer.elastic.reshard import MODEL, Held, Rows, hold, hold_copy, key_of
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

CHUNK_BYTES = 4 * 2**20
# The interval between copies, in seconds, and its least value as a multiple of the pause and of the transfer
# time of a copy: training pauses for at most 0.5 % of the time, and a copy is being sent for at most 5 % of
# it. If no host was lost lately, both are a third of that.
SHORTEST_INTERVAL, LONGEST_INTERVAL = 2.0, 60.0
PAUSES, TRANSFERS, CALM = 200, 20, 3
# A copy is sent while the training thread computes: on a slow link its own transfers would wait for the copy.
GAP_SECONDS = 20.0  # the longest wait for this in one copy; its rest is then sent without waits
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Layout:
    """Formats and sizes of the parts of a copy, one part per rank; equal for all copies of a process group.

    formats: for each rank, names, data types and shapes of the tensors in its part (see formats_of).
    rows: {key: for each rank, the numbers of the rows in its part}. It has only the keys (see Held) of
        tensors whose rows are divided among the ranks.
    sizes: for each rank, the number of bytes that it sends to a holder.
    own: {key: rows} for the tensors in the part of this rank, as in Held.
    """

    formats: list[bytes]
    rows: dict[str, list[Tensor]]
    sizes: list[int] = field(default_factory=list)
    own: dict[str, Rows] = field(default_factory=dict)


@dataclass
class Copy:
    """A copy of the state of a run after a step, whole or in part, in the memory of one rank.

    meta: content of meta.json for a checkpoint of this step. rank: the rank that has the copy.
    layout: formats and sizes of the parts of all ranks.
    parts: for each rank, the bytes of its tensors, uint8, flat. The part of `rank` has all tensors of that
        rank. The part of another rank has what the other rank owns, if `rank` is a holder (a rank that has
        the whole state); else it is empty.
    is_whole: whether the copy has the parts of all ranks, as on a holder.
    view: [term, generation] of the view (keys.py) in which the copy was made.
    """

    meta: dict[str, Any]
    rank: int
    layout: Layout
    parts: list[Tensor]
    is_whole: bool = True
    view: Sequence[int] = ()
    _assembly: Future[State] | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.meta["step"])

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(map(len, self.parts))

    @property
    def term(self) -> int:
        """The term in which the copy was made, in a run with coordinator_failover."""
        return int(self.meta["terms"][-1][0])

    def begin_assembly(self) -> Future[State]:
        """Start `assemble` in a thread, if not yet started; returns its Future. `take_state` waits for it."""
        if self._assembly is None:
            pool = ThreadPoolExecutor(1, "assemble")
            self._assembly = pool.submit(self.assemble)
            pool.shutdown(wait=False)
        return self._assembly

    def take_state(self) -> State:
        """The result of `assemble`, from the thread if `begin_assembly` was called."""
        assembly, self._assembly = self._assembly, None
        return assembly.result() if assembly else self.assemble()

    def assemble(self) -> State:
        """The state of the run in the form of a checkpoint. Only for a copy with `is_whole`.

        Tensors of which each rank owns some rows are new; the others share memory with the copy.
        """
        model: dict[str, Tensor] = {}
        optim: dict[str, ParameterState] = {}
        own_first = sorted(range(len(self.parts)), key=lambda rank: rank != self.rank)
        for rank in own_first:
            for path, tensor in tensors_of(self.layout.formats[rank], self.parts[rank]).items():
                key = key_of(path)
                name = path.rpartition("/")[2]
                into = model if path == key else optim.setdefault(key, {})
                rows = self.layout.rows.get(key)
                if rows is None or tensor.dim() == 0:
                    into[name] = tensor
                    continue
                if name not in into:
                    into[name] = tensor.new_empty(sum(map(len, rows)), *tensor.shape[1:])
                into[name][rows[rank]] = tensor
        return State(dict(self.meta), model, dict(sorted(optim.items())))  # in the same order on each holder


class Snapshots:
    """Makes copies of the state of a run in the memory of its ranks, for one process group.

    newest: the last complete copy; None if there is none, and on ranks that keep none.
    pause: seconds for which training paused to start the newest copy. Preparations for the first copy are not
        counted.
    megabytes: MB that the coordinator receives for a copy.
    seconds: duration of the last complete transfer, without the waits for this rank's training thread.
    """

    def __init__(
        self,
        group: Collectives,
        newest: Copy | None,
        holders: Sequence[int] = (0,),
        view: Sequence[int] = (),
        on_all: bool = False,
    ) -> None:
        """Connect the ranks of `group` for copies.

        newest: the last complete copy on this rank; None if there is none. holders: the ranks that have each
        copy: rank 0 and perhaps another one. view: [term, generation] of the current view (keys.py). on_all:
        whether each other rank keeps its own part. Raises PeerLost if a rank is lost.
        """
        self._group, self._holders, self._view = group, holders, view
        self._keepers = range(group.world_size) if on_all else holders
        self.newest = self._lent = newest if group.rank in self._keepers else None
        self._lock = threading.Lock()  # of `newest` and `_lent`, a copy whose memory is not used again
        self._channel = group.open_channel("copies")
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._layout: Layout | None = None  # known from the first copy on
        self._spare: dict[str, Tensor] = {}  # buffers to use again: freed memory would stay with the process
        # Another holder than the coordinator has no copy yet: the first one is due at once.
        self._started_at = time.monotonic() if len(self._holders) < 2 else -math.inf
        self._is_urgent = threading.Event()  # set while the training thread waits for the copy to arrive
        self.seconds = 0.0  # in which the newest copy arrived
        self._arrival = 0.0  # the same with the waits, from the step of the copy on
        self.pause = 0.0  # seconds for which training paused for the newest copy
        self._later_pause = 0.0  # the same, but not of the first copy, whose memory is new
        self.megabytes = 0.0  # that the coordinator receives for it

    @property
    def age(self) -> float:
        """Seconds since the last copy was started, or before the first copy, since this object was created.

        With two holders it is infinite before the first copy, so that this copy is due at once.
        """
        return time.monotonic() - self._started_at

    def interval(self, is_calm: bool) -> float:
        """Seconds from one copy to the next, in proportion to pause and transfer time of the newest copy.

        The result is at least 2, and low enough that the next copy arrives before the newest one is 60 s old.
        If a copy takes longer than 20 s to arrive, the result is at most twice that time instead. The pause
        for the first copy does not count: its memory is new, so the pause is many times longer. is_calm:
        whether no member was lost lately; the interval is then longer.
        """
        cost = max(PAUSES * self._later_pause, TRANSFERS * self.seconds) * (CALM if is_calm else 1)
        # The last copy counts until the next one has arrived. At most half of the time one is on the way.
        longest = max(LONGEST_INTERVAL - self._arrival, 2 * self._arrival)
        return max(SHORTEST_INTERVAL, min(longest, cost))

    @property
    def is_busy(self) -> bool:
        """Whether the thread that sends and receives copies of the state runs."""
        return self._thread is not None and self._thread.is_alive()

    def lend(self) -> Copy:
        """The newest copy; the caller may read its tensors for as long as it needs. There must be one."""
        with self._lock:
            assert self.newest is not None
            self._lent = self.newest
            return self.newest

    def start(
        self, step: int, model: nn.Module, sync: SyncMode, optimizer: MuonAdamW, meta: dict[str, Any]
    ) -> None:
        """Copy this rank's part of the state and start to send it to the holders.

        All ranks call it after the same step; from the second copy on, they do not wait for each other.
        model, sync, optimizer: those of this rank. meta: on the coordinator, content of meta.json for a
        checkpoint of this step; {} on other ranks. Raises PeerLost if the transfer of the previous copy has
        failed.
        """
        self.finish()
        began = self._started_at = time.monotonic()
        rank, is_first = self._group.rank, self._layout is None
        held = hold(rank, step, model, sync, optimizer, meta).without_old_rows()
        sent = {}
        if set(self._holders) - {rank}:
            owned = {key for key, rows in held.rows.items() if rows is not None}
            owned |= {key for key in held.rows if not key.startswith(MODEL) and sync.owner_of(key) == rank}
            sent = {path: tensor for path, tensor in held.tensors.items() if key_of(path) in owned}
        if self._layout is None:
            self._layout, began = self._find_layout(held, sync, sent), time.monotonic()
        layout, part, copy = self._layout, self._pack("sent", sent), None
        if len(part) != layout.sizes[rank]:
            raise RuntimeError(f"the state of rank {rank} has changed its form: {len(part)} bytes")
        self.megabytes = sum(layout.sizes[1:]) / 1e6
        if rank in self._keepers:
            own = self._pack(f"part {rank}", held.tensors)
            copy = Copy(meta, rank, layout, [own], rank in self._holders, self._view)
        self.pause = time.monotonic() - began
        self._later_pause = 0.0 if is_first else self.pause
        self._thread = threading.Thread(
            target=self._send, args=(part, layout.sizes, copy), name="copy", daemon=True
        )
        self._thread.start()

    def _find_layout(self, held: Held, sync: SyncMode, sent: Mapping[str, Tensor]) -> Layout:
        """Exchange the formats and sizes of the parts; returns the layout. All ranks call it.

        held: what this rank has of the state. sent: {path: tensor} of what it sends to the holders.
        """
        group = self._group
        formats = group.gather_bytes(formats_of(sent))
        size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
        sizes = group.gather_int64(torch.tensor([size])).flatten().tolist()
        if group.rank in self._keepers:
            formats[group.rank] = formats_of(held.tensors)
        rows = {}
        for key in (key for key, own in held.rows.items() if own is not None):
            by_rank = [sync.owned_rows(key.removeprefix(MODEL), rank) for rank in range(group.world_size)]
            rows[key] = [each for each in by_rank if each is not None]
        return Layout(formats, rows, sizes, held.rows)

    def _pack(self, name: str, part: Mapping[str, Tensor]) -> Tensor:
        """The bytes of all tensors of `part`, one after another; in the spare buffer `name` if it fits."""
        flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in part.values()]
        out = self._room(name, sum(map(len, flat)))
        return torch.cat(flat, out=out) if flat else out

    def _room(self, name: str, size: int) -> Tensor:
        """A buffer of `size` bytes: the spare one `name`, or a new one if that has another size."""
        spare = self._spare.pop(name, None)
        return spare if spare is not None and len(spare) == size else torch.empty(size, dtype=torch.uint8)

    def finish(self) -> None:
        """Wait until the started copy has arrived. Raises PeerLost if a member is lost meanwhile."""
        if self._thread is not None:
            self._is_urgent.set()
            self._thread.join()
            self._thread = None
            self._is_urgent.clear()
        problem, self._problem = self._problem, None
        try:
            if problem is not None:
                raise problem
        finally:
            del problem  # its traceback refers to this frame: as a cycle they would keep the group's threads

    def stop(self) -> None:
        """Wait until the thread that sends a copy has ended; a PeerLost in it is ignored.

        Abandon the process group first, so that the thread ends soon.
        """
        with contextlib.suppress(PeerLost):
            self.finish()

    def _send(self, part: Tensor, sizes: list[int], copy: Copy | None) -> None:
        """Send this rank's part of the state to the holders; a holder receives the parts of the other ranks.

        part: of this rank, uint8, flat. sizes: bytes of the part of each rank. copy: on a rank that keeps
        copies, the new copy, which has only its own part yet and becomes `newest`; else None.
        """
        rank, began, waited = self._group.rank, time.monotonic(), 0.0
        to = [other in self._holders and other != rank for other in range(len(sizes))]
        receives_parts = copy is not None and copy.is_whole
        incoming = [size if receives_parts and other != rank else 0 for other, size in enumerate(sizes)]
        try:
            if len(self._keepers) > 1:
                meta = self._send_meta(copy.meta if copy else {})
                if copy:
                    copy.meta = meta
            received = [self._room(f"part {other}", size) for other, size in enumerate(incoming)]
            # The same memory for all chunks: the kernel would clear new memory for each.
            room = torch.empty(sum(min(CHUNK_BYTES, size) for size in incoming), dtype=torch.uint8)
            for start in range(0, max(sizes), CHUNK_BYTES):
                waited += self._await_gap(GAP_SECONDS - waited)
                chunk = part[start : start + CHUNK_BYTES]
                sends = [len(chunk) if is_receiver else 0 for is_receiver in to]
                receives = [max(0, min(CHUNK_BYTES, size - start)) for size in incoming]
                sent = chunk.repeat(sum(to)) if sum(to) > 1 else chunk[: sum(sends)]
                arrived = self._channel.exchange(sent, sends, receives, room[: sum(receives)])
                for into, piece in zip(received, arrived.split(receives), strict=True):
                    into[start : start + len(piece)] = piece
        except Exception as error:  # in a thread: `finish` raises it on the training one
            self._problem = error
            return
        self._spare["sent"] = part
        if copy:
            received[rank] = copy.parts[0]
            copy.parts = received
            with self._lock:
                is_unused = self.newest is not None and self.newest is not self._lent
                before = self.newest.parts[: len(copy.parts)] if self.newest and is_unused else []
                self.newest, self._lent = copy, None
            for other, each in enumerate(copy.parts):
                spare = before.pop(0) if before else each[:0]
                if len(spare) != len(each):
                    del spare  # first: there is memory for two copies only, beside one that is lent
                    spare = torch.ones_like(each)  # written here, where training does not pause for it
                self._spare[f"part {other}"] = spare
        self.seconds = time.monotonic() - began - waited
        self._arrival = time.monotonic() - self._started_at

    def _await_gap(self, seconds: float) -> float:
        """Wait until the training thread computes, at most `seconds`; returns the seconds waited.

        Does not wait while the training thread waits for the copy to arrive.
        """
        began = time.monotonic()
        while self._group.is_waiting and not self._is_urgent.is_set():
            if time.monotonic() - began >= seconds:
                break
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def _send_meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Send the coordinator's `meta` to the ranks that keep copies; returns it there, else {}."""
        text = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
        length = self._to_keepers(torch.tensor([len(text)]), 1)
        text = self._to_keepers(text, int(length) if len(length) else 0)
        return dict(json.loads(text.numpy().tobytes())) if len(text) else {}

    def _to_keepers(self, tensor: Tensor, size: int) -> Tensor:
        """Send the coordinator's `tensor`, flat, to the ranks that keep copies; returns it there.

        size: on a rank that receives the tensor, its number of elements. On other ranks the result is empty.
        """
        group = self._group
        others = [other in self._keepers and other != 0 for other in range(group.world_size)]
        if group.rank == 0:
            self._channel.exchange(
                tensor.repeat(sum(others)), [len(tensor) * each for each in others], [0] * len(others)
            )
            return tensor
        receives = [size if other == 0 and others[group.rank] else 0 for other in range(group.world_size)]
        return self._channel.exchange(tensor[:0], [0] * group.world_size, receives)


def held_of(copy: Copy | None) -> Held:
    """What a rank has of the state after a loss, if `copy` is its newest copy; an empty Held for None."""
    if copy is None:
        return Held()
    if copy.is_whole:
        return replace(hold_copy(copy.take_state()), view=copy.view)
    tensors = tensors_of(copy.layout.formats[copy.rank], copy.parts[copy.rank])
    return Held(copy.step, copy.meta, copy.layout.own, tensors, is_copy=True, view=copy.view)


def state_of(copy: Copy | None) -> State | None:
    """The state in `copy`, in the form of a checkpoint; None if `copy` is None or not `is_whole`."""
    return copy.take_state() if copy and copy.is_whole else None
