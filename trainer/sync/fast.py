"""The fast mode: the exact mode's way with bfloat16 on the wire.

What travels is rounded to bfloat16; sums, moments and weights stay in the run's own format. Gradients of a
matrix go to its owner, who adds them up, hands out its update, rounded, and takes away the same rounded
update itself. Sums of what all ranks step are made by one rank each, a part each, and come back rounded. So
every rank holds the same bytes after each step, as in the other modes; they are other bytes than theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Group, Pending
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.exact import Bucket, Exact

WIRE = torch.bfloat16


class Fast(Exact):
    """Buckets and rows as in Exact; what differs is what is put on the wire, and what is taken from it."""

    def __init__(self, group: Group, model: nn.Module, optimizer: MuonAdamW) -> None:
        super().__init__(group, model, optimizer)
        self._updates: dict[int, Tensor] = {}

    # -- sums on one rank: what a matrix's owner needs ---------------------------------------------------

    def _send(self, bucket: Bucket) -> Pending:
        if bucket.owner is None:
            return self._start_spread_sum(bucket.gradients)
        return self._start_collect(bucket.gradients, bucket.owner)

    def _start_collect(self, flat: Tensor, owner: int) -> Pending:
        """Add the others' rounded values to the owner's own; the other ranks keep theirs."""
        rounded = flat.to(WIRE)
        if self._group.rank != owner:
            return self._group.start_gather(rounded, None, owner)
        table = rounded.new_empty(self._group.world_size, rounded.numel())
        return _then(self._group.start_gather(rounded, table, owner), lambda: self._add_up(flat, table))

    def _add_up(self, flat: Tensor, table: Tensor) -> None:
        for rank, values in enumerate(table):
            if rank != self._group.rank:
                flat += values

    # -- sums on all ranks ------------------------------------------------------------------------------

    def _send_rows(self, rows: Tensor) -> Pending:
        return self._start_spread_sum(rows)

    def _start_spread_sum(self, flat: Tensor) -> Pending:
        """The sum over all ranks, on all: each rank adds up its part of it and hands that out, rounded.

        What is pending returns, when it is done, what is pending then.
        """
        parts = list(flat.tensor_split(self._group.world_size))
        collected = [self._start_collect(part, owner) for owner, part in enumerate(parts)]

        def hand_out() -> Pending:
            for wait in collected:
                wait()
            sums = [part.to(WIRE) for part in parts]
            handed = [self._group.start_hand_out(part, owner) for owner, part in enumerate(sums)]
            return lambda: finish(sums, handed)

        def finish(sums: list[Tensor], handed: list[Pending]) -> None:
            for wait, part, rounded in zip(handed, parts, sums, strict=True):
                wait()
                part.copy_(rounded)

        return hand_out

    def _relay(self, pending: list[Pending]) -> list[Pending]:
        return self._group.wait(pending)

    # -- updates ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step_layer(self, bucket: Bucket) -> None:
        updates = [self._optimizer.muon_update(p).flatten() for p in bucket.parameters]
        self._updates[id(bucket)] = torch.cat(updates).to(WIRE)

    def _hand_out(self, bucket: Bucket) -> Pending:
        assert bucket.weights is not None
        assert bucket.owner is not None
        update = self._updates.pop(id(bucket), None)
        if update is None:
            update = torch.empty_like(bucket.weights, dtype=WIRE)
        weights = bucket.weights
        return _then(self._group.start_hand_out(update, bucket.owner), lambda: _take_away(weights, update))


@torch.no_grad()
def _take_away(weights: Tensor, update: Tensor) -> None:
    weights -= update


def _then(pending: Pending, call: Callable[[], None]) -> Pending:
    def finish() -> None:
        pending()
        call()

    return finish
