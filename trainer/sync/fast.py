"""The fast mode: the exact mode with bfloat16 transfers.

Transfers are rounded to bfloat16; sums, moments and weights stay in the format of the run. Gradients of a
matrix are reduced to its owner rank, which broadcasts its rounded update; every rank, the owner too,
subtracts the rounded update. Other gradients are reduced in parts, one part by each rank, and broadcast
rounded. So all ranks hold equal bytes after each step, which differ from those of the other modes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Collectives, Pending
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.exact import Bucket, Exact

TRANSFER_DTYPE = torch.bfloat16


class Fast(Exact):
    """Sends the same buckets and rows as Exact, rounded to bfloat16."""

    def __init__(self, group: Collectives, model: nn.Module, optimizer: MuonAdamW) -> None:
        super().__init__(group, model, optimizer)
        self._updates: dict[int, Tensor] = {}

    # -- reduce to the owner rank ------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> Pending:
        if bucket.owner is None:
            return self._start_all_reduce(bucket.gradients)
        return self._start_reduce(bucket.gradients, bucket.owner)

    def _start_reduce(self, flat: Tensor, owner: int) -> Pending:
        """Start to add the values of all ranks to `flat` of the owner rank. Those of other ranks are rounded.

        `flat` of the other ranks does not change.
        """
        rounded = flat.to(TRANSFER_DTYPE)
        if self._group.rank != owner:
            return self._group.start_gather(rounded, None, owner)
        table = rounded.new_empty(self._group.world_size, rounded.numel())
        return _then(self._group.start_gather(rounded, table, owner), lambda: self._add_up(flat, table))

    def _add_up(self, flat: Tensor, table: Tensor) -> None:
        for rank, values in enumerate(table):
            if rank != self._group.rank:
                flat += values

    # -- all-reduce -------------------------------------------------------------------------------------

    def _send_rows(self, rows: Tensor) -> Pending:
        return self._start_all_reduce(rows)

    def _start_all_reduce(self, flat: Tensor) -> Pending:
        """Start an all-reduce in two transfers: each rank sums one part, then broadcasts it rounded.

        The wait for the first transfer starts the second one and returns its Pending.
        """
        parts = list(flat.tensor_split(self._group.world_size))
        reduced = [self._start_reduce(part, owner) for owner, part in enumerate(parts)]

        def broadcast_parts() -> Pending:
            for wait in reduced:
                wait()
            sums = [part.to(TRANSFER_DTYPE) for part in parts]
            broadcasts = [self._group.start_broadcast(part, owner) for owner, part in enumerate(sums)]
            return lambda: finish(sums, broadcasts)

        def finish(sums: list[Tensor], broadcasts: list[Pending]) -> None:
            for wait, part, rounded in zip(broadcasts, parts, sums, strict=True):
                wait()
                part.copy_(rounded)

        return broadcast_parts

    def _start_second_half(self, pending: list[Pending]) -> list[Pending]:
        return self._group.wait(pending)

    # -- updates ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step_layer(self, bucket: Bucket) -> None:
        updates = [self._optimizer.muon_update(p).flatten() for p in bucket.parameters]
        self._updates[id(bucket)] = torch.cat(updates).to(TRANSFER_DTYPE)

    def _start_broadcast(self, bucket: Bucket) -> Pending:
        assert bucket.weights is not None
        assert bucket.owner is not None
        update = self._updates.pop(id(bucket), None)
        if update is None:
            update = torch.empty_like(bucket.weights, dtype=TRANSFER_DTYPE)
        weights = bucket.weights
        return _then(self._group.start_broadcast(update, bucket.owner), lambda: _subtract(weights, update))


@torch.no_grad()
def _subtract(weights: Tensor, update: Tensor) -> None:
    weights -= update


def _then(pending: Pending, call: Callable[[], None]) -> Pending:
    def finish() -> None:
        pending()
        call()

    return finish
