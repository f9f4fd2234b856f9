"""The exact mode: the sums of dense with fewer bytes, sent while the processor computes.

Of an embedding, only the active rows have a gradient. Every rank knows the batch of the step, so the indices
of the rows are not sent: each rank packs the same rows. All other gradients are sent as soon as the last
backward has finished them, the last layer first. An owner rank steps the matrices of a layer when their sums
have arrived, and broadcasts the weights while it steps the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Collectives, Pending
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.buckets import OwnerMode, add_only_active_rows, flatten_gradients, flatten_weights


@dataclass
class Bucket:
    """Gradients that are sent together: those of lm_head, or of the matrices of one layer and owner rank."""

    parameters: list[nn.Parameter]
    gradients: Tensor  # flat; the parameters' gradients are its pieces
    owner: int | None = None  # None: summed on every rank, as for lm_head
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # flat; of matrices with an owner rank
    unfinished: int = 0
    pending: list[Pending] = field(default_factory=list)


class Exact(OwnerMode):
    """Sends active rows of embeddings, and buckets of other gradients, in the same order on all ranks."""

    def __init__(self, group: Collectives, model: nn.Module, optimizer: MuonAdamW) -> None:
        super().__init__(group, model, optimizer)
        self._tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        self._active = torch.empty(0, dtype=torch.int64, device=self._tables[0].device)
        for table in self._tables:
            table.grad = torch.zeros_like(table)
        add_only_active_rows(model)

        embeddings = {id(table) for table in self._tables}
        replicated = [p for p in self._replicated if id(p) not in embeddings]
        large = max(replicated, key=nn.Parameter.numel)  # lm_head
        small = [p for p in replicated if p is not large]
        self._head = Bucket([large], flatten_gradients([large]))
        self._small = flatten_gradients(small)
        self._layers = self._make_layers(model)
        self._buckets = [self._head, *self._layers]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._on_gradient)
        self._next = len(self._buckets)  # the first bucket that is not sent; none may be sent yet

    def _make_layers(self, model: nn.Module) -> list[Bucket]:
        """One bucket for each layer and owner rank, in the order in which backward finishes them."""
        layer_of = {p: name.split(".")[2] for name, p in model.named_parameters() if ".h." in name}
        buckets: dict[tuple[int, int], Bucket] = {}
        for owner, part in self._parts.items():
            if not part:
                continue
            gradients, weights = flatten_gradients(part), flatten_weights(part)
            start = 0
            for layer in dict.fromkeys(layer_of[p] for p in part):
                own = [p for p in part if layer_of[p] == layer]
                end = start + sum(p.numel() for p in own)
                buckets[int(layer), owner] = Bucket(own, gradients[start:end], owner, weights[start:end])
                start = end
        return [buckets[key] for key in sorted(buckets, key=lambda key: (-key[0], key[1]))]

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self, active: Tensor) -> None:
        for table in self._tables:
            assert table.grad is not None
            table.grad.index_fill_(0, self._active, 0)
        self._active = active
        self._small.zero_()
        for bucket in self._buckets:
            bucket.gradients.zero_()

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.unfinished = len(bucket.parameters)
        self._next = 0
        yield
        while self._next < len(self._buckets):  # buckets with a parameter that got no gradient
            self._send_next()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Hook on each accumulated gradient: in the last backward, send the buckets that are complete."""
        if self._next == len(self._buckets):
            return
        self._bucket_of[parameter].unfinished -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].unfinished == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.pending = [self._start_sum(bucket.gradients, bucket.owner)]

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """Start to reduce the last gradients: small parameters and active rows. `step` waits for all sums."""
        self._tokens = tokens
        self._small_pending = [self._group.start_all_reduce(self._small)]
        self._rows = self._pack_rows()
        self._rows_pending = [self._start_sum(self._rows)]

    def step(self) -> None:
        self._head.pending = self._start_second_half(self._head.pending)
        self._broadcasts = [self._step_layer(bucket) for bucket in self._layers]
        self._rows_pending = self._start_second_half(self._rows_pending)
        self._finish_bucket(self._head)
        self._group.wait(self._small_pending + self._rows_pending)
        self._small.div_(self._tokens)
        self._unpack_rows(self._rows.div_(self._tokens))
        self._optimizer.step_adamw()

    def broadcast(self) -> None:
        for bucket in self._layers:
            self._group.wait(bucket.pending)
        self._group.wait(self._broadcasts)

    # -- rows of the embeddings ------------------------------------------------------------------------

    def _pack_rows(self) -> Tensor:
        """The gradients of the active rows of all embeddings, in one flat tensor."""
        return torch.cat([table.grad[self._active].flatten() for table in self._tables])  # type: ignore[index]

    def _unpack_rows(self, rows: Tensor) -> None:
        sizes = [len(self._active) * table.size(1) for table in self._tables]
        for table, part in zip(self._tables, rows.split(sizes), strict=True):
            assert table.grad is not None
            table.grad[self._active] = part.view(-1, table.size(1))

    # -- transfers -------------------------------------------------------------------------------------

    def _start_sum(self, flat: Tensor, owner: int | None = None) -> Pending:
        """Start to sum a flat tensor over all ranks: on its owner rank, or without one on every rank."""
        if owner is None:
            return self._group.start_all_reduce(flat)
        return self._group.start_reduce(flat, owner)

    def _start_second_half(self, pending: list[Pending]) -> list[Pending]:
        """Start the second transfer of the sums. Exact has one transfer per sum; Fast overrides this."""
        return pending

    def _finish_bucket(self, bucket: Bucket) -> None:
        """Wait for the sums of a bucket, and divide them by the tokens of the step."""
        self._group.wait(bucket.pending)
        bucket.gradients.div_(self._tokens)

    def _step_layer(self, bucket: Bucket) -> Pending:
        """On the owner rank, step the matrices of a bucket; start the broadcast of the result."""
        assert bucket.owner is not None
        if bucket.owner == self._group.rank:
            self._finish_bucket(bucket)
            self._optimizer.step_muon(bucket.parameters)
        return self._group.start_broadcast(bucket.weights, bucket.owner)
