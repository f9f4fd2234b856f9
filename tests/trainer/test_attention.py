"""Attention in blocks against torch's own behind a mask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model import attention
from trainer.model.attention import BLOCK, attend

LENGTHS = (1, 5, BLOCK, 2 * BLOCK, 2 * BLOCK + 44)
WINDOWS = (BLOCK, BLOCK + 32, 2 * BLOCK, 4 * BLOCK)


def inputs(length: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v and a gradient, laid out as the model's are: (B, H, T, E) of what is (B, T, H, E) in memory."""
    generator = torch.Generator().manual_seed(length)
    each = [
        torch.randn(2, length, heads, 16, generator=generator) for heads in (2 * groups, 2, 2, 2 * groups)
    ]
    return tuple(x.to(dtype).transpose(1, 2) for x in each)


def plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    length = q.size(2)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance <= window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def there_and_back(way: str, values: Sequence[Tensor], window: int) -> Sequence[Tensor]:
    *qkv, grad = values
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    y = attend(q, k, v, window, q.size(1) != k.size(1)) if way == "ours" else plain(q, k, v, window)
    return y.detach(), *torch.autograd.grad(y, (q, k, v), grad)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_blocks_are_the_whole(groups: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(attention, "KEEP_BYTES", 0)
    for length, window in itertools.product(LENGTHS, WINDOWS):
        values = inputs(length, groups)
        for ours, theirs in zip(
            there_and_back("ours", values, window), there_and_back("plain", values, window), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_the_way_back_is_the_same_to_the_last_bit_where_nothing_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = inputs(2 * BLOCK, 1, torch.float32)
    kept = there_and_back("ours", values, BLOCK)
    monkeypatch.setattr(attention, "KEEP_BYTES", 0)
    assert all(map(torch.equal, kept, there_and_back("ours", values, BLOCK)))


def test_bfloat16_is_as_near_as_torchs_own() -> None:
    values = inputs(3 * BLOCK, 1, torch.bfloat16)
    exact = there_and_back("plain", [x.double() for x in values], BLOCK)
    ours, theirs = (there_and_back(way, values, BLOCK) for way in ("ours", "plain"))
    for mine, torchs, true in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - true).norm() < 2 * (torchs.double() - true).norm()
