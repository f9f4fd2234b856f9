"""Owner ranks of the Muon matrices, and flat tensors of gradients and weights.

A Muon matrix has one owner rank: its gradient is reduced there, only the owner computes the update (different
CPUs round differently), and the weights are broadcast. That sends as many bytes as an all-reduce and
distributes the work. Gradients and owned weights are flat tensors with the parameters as views, so that
nothing is copied for a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.distributed.process_group import Collectives
from trainer.model.loss import add_rows
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.mode import SyncMode


class OwnerMode(SyncMode):
    """The base of modes in which each Muon matrix has an owner rank, assigned by cost and speed.

    group: the ranks. model, optimizer: of this rank. For subclasses, `_parts` is {rank: the matrices that it
    owns}, and `_replicated` has the other parameters, which all ranks step. Both are equal on every rank.
    """

    def __init__(self, group: Collectives, model: nn.Module, optimizer: MuonAdamW) -> None:
        self._group, self._optimizer = group, optimizer
        matrices = optimizer.muon_parameters()
        owners = assign_owners([matrix.flops for matrix in matrices], group.world_size, group.owner_speeds)
        self._owner_of = {matrix.name: owner for matrix, owner in zip(matrices, owners, strict=True)}
        self._parts: dict[int, list[nn.Parameter]] = {rank: [] for rank in range(group.world_size)}
        for matrix, owner in zip(matrices, owners, strict=True):
            self._parts[owner].append(matrix.parameter)
        self._replicated = [p for name, p in model.named_parameters() if name not in self._owner_of]

    def owner_of(self, name: str) -> int | None:
        return self._owner_of.get(name)


def add_only_active_rows(model: nn.Module) -> None:
    """Make backward add only the active rows to the gradients of embeddings, instead of whole tables.

    model: its embeddings must have a dense `.grad`, as after `flatten_gradients`.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
            if module.weight.device.type != "cpu":
                add_rows_deterministically(module.weight)


def add_rows_deterministically(table: Tensor) -> None:
    """Make backward add the gradient rows of a repeated token to `table.grad` in a fixed order.

    Autograd adds a sparse gradient with `index_add_`, whose order is fixed on a CPU but not on CUDA. The hook
    adds the rows with `add_rows`, and leaves autograd an empty gradient.
    """

    def add(gradient: Tensor) -> Tensor:
        assert table.grad is not None
        add_rows(table.grad, gradient._indices()[0], gradient._values())
        return without_rows(gradient)

    table.register_hook(add)


def without_rows(gradient: Tensor) -> Tensor:
    """A sparse gradient of the same shape as `gradient`, without any row."""
    indices, values = gradient._indices()[:, :0], gradient._values()[:0]
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


def assign_owners(costs: Sequence[float], world_size: int, speeds: Sequence[float] = ()) -> list[int]:
    """Assign pieces of work to ranks: the most expensive first, each to the rank that would finish it first.

    costs: the cost of each piece. world_size: number of ranks. speeds: relative speed of each rank; empty:
    all equal. Returns the owner rank of each piece.
    """
    owners = [0] * len(costs)
    load = [0.0] * world_size
    speeds = speeds or [1.0] * world_size
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(world_size), key=lambda rank: ((load[rank] + costs[piece]) / speeds[rank], rank))
        owners[piece] = owner
        load[owner] += costs[piece]
    return owners


def flatten_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Create one flat tensor of zeros and set the `.grad` of each parameter to a view of it; returns it."""
    flat = _flat_like(parameters)
    for parameter, piece in zip(parameters, _pieces(flat, parameters), strict=True):
        parameter.grad = piece
    return flat


@torch.no_grad()
def flatten_weights(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Copy the parameters into one flat tensor and make each one a view of it; returns the flat tensor."""
    flat = _flat_like(parameters)
    for parameter, piece in zip(parameters, _pieces(flat, parameters), strict=True):
        piece.copy_(parameter)
        parameter.data = piece
    return flat


def _flat_like(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )


def _pieces(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    pieces = flat.split([p.numel() for p in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
