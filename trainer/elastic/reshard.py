"""Moves the state of a run to its next members; sends only what a rank lacks.

    held = hold(rank, step, model, sync, optimizer, meta)     # the state on this rank after a step, no copies
    held = hand_over(group, held, leaving)                    # the ranks that leave send theirs to the others
    held = held_of(copy)                                      # or, after a loss: from a copy (snapshot.py)
    offers = gather_offers(group, held)                       # what each rank of the next group has
    if is_complete(offers):
        optim = reshard(group, offers, held, model, sync)     # parameters are received in place

After a step each rank has all parameters, and the optimizer state of the matrices and rows that it owns. Rows
of embeddings that other ranks own may have old values. A new member receives about the same amount of data
from each other rank. The other members receive the rows and the optimizer state that they now own from the
old owner ranks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.exchange import flatten, unflatten
from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Collectives, Pending
from trainer.distributed.tensor_format import formats_of
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

MODEL = "model/"  # start of the key of a parameter; the key of optimizer state is the name of its parameter
NOTHING = torch.empty(0, dtype=torch.int64)  # no rows
Rows = Tensor | None  # numbers of rows, int64, ascending; None: the whole tensor


@dataclass(frozen=True)
class Held:
    """The parameters and optimizer state of a run that one rank has after a step.

    step: the number of completed steps; -1: the rank has nothing. meta: the content of meta.json for a
    checkpoint of this step, on rank 0 and in a copy; else {}.
    rows: {key: the numbers of the rows that the rank has, or None for the whole tensor}. The key of a
        parameter is "model/NAME"; the key of its optimizer state is NAME.
    tensors: {path: tensor}. The path of a parameter is its key; the path of optimizer state is NAME/STATE. If
        the rank has some rows only, the tensor consists of these; a parameter may have all rows, with old
        values in the others. In the result of `gather_offers` the tensors have no content (device meta).
    is_copy: whether the tensors are those of a copy of the state, whose values must not be changed.
    view: [term, generation] of the view (keys.py) in which the copy was made. If a step is trained again
        after a loss, its copies from different views differ by rounding.
    """

    step: int = -1
    meta: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_copy: bool = False
    view: Sequence[int] = ()

    def load_parameters(self, model: nn.Module) -> None:
        """Set the parameters of `model`. They share memory with `tensors`; if is_copy, values are copied."""
        for name, parameter in model.named_parameters():
            tensor, rows = self.tensors[MODEL + name], self.rows[MODEL + name]
            if not self.is_copy:
                parameter.data = tensor
            elif rows is None:
                parameter.data.copy_(tensor)
            else:
                parameter.data[rows] = tensor

    def without_old_rows(self) -> Held:
        """The same Held, but parameters with old values in some rows have new tensors without these rows."""
        tensors = dict(self.tensors)
        for key, rows in self.rows.items():
            if key.startswith(MODEL) and rows is not None:
                tensors[key] = tensors[key][rows]
        return replace(self, tensors=tensors)


def hold(
    rank: int, step: int, model: nn.Module, sync: SyncMode, optimizer: MuonAdamW, meta: dict[str, Any]
) -> Held:
    """What this rank has of the state after a step. The tensors are those of model and optimizer, not copies.

    rank: the number of this rank in the process group. step, meta: as in Held.
    """
    held = Held(step, meta)
    for name, tensor in model.state_dict().items():
        held.rows[MODEL + name] = None if sync.is_current(name) else sync.owned_rows(name, rank)
        held.tensors[MODEL + name] = tensor
    state = optimizer.state_dict()
    for name in optimizer.shapes():
        if sync.owner_of(name) in (None, rank):
            held.rows[name] = sync.owned_rows(name, rank)
            held.tensors.update({f"{name}/{key}": tensor for key, tensor in state.get(name, {}).items()})
    return held


def hold_copy(state: State | None) -> Held:
    """The Held of a rank that has a copy of the whole state, `state`; an empty Held if `state` is None."""
    if state is None:
        return Held()
    tensors = {MODEL + name: tensor for name, tensor in state.model.items()} | flatten(state.optim)
    rows: dict[str, Rows] = {key: None for name in state.model for key in (MODEL + name, name)}
    return Held(state.step, state.meta, rows, tensors, is_copy=True)


def hand_over(group: Collectives, held: Held, leaving: Sequence[int]) -> Held:
    """Send the state of leaving ranks to the ranks that stay; returns what this rank has afterwards.

    All ranks call it. held: what this rank has before. leaving: the ranks that leave, by rank in `group`.
    Raises PeerLost if a rank is lost.
    """
    if not leaving:
        return held
    offers, rows, tensors = gather_offers(group, held), dict(held.rows), dict(held.tensors)
    staying = [rank for rank in range(len(offers)) if rank not in leaving]
    receivers: dict[str, int] = {}  # in turn, so that none is sent much more than the others

    def exchange(path: str) -> Pending:
        key = key_of(path)
        receiver = receivers.setdefault(key, staying[len(receivers) % len(staying)])
        parts = [offers[rank].rows.get(key, NOTHING) for rank in (receiver, *leaving)]
        known = [part for part in parts if part is not None]
        needed = torch.cat(known).unique() if len(known) == len(parts) else None
        needs = [offer.rows.get(key, NOTHING) for offer in offers]
        needs[receiver] = needed
        pending = _exchange(group, path, offers, held, needs, tensors.get(path) if path == key else None)

        def finish() -> None:
            found = pending()
            if group.rank == receiver and found is not None:
                rows[key], tensors[path] = needed, found

        return finish

    _run(map(exchange, _paths(offers)))
    group.gather_int64(torch.tensor([0]))  # until all have received: those that leave may end now
    return replace(held, rows=rows, tensors=tensors)


def gather_offers(group: Collectives, held: Held) -> list[Held]:
    """What each rank has of the state, by rank; the tensors have no content. All ranks call it.

    The Held of a rank is empty if it has no state, or the state of another step or view than rank 0.
    """
    rows = {key: each if each is None else _runs(each) for key, each in held.rows.items()}
    mine = json.dumps([held.step, list(held.view), rows, json.loads(formats_of(held.tensors))])
    offers = []
    for text in group.gather_bytes(mine.encode()):
        step, view, rows, formats = json.loads(text)
        numbers = {key: each if each is None else _of_runs(each) for key, each in rows.items()}
        tensors = {
            path: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for path, dtype, shape in formats
        }
        offers.append(Held(step, {}, numbers, tensors, view=view))
    first = offers[0]
    return [offer if (offer.step, offer.view) == (first.step, first.view) else Held() for offer in offers]


def is_complete(offers: Sequence[Held]) -> bool:
    """Whether the ranks together have the whole state. offers: the result of `gather_offers`."""
    parameters = [key for key in offers[0].rows if key.startswith(MODEL)]
    for key in [*parameters, *(each.removeprefix(MODEL) for each in parameters)]:
        found = [offer.rows[key] for offer in offers if key in offer.rows]
        rows = [each for each in found if each is not None]
        if len(rows) == len(found) and len(torch.cat([NOTHING, *rows]).unique()) < _length(offers, key):
            return False
    return bool(parameters)


def reshard(
    group: Collectives, offers: Sequence[Held], held: Held, model: nn.Module, sync: SyncMode
) -> dict[str, ParameterState]:
    """Receive the parameters that `model` lacks, in place; returns {name: optimizer state} of this rank.

    Of an embedding, a rank receives only the rows that it owns (see row_shards.py). All ranks call it.
    offers: what each rank has, by rank; together they have the whole state. held: what this rank has; the
    caller has loaded its parameters into `model`. If it is a copy, its tensors are removed from it to save
    memory. sync: the sync mode that defines the new owner ranks. The result may share tensors with `held`.
    Raises PeerLost if a rank is lost.
    """
    parameters, found = model.state_dict(), {}

    def exchange(path: str) -> Pending:
        key = key_of(path)
        name, is_parameter = key.removeprefix(MODEL), path == key
        needs: list[Rows] = [None for _ in offers]
        if not (is_parameter and sync.is_current(name)):
            needs = [
                sync.owned_rows(name, rank)
                if is_parameter or sync.owner_of(name) in (None, rank)
                else NOTHING
                for rank in range(len(offers))
            ]
        into = parameters[name] if is_parameter else None
        pending = _exchange(group, path, offers, held, needs, into)

        def finish() -> None:
            result = pending()
            if not is_parameter and result is not None:
                found[path] = result
            if held.is_copy:
                held.tensors.pop(path, None)

        return finish

    _run(map(exchange, _paths(offers)))
    return unflatten(found)


def _run(exchanges: Iterator[Pending]) -> None:
    """Start each exchange before the previous one is completed, so that the network is not idle."""
    last: Pending = _nothing
    for pending in exchanges:
        last()
        last = pending
    last()


def _nothing() -> None:
    """The completion of a collective that was not needed."""


def _exchange(
    group: Collectives,
    path: str,
    offers: Sequence[Held],
    held: Held,
    needs: Sequence[Rows],
    into: Tensor | None = None,
) -> Pending:
    """Start to send each rank the rows of the tensor `path` that it needs and lacks.

    offers: what each rank has, by rank. held: what this rank has. needs: the rows that each rank needs, by
    rank; all ranks need a scalar. into: a tensor with all rows into which to receive, or None.
    Returns a function that waits for the transfer and returns `into`. If that is None, it returns a tensor of
    the rows that this rank needs: that of `held` if it has just these rows, else a new one. It returns None
    if this rank needs nothing of a tensor whose rows are not divided among ranks.
    """
    rank, key = group.rank, key_of(path)
    has = [offer.rows[key] if path in offer.tensors else NOTHING for offer in offers]
    formats = next(offer.tensors[path] for offer in offers if path in offer.tensors)
    sharded = formats.dim() > 0 and any(each is not None and len(each) for each in (*has, *needs))
    if not sharded:  # a table of one row
        has = [None if path in offer.tensors else NOTHING for offer in offers]
        needs = [None if each is None or formats.dim() == 0 else NOTHING for each in needs]
    length, shape = (_length(offers, key), formats.shape[1:]) if sharded else (1, formats.shape)
    width = math.prod(shape)
    have, need = _table(has, length), _table(needs, length)
    sources = _sources(have, need, first=zlib.crc32(path.encode()))
    mine = held.tensors[path].detach().reshape(-1, width) if path in held.tensors else None
    place = torch.arange(length)  # of each row in `mine`
    if mine is not None and len(mine) < length:
        place[have[rank]] = torch.arange(len(mine))

    rows, values, pending = NOTHING, torch.empty(0, dtype=formats.dtype), _nothing  # that this rank receives
    if (sources >= 0).any():
        sent = [place[each == rank] for each in sources]
        received = [(sources[rank] == source).nonzero().flatten() for source in range(len(offers))]
        flat = values if mine is None else mine[torch.cat(sent)].flatten()
        sends, receives = ([len(each) * width for each in parts] for parts in (sent, received))
        largest = max(int((sources == source).sum(dim=1).max()) for source in range(len(offers)))
        values, pending = group.start_exchange(flat, sends, receives, largest * width)
        rows = torch.cat(received)

    def finish() -> Tensor | None:
        group.wait([pending])
        if into is not None:
            into.detach().view(-1, width)[rows] = values.view(-1, width)
            return into
        needed, own = need[rank].nonzero().flatten(), (need[rank] & have[rank]).nonzero().flatten()
        if mine is not None and len(own) == len(needed) == len(mine):
            return held.tensors[path]
        if not (sharded or len(needed)):
            return None
        result = torch.empty((len(needed), *shape) if sharded else shape, dtype=formats.dtype)
        table = result.view(-1, width)
        if mine is not None:
            table[torch.searchsorted(needed, own)] = mine[place[own]]
        table[torch.searchsorted(needed, rows)] = values.view(-1, width)
        return result

    return finish


def _sources(have: Tensor, need: Tensor, first: int) -> Tensor:
    """For each rank and row, the rank that sends the row to it: int64, (ranks, rows); -1 if it is not sent.

    have, need: whether a rank has or needs a row: bool, (ranks, rows). first: position, among the ranks that
    have a row (modulo their count), of the one that sends it to rank 0; the next one sends it to rank 1, and
    so on.
    """
    sources = torch.full(have.shape, -1)
    count = have.sum(dim=0).clamp_min(1)
    for receiver, line in enumerate(sources):
        found = have & (have.cumsum(dim=0) == (first + receiver) % count + 1)
        lacks = need[receiver] & ~have[receiver]
        line[lacks] = found.int().argmax(dim=0)[lacks]
    return sources


def _table(rows: Sequence[Rows], length: int) -> Tensor:
    """By rank and row, whether `rows` has the row: bool, (ranks, length)."""
    table = torch.zeros(len(rows), length, dtype=torch.bool)
    for line, each in zip(table, rows, strict=True):
        line[slice(None) if each is None else each] = True
    return table


def _runs(rows: Tensor) -> list[list[int]]:
    """Ascending numbers of rows as [start, stop] of each run without a gap."""
    if not len(rows):
        return []
    gaps = (rows.diff() != 1).nonzero().flatten()
    starts = torch.cat([rows[:1], rows[gaps + 1]])
    stops = torch.cat([rows[gaps], rows[-1:]]) + 1
    return torch.stack([starts, stops], dim=1).tolist()


def _of_runs(runs: Sequence[Sequence[int]]) -> Tensor:
    """The inverse of `_runs`."""
    return torch.cat([NOTHING, *(torch.arange(start, stop) for start, stop in runs)])


def _paths(offers: Iterable[Held]) -> list[str]:
    return sorted({path for offer in offers for path in offer.tensors})


def key_of(path: str) -> str:
    """The key in `Held.rows` of the tensor `path`."""
    return path if path.startswith(MODEL) else path.rpartition("/")[0]


def _length(offers: Sequence[Held], key: str) -> int:
    """The number of rows of the parameter to which `key` belongs."""
    return len(offers[0].tensors[MODEL + key.removeprefix(MODEL)])
