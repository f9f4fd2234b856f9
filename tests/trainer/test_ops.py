"""The parts between the matrices against what they are short for: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.attention import rotary_tables
from trainer.model.ops import rms, rotate_rms, squared_relu

SCALE = 1.2
Way = Callable[[Tensor], Tensor]


def plain_rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def turned(x: Tensor) -> Tensor:
    cos, sin = (table.to(x.dtype) for table in rotary_tables(x.size(1), x.size(-1)))
    return rotate_rms(x, cos, sin, SCALE)


def plainly_turned(x: Tensor) -> Tensor:
    cos, sin = (table.to(x.dtype) for table in rotary_tables(x.size(1), x.size(-1)))
    a, b = x.chunk(2, dim=-1)
    return SCALE * plain_rms(torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1))


def there_and_back(way: Way, x: Tensor, grad: Tensor) -> Sequence[Tensor]:
    x = x.clone().requires_grad_()
    y = way(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def heads(dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Values (B, T, H, E) and a gradient; not those of one tensor laid out in order."""
    generator = torch.Generator().manual_seed(3)
    x, grad = torch.randn(2, 3, 40, 5, 32, generator=generator)[:, :, ::2]
    return (size * x).to(dtype), grad.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_squared_relu_has_the_bits_of_its_parts(dtype: torch.dtype) -> None:
    values = heads(dtype)
    plain = there_and_back(lambda x: x.relu().square(), *values)
    for ours, theirs in zip(there_and_back(squared_relu, *values), plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("way", "plain"), [(rms, plain_rms), (turned, plainly_turned)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_it_is_what_its_parts_are(way: Way, plain: Way, size: float, dtype: torch.dtype, rtol: float) -> None:
    values = heads(dtype, size)
    for ours, theirs in zip(there_and_back(way, *values), there_and_back(plain, *values), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


@pytest.mark.parametrize(("way", "plain"), [(rms, plain_rms), (turned, plainly_turned)])
@pytest.mark.parametrize("size", [0.1, 1.0])
def test_in_bfloat16_it_rounds_and_does_not_lean(way: Way, plain: Way, size: float) -> None:
    values = heads(torch.bfloat16, size)
    exact = there_and_back(plain, *(x.double() for x in values))
    for ours, true in zip(there_and_back(way, *values), exact, strict=True):
        error = ours.double() - true
        assert ours.dtype == torch.bfloat16
        assert error.norm() < 2**-7 * true.norm()
        assert abs(float((error * true).sum() / true.square().sum())) < 2e-4
