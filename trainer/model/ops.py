"""Elementwise operations between the GEMMs, each with its own gradient.

GEMMs are limited by arithmetic, these operations by memory bandwidth. Each takes few passes over memory,
forward and backward, where autograd would take one pass for every elementary operation.
Shapes: any number of axes before the last, which has D numbers; heads are (B, T, H, E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2. Values and gradients have the same bits as those of F.relu(x).square()."""
    y: Tensor = _SquaredReLU.apply(x)
    return y


def rms(x: Tensor) -> Tensor:
    """RMS normalisation over the last axis, without a learned weight; sums are in float32 or better."""
    y: Tensor = _RMS.apply(x)
    return y


def rotate_rms(x_BTHE: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """Apply rotary positions to each head, then RMS normalisation and the factor `scale`.

    The pairs of elements (i, i + E / 2) of a head are rotated by the angles of its position. The result is
    scale * rms(rotated), in x's shape. cos and sin have the shape (T, 1, E / 2), or (B, T, 1, E / 2) for rows
    at different positions.
    """
    y: Tensor = _RotateRMS.apply(x_BTHE, cos, sin, scale)
    return y


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)


class _RMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        factor = _rms_factor(x)
        ctx.save_for_backward(x, factor)
        return torch.mul(x, factor, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, factor = ctx.saved_tensors
        return _across(grad, x, factor.square()).mul_(factor)


class _RotateRMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
        y = _rotated(x, cos, sin, 1)
        scaled = _rms_factor(y).mul_(scale)
        y.mul_(scaled)
        ctx.save_for_backward(y, cos, sin, scaled)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        y, cos, sin, scaled = ctx.saved_tensors
        return _rotated(_across(grad, y, ctx.scale**-2).mul_(scaled), cos, sin, -1), None, None, None


def _rms_factor(x: Tensor) -> Tensor:
    """The factor that rms applies to x, (..., 1): 1 / sqrt(mean(x^2) + eps), with torch's eps."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(x.size(-1)).add_(torch.finfo(wide).eps).rsqrt_()


def _across(grad: Tensor, x: Tensor, unit: Tensor | float) -> Tensor:
    """`grad` without its component along x: the backward pass of a normalisation. unit: 1 / mean(x^2)."""
    along = (grad * x).sum(dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.addcmul(grad, x, along.mul_(unit).div_(-x.size(-1)).to(x.dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate each pair by its angle: clockwise for `sign` 1, back for -1."""
    turned = torch.empty_like(x)
    (a, b), (c, d) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=sign)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=-sign)
    return turned
