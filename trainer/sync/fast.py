"""The fast mode: the exact mode with bfloat16 transfers.

Transfers are rounded to bfloat16; sums, moments and weights stay in the format of the run. Gradients of a
matrix are reduced to its owner rank, which broadcasts its rounded update; every rank, the owner too,
subtracts the rounded update. Other gradients are reduced in parts, one part by each rank, and broadcast
rounded. So all ranks hold equal bytes after each step, which differ from those of the other modes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.distributed.process_group import Pending
from trainer.sync.exact import Bucket, Exact

TRANSFER_DTYPE = torch.bfloat16


class Fast(Exact):
    """Sends the same buckets and rows as Exact, rounded to bfloat16."""

    def _start_sum(self, flat: Tensor, owner: int | None = None) -> Pending:
        """Start a reduce to `owner`, or an all-reduce: each rank sums one part, then broadcasts it rounded.

        The wait for the first transfer of an all-reduce starts the second one and returns its Pending.
        """
        group = self._group
        if owner is not None:
            return group.start_reduce(flat, owner, TRANSFER_DTYPE)
        parts = list(flat.tensor_split(group.world_size))
        reduced = [group.start_reduce(part, rank, TRANSFER_DTYPE) for rank, part in enumerate(parts)]

        def broadcast_parts() -> Pending:
            for wait in reduced:
                wait()
            sums = [part.to(TRANSFER_DTYPE) for part in parts]
            broadcasts = [group.start_broadcast(part, rank) for rank, part in enumerate(sums)]
            return lambda: finish(sums, broadcasts)

        def finish(sums: list[Tensor], broadcasts: list[Pending]) -> None:
            for wait, part, rounded in zip(broadcasts, parts, sums, strict=True):
                wait()
                part.copy_(rounded)

        return broadcast_parts

    def _start_second_half(self, pending: list[Pending]) -> list[Pending]:
        return self._group.wait(pending)

    @torch.no_grad()
    def _step_layer(self, bucket: Bucket) -> Pending:
        weights, owner = bucket.weights, bucket.owner
        assert owner is not None
        if owner == self._group.rank:
            self._finish_bucket(bucket)
            updates = [self._optimizer.muon_update(p).flatten() for p in bucket.parameters]
            update = torch.cat(updates).to(TRANSFER_DTYPE)
        else:
            update = torch.empty_like(weights, dtype=TRANSFER_DTYPE)
        received = self._group.start_broadcast(update, owner)

        @torch.no_grad()
        def subtract() -> None:
            received()
            weights.sub_(update)

        return subtract
