"""Quantization in blocks of values, each block with its own scale.

    packed = Quantizer(4).pack(values)               # bytes to send
    values = Quantizer(4).unpack(packed, n, dtype)   # equal bits on every CPU: one multiplication per value

The largest value of a block is exact or nearly so; the error of any value is at most half the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale of 4 bytes; their codes take 128 or 256 bytes


class Quantizer:
    """Packs a flat tensor of floats into bytes. With 32 bits the values are copied unchanged."""

    def __init__(self, bits: int) -> None:
        if bits not in (4, 8, 32):
            raise ValueError(f"bits is {bits}: it must be 4, 8 or 32")
        self.bits = bits
        self._largest = 7 if bits == 4 else 127

    @property
    def bytes_per_value(self) -> float:
        """Bytes that one packed float32 value takes, its part of the scale included."""
        return self.bits / 8 + (4 / BLOCK if self.bits < 32 else 0)

    def pack(self, values: Tensor) -> Tensor:
        """Pack a flat tensor of floats into a flat uint8 tensor: codes, then scales."""
        if self.bits == 32:
            return values.clone().view(torch.uint8)
        blocks = _in_blocks(values.float())
        scales = blocks.abs().amax(dim=1, keepdim=True) / self._largest
        codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_()
        codes = codes.clamp_(-self._largest, self._largest).to(torch.int8).flatten()
        if self.bits == 4:
            low, high = codes.view(torch.uint8).view(-1, 2).unbind(dim=1)
            codes = (low & 15) | (high << 4)
        return torch.cat([codes.view(torch.uint8), scales.flatten().view(torch.uint8)])

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The `n` values of `packed`, flat, as `dtype`; with 4 or 8 bits they are rounded."""
        if self.bits == 32:
            return packed.clone().view(dtype)
        count = -(-n // BLOCK)
        split = count * BLOCK * self.bits // 8
        codes, scales = packed[:split], packed[split:].contiguous().view(torch.float32)
        if self.bits == 4:
            # Shifted down, the high half of a byte keeps its sign; so does the low one, moved up first.
            signed = codes.contiguous().view(torch.int8)
            codes = torch.stack([(signed << 4) >> 4, signed >> 4], dim=1).flatten()
        codes = codes.contiguous().view(torch.int8)
        return (codes.view(count, BLOCK) * scales[:, None]).flatten()[:n].to(dtype)


def _in_blocks(values: Tensor) -> Tensor:
    rest = -values.numel() % BLOCK
    return torch.cat([values, values.new_zeros(rest)]).view(-1, BLOCK) if rest else values.view(-1, BLOCK)
