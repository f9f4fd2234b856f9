"""AdamW for some rows of a parameter: the "own rows", whose optimizer state this rank holds.

    rows = RowAdamW(table, group, [slice(0, 64), slice(128, 192)])
    rows.step(gradients)                   # (own rows, D)
    rows.step_active(active, gradients)    # gradients of the rows `active`; those of all other rows are 0

The moments have one row for each own row, in the order of the slices. AdamW is elementwise, and the slices
start and end at multiples of a processor's vector length: each element gets the same bits as in a step of the
whole parameter by torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

STEPPED_ROWS = 2048  # by step_active at a time: the dense gradient of so many rows stays in the cache


def fresh_adamw_state(like: Tensor) -> dict[str, Tensor]:
    """AdamW's state before the first step: {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros}, all tensors.

    `step` is a float32 scalar, as torch's fused kernel needs it. like: a tensor; the moments get its shape,
    dtype and device.
    """
    step = torch.zeros((), dtype=torch.float32, device=like.device)
    return {"step": step, "exp_avg": torch.zeros_like(like), "exp_avg_sq": torch.zeros_like(like)}


def fused_adamw(
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Update `parameters` in place with torch's fused AdamW kernel, and add 1 to each of `steps`.

    group: dict with betas, lr, weight_decay and eps. gradients, exp_avgs, exp_avg_sqs: one tensor for each
    parameter, in the shape of the parameter. steps: one scalar tensor for each parameter. The class
    torch.optim.AdamW is not used, because it imports torch._dynamo: 3 s and 100 MB in each rank.
    """
    adamw(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class RowAdamW:
    """Updates some rows of a parameter with AdamW: the own rows of this rank.

    parameter: the whole parameter, (R, D). group: dict with lr, betas, eps and weight_decay, as in
    torch.optim. pieces: slices of the rows of the parameter, which together are the own rows. The attribute
    `state` is a dict with the tensors step, a scalar, and exp_avg and exp_avg_sq, both (own rows, D). To
    resume, assign the saved state to this attribute.
    """

    def __init__(self, parameter: Parameter, group: Mapping[str, Any], pieces: Sequence[slice]) -> None:
        self._parameter, self._group = parameter, group
        self._pieces = [piece for piece in pieces if piece.start < piece.stop]
        self._starts = [0]  # of each piece among the own rows, and the number of own rows
        for piece in self._pieces:
            self._starts.append(self._starts[-1] + piece.stop - piece.start)
        self.state = self.fresh_state()

    @property
    def count(self) -> int:
        """The number of own rows."""
        return self._starts[-1]

    def fresh_state(self) -> dict[str, Tensor]:
        """The state before the first step, in the form of the attribute `state`."""
        return fresh_adamw_state(self._parameter.new_empty(self.count, self._parameter.size(1)))

    @torch.no_grad()
    def step(self, gradients: Tensor) -> None:
        """Update all own rows. gradients: (own rows, D)."""
        if self._pieces:
            self._step(range(len(self._pieces)), gradients)
        self.state["step"].add_(1)

    @torch.no_grad()
    def step_active(self, active: Tensor, gradients: Tensor) -> None:
        """Update all own rows. The gradients of the own rows that are not in `active` are 0.

        active: (n,), positions from 0 among the own rows, each once, ascending, on the CPU. gradients: (n,
        D), the gradients of the rows in `active`.
        """
        for pieces in self._runs():
            start, end = self._starts[pieces.start], self._starts[pieces.stop]
            first, last = torch.searchsorted(
                active, torch.tensor([start, end], device=active.device)
            ).tolist()
            dense = gradients.new_zeros(end - start, gradients.size(1))
            dense[active[first:last] - start] = gradients[first:last]
            self._step(pieces, dense)
        self.state["step"].add_(1)

    def _runs(self) -> list[range]:
        """Group consecutive pieces until each group has STEPPED_ROWS rows or more; the last may have fewer.

        Returns the piece numbers of each group.
        """
        runs, first = [], 0
        for number in range(1, len(self._pieces) + 1):
            full = self._starts[number] - self._starts[first] >= STEPPED_ROWS
            if full or number == len(self._pieces):
                runs.append(range(first, number))
                first = number
        return runs

    def _step(self, pieces: range, gradients: Tensor) -> None:
        """Step consecutive pieces with the gradients of their rows. Does not count the step."""
        start, group = self._starts[pieces.start], self._group
        sizes = [self._starts[number + 1] - self._starts[number] for number in pieces]
        rows = slice(start, start + sum(sizes))
        fused_adamw(
            group,
            [self._parameter[self._pieces[number]] for number in pieces],
            list(gradients.split(sizes)),
            list(self.state["exp_avg"][rows].split(sizes)),
            list(self.state["exp_avg_sq"][rows].split(sizes)),
            list(self.state["step"].repeat(len(sizes)).unbind()),  # each is counted up by one
        )
