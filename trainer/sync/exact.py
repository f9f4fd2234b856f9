"""The exact mode: the same sums as in the dense mode with fewer bytes, sent while the processor computes.

Each Muon matrix, each row of lm_head and each row of an embedding has one owner rank, which alone holds its
optimizer state (trainer.sync.row_shards). Only small parameters are stepped by all ranks. Gradients are
reduced to the owner ranks as soon as the last backward has finished them: those of lm_head first, then those
of the last layer, and so on to the first. In the same order, and LAYERS_BEHIND layers behind, an owner rank
steps its rows of lm_head and its matrices of each layer and starts to broadcast the new weights, while
backward continues with earlier layers. So the network is in use during the whole backward. On a GPU the
optimizer step begins after backward. Of an embedding, only active rows are sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Collectives, Pending
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.buckets import OwnerMode, flatten_gradients, flatten_weights
from trainer.sync.row_shards import BLOCK_ROWS, RowShards

LAYERS_BEHIND = 2  # optimizer steps behind the gradients that are sent: the sums have arrived by then


def nothing_pending() -> None:
    """The value of `Bucket.pending` while no transfer is in flight; it does nothing."""


@dataclass
class Bucket:
    """Gradients that are sent together: those of lm_head, or of the matrices of one layer.

    parameters: the parameters of the bucket.
    gradients: {owner rank: flat tensor}; the gradients of the parameters are views of these tensors.
    weights: {owner rank: flat tensor} that share their memory with the parameters.
    owned: the matrices that this rank owns; empty for lm_head, whose rows are divided among the ranks.
    unfinished: the number of parameters whose gradients the last backward has not finished yet.
    pending: the transfer of the gradients.
    """

    parameters: list[nn.Parameter]
    gradients: dict[int, Tensor]
    weights: dict[int, Tensor]
    owned: list[nn.Parameter] = field(default_factory=list)
    unfinished: int = 0
    pending: Pending = nothing_pending


class Exact(OwnerMode):
    """The sync mode exact: sends active rows of embeddings, and other gradients in buckets.

    Buckets are sent in the same order on all ranks.
    row_dtype: number format of the gradients of embeddings on the network; None: that of the tables.
    """

    row_dtype: torch.dtype | None = None

    def __init__(self, group: Collectives, model: nn.Module, optimizer: MuonAdamW) -> None:
        super().__init__(group, model, optimizer)
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for module in embeddings:
            module.sparse = True
        tables = [cast(nn.Parameter, module.weight) for module in embeddings]
        self._tables = {name for name, p in model.named_parameters() if any(p is table for table in tables)}
        self._rows = RowShards(group, tables, optimizer, self.row_dtype)
        self._is_fresh = False  # whether no row of an embedding is stale: after a change of members, some are

        replicated = [p for p in self._replicated if not any(p is table for table in tables)]
        large = max(replicated, key=nn.Parameter.numel)  # lm_head
        small = [p for p in replicated if p is not large]
        self._head_name = next(name for name, p in model.named_parameters() if p is large)
        self._head_rows = self._split_head(large)
        gradients, weights = flatten_gradients([large]), large.detach().view(-1)
        self._head = Bucket([large], self._parts_of_head(gradients), self._parts_of_head(weights))
        self._small = flatten_gradients(small)
        self._layers = self._make_layers(model)
        self._buckets = [self._head, *self._layers]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._hook())
        self._next = len(self._buckets)  # the first bucket that is not sent; none may be sent yet
        self._n_stepped = 0  # buckets that are stepped, or whose owner rank steps them
        # Buckets that are sent before a bucket is stepped.
        self._behind = LAYERS_BEHIND if large.device.type != "cuda" else len(self._buckets)
        self._broadcasts: list[Pending] = []

    def _make_layers(self, model: nn.Module) -> list[Bucket]:
        """One bucket for each layer, in the order in which backward finishes them."""
        layer_of = {p: int(name.split(".")[2]) for name, p in model.named_parameters() if ".h." in name}
        buckets = {layer: Bucket([], {}, {}) for layer in sorted(set(layer_of.values()), reverse=True)}
        for owner, part in self._parts.items():
            for layer, bucket in buckets.items():
                own = [p for p in part if layer_of[p] == layer]
                if own:
                    bucket.parameters += own
                    bucket.gradients[owner] = flatten_gradients(own)
                    bucket.weights[owner] = flatten_weights(own)
                if owner == self._group.rank:
                    bucket.owned = own
        return list(buckets.values())

    def _split_head(self, head: nn.Parameter) -> list[slice]:
        """Divide the rows of lm_head among the ranks; returns the rows of each rank, in rank order.

        This rank then keeps the optimizer state of its own rows only.
        """
        blocks, world_size = len(head) // BLOCK_ROWS, self._group.world_size
        ends = [blocks * (rank + 1) // world_size * BLOCK_ROWS for rank in range(world_size)]
        rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._optimizer.shard_rows(head, [rows[self._group.rank]])
        return rows

    def owned_rows(self, name: str, rank: int) -> Tensor | None:
        if self._group.world_size == 1:
            return None
        if name in self._tables:
            return self._rows.owned_rows(rank)
        if name == self._head_name and self._head_rows:
            return torch.arange(self._head_rows[rank].start, self._head_rows[rank].stop)
        return None

    def is_current(self, name: str) -> bool:
        return name not in self._tables

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self, active: Tensor, by_rank: Sequence[Tensor] = ()) -> None:
        self._rows.begin_step(by_rank or [active])
        self._small.zero_()
        for bucket in self._buckets:
            for gradients in bucket.gradients.values():
                gradients.zero_()

    @contextmanager
    def last_backward(self, tokens: int) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.unfinished = len(bucket.parameters)
        self._tokens, self._broadcasts = tokens, []
        self._next = self._n_stepped = 0
        yield
        while self._next < len(self._buckets):  # buckets with a parameter that got no gradient
            self._send_next()

    def _hook(self) -> Callable[[nn.Parameter], None]:
        """A hook for each accumulated gradient, which calls `_on_gradient`.

        The hook has only a weak reference to this object. If its parameter could be reached from the hook,
        torch would never free the hook and the model.
        """
        on_gradient = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: nn.Parameter) -> None:
            if call := on_gradient():
                call(parameter)

        return hook

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """In the last backward, count the gradient of `parameter` as final, and send the complete buckets."""
        if self._next == len(self._buckets):
            return
        self._bucket_of[parameter].unfinished -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].unfinished == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.pending = self._start_reduces(bucket)
        if self._next - self._n_stepped > self._behind:
            with self.optimizing():
                self._step_next()

    def _step_next(self) -> None:
        """Step the next bucket, in the order of sending, and start the broadcast of its weights."""
        bucket = self._buckets[self._n_stepped]
        self._n_stepped += 1
        self._broadcasts += self._step_head() if bucket is self._head else self._step_layer(bucket)

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """Start to reduce the gradients of small parameters and active rows. `step` waits for all sums."""
        self._tokens = tokens
        self._small_pending = self._group.start_all_reduce(self._small)
        self._rows.start_reduce()

    def step(self) -> None:
        while self._n_stepped < len(self._buckets):
            self._step_next()
        self._rows.step(self._tokens)
        self._is_fresh = False
        self._finish_head()
        self._group.wait([self._small_pending])
        self._small.div_(self._tokens)
        self._optimizer.step_adamw()

    def broadcast(self) -> None:
        for bucket in self._buckets:
            self._finish_reduces(bucket)
        self._group.wait(self._broadcasts)

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Context in which every rank has the current values of all embedding rows.

        Steps leave old values in rows that a rank has not fetched. The first context after a step broadcasts
        all rows from their owner ranks.
        """
        if not self._is_fresh:
            self._rows.refresh()
            self._is_fresh = True
        yield

    # -- buckets ---------------------------------------------------------------------------------------

    def _start_reduces(self, bucket: Bucket) -> Pending:
        """Start to reduce the gradients of a bucket to their owner ranks."""
        return self._group.start_reduces(bucket.gradients)

    def _finish_own(self, bucket: Bucket) -> Tensor | None:
        """Wait for the sums of which this rank is the owner, and divide them by the tokens of the step.

        Returns them as a flat tensor; None if this rank owns nothing of the bucket.
        """
        rank = self._group.rank
        if rank not in bucket.gradients:
            return None
        self._finish_reduces(bucket)
        return bucket.gradients[rank].div_(self._tokens)

    def _finish_reduces(self, bucket: Bucket) -> None:
        """Wait until this rank has its sums of a bucket, and has sent its gradients to other owner ranks."""
        self._group.wait([bucket.pending])
        bucket.pending = nothing_pending

    def _step_layer(self, bucket: Bucket) -> list[Pending]:
        """Step the matrices of a layer that this rank owns; start the broadcasts of all its matrices."""
        if self._finish_own(bucket) is not None:
            self._optimizer.step_muon(bucket.owned)
        return list(self._group.start_broadcasts(bucket.weights).values())

    def _step_head(self) -> list[Pending]:
        """Step this rank's rows of lm_head; start the broadcasts of all rows."""
        [head] = self._head.parameters
        gradients = self._finish_own(self._head)
        if gradients is not None:
            self._optimizer.step_rows(head, gradients.view(-1, head.size(1)))
        return list(self._group.start_broadcasts(self._head.weights).values())

    def _finish_head(self) -> None:
        """Does nothing. Fast, in which all ranks step lm_head, completes the gradients of lm_head here."""

    def _parts_of_head(self, flat: Tensor) -> dict[int, Tensor]:
        """Divide a flat tensor of lm_head's size: {rank: view of the part that is reduced to this rank}."""
        width = flat.numel() // self._head_rows[-1].stop
        return {
            rank: flat[rows.start * width : rows.stop * width] for rank, rows in enumerate(self._head_rows)
        }
