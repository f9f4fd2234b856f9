"""Quantization in blocks of values, each block with its own scale or levels.

    packed = Quantizer(4).pack(values)               # bytes to send
    values = Quantizer(4).unpack(packed, n, dtype)   # equal bits on every CPU: at most one rounding per value

With 4 and 8 bits the levels of a block are evenly spaced up to its largest value, and the error of any value
is at most half the spacing. With 2 bits a value is its sign and one of two magnitudes. The magnitudes of a
block are fitted to it by Lloyd's algorithm, the quantizer of least squared error (Lloyd 1982), because a
largest value with evenly spaced levels would leave most values of a block with no level near them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (2, 4, 8, 32)
BLOCK = 256  # values that share a scale of 4 bytes; their codes take 64, 128 or 256 bytes
FITS = 4  # iterations of Lloyd's algorithm; further ones change the squared error by less than 1 %


class Quantizer:
    """Packs a flat tensor of floats into bytes.

    bits: the bits of a packed value: 2, 4, 8 or 32. With 32, values of 32 bits are copied unchanged. Raises
    ValueError for other numbers.
    """

    def __init__(self, bits: int) -> None:
        if bits not in BITS:
            raise ValueError(f"bits is {bits}: it must be 2, 4, 8 or 32")
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
        blocks = in_blocks(values.float(), BLOCK)
        if self.bits == 2:
            return _pack_signs_and_levels(blocks)
        scales = blocks.abs().amax(dim=1, keepdim=True) / self._largest
        codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_()
        codes = codes.clamp_(-self._largest, self._largest).to(torch.int8).flatten()
        if self.bits == 4:
            low, high = codes.view(torch.uint8).view(-1, 2).unbind(dim=1)
            codes = (low & 15) | (high << 4)
        return torch.cat([codes.view(torch.uint8), scales.flatten().view(torch.uint8)])

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The `n` values of `packed`, flat, as `dtype`; with 2, 4 or 8 bits they are rounded."""
        if self.bits == 32:
            return packed.clone().view(dtype)
        count = -(-n // BLOCK)
        split = count * BLOCK * self.bits // 8
        codes, scales = packed[:split], packed[split:].clone()  # a copy is aligned
        if self.bits == 2:
            return _signs_and_levels(codes, scales.view(torch.bfloat16).view(count, 2, 1))[:n].to(dtype)
        if self.bits == 4:
            # A right shift of int8 extends the sign. The low half of a byte is first moved to the high half.
            signed = codes.contiguous().view(torch.int8)
            codes = torch.stack([(signed << 4) >> 4, signed >> 4], dim=1).flatten()
        codes = codes.contiguous().view(torch.int8)
        return (codes.view(count, BLOCK) * scales.view(torch.float32)[:, None]).flatten()[:n].to(dtype)


def in_blocks(values: Tensor, size: int) -> Tensor:
    """The flat `values` as (blocks, size), the last block filled up with zeros."""
    rest = -values.numel() % size
    return torch.cat([values, values.new_zeros(rest)]).view(-1, size) if rest else values.view(-1, size)


def _pack_signs_and_levels(blocks: Tensor) -> Tensor:
    """Codes of 2 bits, four to a byte, then two magnitudes in bfloat16 per block.

    Bit 0 of a code selects the larger magnitude, bit 1 is the sign.
    """
    magnitudes = blocks.abs()
    low, high = _fit_levels(magnitudes)
    levels = torch.cat([low, high], dim=1).to(torch.bfloat16)
    codes = (magnitudes > levels.float().mean(dim=1, keepdim=True)).to(torch.uint8)
    codes |= (blocks < 0).to(torch.uint8) << 1
    first, second, third, fourth = codes.view(-1, 4).unbind(dim=1)
    codes = first | (second << 2) | (third << 4) | (fourth << 6)
    return torch.cat([codes, levels.flatten().view(torch.uint8)])


def _fit_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Two levels per block, (blocks, 1) each, fitted by Lloyd's algorithm. magnitudes: (blocks, values)."""
    total, size = magnitudes.sum(dim=1, keepdim=True), magnitudes.shape[1]
    low = high = threshold = total / size
    for _ in range(FITS):
        above = magnitudes > threshold
        count = above.sum(dim=1, keepdim=True)
        part = (magnitudes * above).sum(dim=1, keepdim=True)
        # Without a value above the mean, all are equal.
        high = torch.where(count > 0, part / count.clamp_min(1), high)
        low = (total - part) / (size - count).clamp_min(1)
        threshold = (low + high) / 2
    return low.clamp_min(0), high


def _signs_and_levels(codes: Tensor, levels: Tensor) -> Tensor:
    """The flat float32 values of the 2-bit `codes`, exact: magnitudes are only selected and negated.

    codes: flat uint8, four codes to a byte. levels: the two magnitudes of each block, (blocks, 2, 1).
    """
    codes = torch.stack([codes & 3, (codes >> 2) & 3, (codes >> 4) & 3, codes >> 6], dim=1)
    codes = codes.view(len(levels), BLOCK)
    low, high = levels.float().unbind(dim=1)
    values = torch.where(codes & 1 != 0, high, low)
    return torch.where(codes & 2 != 0, -values, values).flatten()
