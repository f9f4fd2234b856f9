"""The fast mode: the exact mode with bfloat16 transfers.

Transfers are rounded to bfloat16; sums, moments and weights stay in the format of the run. Gradients of a
matrix are reduced to its owner rank, which broadcasts its rounded update; every rank, the owner too,
subtracts the rounded update. The gradients of lm_head are reduced in parts, one part by each rank, and
broadcast rounded. Gradients of embeddings are rounded, the values of their rows are not. So all ranks hold
equal bytes after each step, except embedding rows that a rank has not fetched. The values differ from those
of the other modes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Pending
from trainer.sync.exact import Bucket, Exact

TRANSFER_DTYPE = torch.bfloat16


class Fast(Exact):
    """Sends the same buckets and rows as Exact, rounded to bfloat16, except the values of embedding rows.

    Every rank steps lm_head with the rounded sums: sending the weights of lm_head would take twice the bytes.
    """

    row_dtype = TRANSFER_DTYPE

    def _split_head(self, head: nn.Parameter) -> list[slice]:
        return []

    def _send_head(self) -> list[Pending]:
        """Start to all-reduce the gradients of lm_head: each rank sums one part, then broadcasts it rounded.

        Waiting for the returned Pending starts the broadcasts; its result is the Pending of the broadcasts.
        """
        group, parts = self._group, self._head.gradients.tensor_split(self._group.world_size)
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

        return [broadcast_parts]

    def _step_head(self) -> list[Pending]:
        self._head.pending = self._group.wait(self._head.pending)
        return []

    def _finish_head(self) -> None:
        self._finish_bucket(self._head)

    def _send_layer(self, bucket: Bucket, owner: int) -> Pending:
        return self._group.start_reduce(bucket.gradients, owner, TRANSFER_DTYPE)

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
