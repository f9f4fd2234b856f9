"""Chooses how the local mode compresses pseudo-gradients.

compressor = make_compressor(bits=2, topk=352, sizes=[262144, 48])    # of tensors that are sent together
packed = compressor.pack(values)                                      # their values, flat
values = compressor.unpack(packed, n, dtype)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.sync.quantize import Quantizer
from trainer.sync.topk import TopK

SMALL = 512  # a tensor of fewer values is not rounded to 2 bits: per-layer scalars and gates


class Compressor(Protocol):
    """Packs a flat tensor of floats into bytes, whose number depends only on the length of the tensor."""

    @property
    def bytes_per_value(self) -> float:
        """Bytes that one packed float32 value takes on average, with its part of scales and positions."""

    def pack(self, values: Tensor) -> Tensor:
        """Pack a flat tensor of floats into a flat uint8 tensor."""

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The `n` values of `packed`, flat, as `dtype`: equal bits on every processor."""


def make_compressor(bits: int, topk: int = 0, sizes: Sequence[int] = ()) -> Compressor:
    """The compressor for tensors that are sent together, one after the other in a flat tensor.

    bits: the bits of a sent value: 2, 4, 8 or 32. topk: how many of each 4,096 values are sent; 0: all.
    sizes: the number of values of each tensor. With 2 bits or top-k, tensors of fewer than SMALL values are
    copied unchanged: a scalar would share the levels of its block with values that are a thousand times
    smaller. Raises ValueError if `bits` or `topk` is invalid.
    """
    quantizer = Quantizer(bits)
    compressor: Compressor = TopK(topk, quantizer) if topk else quantizer
    coarse = topk or bits == 2
    return ExceptSmall(compressor, sizes) if coarse and any(size < SMALL for size in sizes) else compressor


class ExceptSmall:
    """Packs tensors of at least SMALL values with `compressor`; smaller ones follow, copied unchanged.

    compressor: for the large tensors. sizes: the number of values of each tensor, in the order in which they
    follow each other in a flat tensor.
    """

    def __init__(self, compressor: Compressor, sizes: Sequence[int]) -> None:
        self._compressor, self._sizes = compressor, list(sizes)
        self._copied = sum(size for size in sizes if size < SMALL)

    @property
    def bytes_per_value(self) -> float:
        return self._compressor.bytes_per_value

    def pack(self, values: Tensor) -> Tensor:
        parts = values.split(self._sizes)
        packed = self._compressor.pack(torch.cat([part for part in parts if len(part) >= SMALL]))
        copied = torch.cat([part for part in parts if len(part) < SMALL])
        return torch.cat([packed, copied.view(torch.uint8)])

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        split = len(packed) - self._copied * dtype.itemsize
        large = self._compressor.unpack(packed[:split], n - self._copied, dtype)
        small = packed[split:].clone().view(dtype)
        # The parts return to their places: split each kind by its sizes, then take them in order.
        of_large = iter(large.split([size for size in self._sizes if size >= SMALL]))
        of_small = iter(small.split([size for size in self._sizes if size < SMALL]))
        return torch.cat([next(of_small if size < SMALL else of_large) for size in self._sizes])
