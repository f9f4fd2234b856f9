"""Who owns which matrix, and where gradients and weights lie: what all sync modes share.

A Muon matrix has one owner: its gradient goes there, the owner alone multiplies matrices (unlike CPUs get
unlike bits), and the result goes to all. That moves as many bytes as an all-reduce and shares the work out.
Gradients and owned weights live in flat tensors of which the parameters are views: nothing is copied to be
sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.optim.muon_adamw import MuonAdamW


class Owners:
    """The owner of each Muon matrix: work is shared out by cost and speed, the same on every rank."""

    def __init__(self, optimizer: MuonAdamW, world_size: int, speeds: Sequence[float] = ()) -> None:
        matrices = optimizer.muon_parameters()
        owners = share_out([matrix.flops for matrix in matrices], world_size, speeds)
        self._of = {matrix.name: owner for matrix, owner in zip(matrices, owners, strict=True)}
        self.parts: dict[int, list[nn.Parameter]] = {rank: [] for rank in range(world_size)}
        for matrix, owner in zip(matrices, owners, strict=True):
            self.parts[owner].append(matrix.parameter)

    def of(self, name: str) -> int | None:
        """The rank that owns the parameter of that name; None where all ranks step it."""
        return self._of.get(name)


def add_rows_alone(model: nn.Module) -> None:
    """Let backward add an embedding's rows to its gradient, instead of a table that is zero elsewhere.

    The gradients must be there already, dense, as `flatten_gradients` leaves them.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
            if module.weight.device.type != "cpu":
                add_rows_in_order(module.weight)


def add_rows_in_order(table: Tensor) -> None:
    """Let backward add the rows of a token that occurs more than once in one order, always the same.

    Autograd adds a sparse gradient by `index_add_`, which does so on a CPU and in any order on CUDA. There
    `index_put_` sorts the rows first; autograd then has nothing left to add.
    """

    def add(gradient: Tensor) -> Tensor:
        assert table.grad is not None
        indices, values = gradient._indices(), gradient._values()
        table.grad.index_put_((indices[0],), values, accumulate=True)
        return torch.sparse_coo_tensor(indices[:, :0], values[:0], gradient.shape, check_invariants=False)

    table.register_hook(add)


def share_out(costs: Sequence[float], world_size: int, speeds: Sequence[float] = ()) -> list[int]:
    """The owner of each piece of work: the dearest first, each to the rank that would be done with it first.

    `speeds` are relative, by rank; without them all are equal.
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
    """One flat tensor of zeros whose pieces are the parameters' `.grad` from now on."""
    flat = _flat_like(parameters)
    for parameter, piece in zip(parameters, _pieces(flat, parameters), strict=True):
        parameter.grad = piece
    return flat


@torch.no_grad()
def flatten_weights(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One flat tensor that holds the parameters' values and whose pieces they are from now on."""
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
