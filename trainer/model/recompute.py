"""Activation checkpointing: the activations of a layer are not kept, and backward computes the layer again.

torch.utils.checkpoint does the same, but imports torch's compiler, which takes 0.2 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Layer = Callable[[Tensor, Tensor], Tensor]


def recomputed(layer: Layer, x0: Tensor, x: Tensor) -> Tensor:
    """The result of layer(x0, x), computed so that only x0 and x are kept for backward.

    The gradients are those of a plain call. At least one of x0 and x must require a gradient. The gradients
    of the layer's parameters are added to their `grad` by backward(); torch.autograd.grad does not return
    them.
    """
    y: Tensor = _Recomputed.apply(layer, x0, x)
    return y


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x0: Tensor, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x0, x)
        return layer(x0, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x0, x = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.layer(x0, x)
        torch.autograd.backward(y, grad)
        return None, x0.grad, x.grad
