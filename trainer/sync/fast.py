"""The fast mode: the exact mode with bfloat16 transfers.

Transfers are rounded to bfloat16, except the values of embedding rows and the gradients of small parameters;
sums, moments and weights stay in the format of the run. Gradients of a matrix are reduced to its owner rank,
which broadcasts its rounded update; every rank, the owner too, subtracts the rounded update. The gradients of
lm_head are reduced in parts, one part by each rank, and their sums are broadcast rounded. So all ranks hold
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
    """Exact with transfers in bfloat16, except embedding rows and the gradients of small parameters.

    Owner ranks broadcast the updates of matrices, not their weights. Of lm_head the summed gradients are
    broadcast, and every rank takes its optimizer step with them: float32 weights would take twice the bytes.
    """

    row_dtype = TRANSFER_DTYPE

    def _split_head(self, head: nn.Parameter) -> list[slice]:
        return []

    def _parts_of_head(self, flat: Tensor) -> dict[int, Tensor]:
        return dict(enumerate(flat.tensor_split(self._group.world_size)))

    def _start_reduces(self, bucket: Bucket) -> Pending:
        return self._group.start_reduces(bucket.gradients, TRANSFER_DTYPE)

    def _step_head(self) -> list[Pending]:
        """Start to broadcast the sums of the gradients of lm_head, rounded; `_finish_head` waits for them."""
        rank, gradients = self._group.rank, self._head.gradients
        self._finish_reduces(self._head)
        self._sums = {
            owner: part.to(TRANSFER_DTYPE) if owner == rank else torch.empty_like(part, dtype=TRANSFER_DTYPE)
            for owner, part in gradients.items()
        }
        self._of_sums = self._group.start_broadcasts(self._sums)
        return []

    def _finish_head(self) -> None:
        self._group.wait(self._of_sums.values())
        for owner, part in self._head.gradients.items():
            part.copy_(self._sums[owner]).div_(self._tokens)
        del self._sums, self._of_sums

    @torch.no_grad()
    def _step_layer(self, bucket: Bucket) -> list[Pending]:
        updates = {
            owner: torch.empty_like(weights, dtype=TRANSFER_DTYPE)
            for owner, weights in bucket.weights.items()
        }
        if self._finish_own(bucket) is not None:
            flat = [self._optimizer.muon_update(p).flatten() for p in bucket.owned]
            updates[self._group.rank].copy_(torch.cat(flat))
        received = self._group.start_broadcasts(updates)

        @torch.no_grad()
        def subtract() -> None:
            for owner, wait in received.items():
                wait()
                bucket.weights[owner].sub_(updates[owner])

        return [subtract]
