"""The dense mode: every gradient travels whole, in the run's own number format.

AdamW's gradients are all-reduced and its fused, elementwise step is repeated on every rank. A Muon matrix has
one owner: its gradient goes there, the owner alone multiplies matrices (unlike CPUs get unlike bits), and the
resulting weights go to all. That moves as many bytes as an all-reduce and shares the work out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.optim import MuonAdamW
from trainer.sync.group import Group


class Dense:
    """Gradients and owned weights live in flat buffers that parameters are views of: nothing is copied."""

    def __init__(self, group: Group, model: nn.Module, optimizer: MuonAdamW) -> None:
        self._group = group
        self._optimizer = optimizer
        matrices = optimizer.muon_parameters()
        owners = share_out([matrix.flops for matrix in matrices], group.world_size)
        self._owners = {matrix.name: owner for matrix, owner in zip(matrices, owners, strict=True)}
        self._owned = [m.parameter for m, owner in zip(matrices, owners, strict=True) if owner == group.rank]
        parts: dict[int, list[nn.Parameter]] = {rank: [] for rank in range(group.world_size)}
        for matrix, owner in zip(matrices, owners, strict=True):
            parts[owner].append(matrix.parameter)
        replicated = [p for name, p in model.named_parameters() if name not in self._owners]
        self._replicated_gradients = flatten_gradients(replicated)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = (
                    True  # backward adds rows to the gradient instead of a table
                )
        self._owned_gradients = {owner: flatten_gradients(part) for owner, part in parts.items() if part}
        self._owned_weights = {owner: flatten_weights(part) for owner, part in parts.items() if part}

    def zero_grad(self) -> None:
        self._replicated_gradients.zero_()
        for gradients in self._owned_gradients.values():
            gradients.zero_()

    def reduce_gradients(self, tokens: int) -> None:
        self._group.sum_and_collect([self._replicated_gradients], self._owned_gradients)
        self._replicated_gradients.div_(tokens)
        if self._group.rank in self._owned_gradients:
            self._owned_gradients[self._group.rank].div_(tokens)

    def step(self) -> None:
        self._optimizer.step_adamw()
        self._optimizer.step_muon(self._owned)

    def hand_out(self) -> None:
        self._group.hand_out(self._owned_weights)

    def owner_of(self, name: str) -> int | None:
        return self._owners.get(name)


def share_out(costs: Sequence[float], world_size: int) -> list[int]:
    """The owner of each piece of work: the dearest first, each to the rank with the least so far."""
    owners = [0] * len(costs)
    load = [0.0] * world_size
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(world_size), key=lambda rank: (load[rank], rank))
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
