"""Top-k compression: of each chunk of values, the largest values are sent, with their positions.

    compressor = TopK(320, Quantizer(2))   # 320 of each 4,096 values, quantized to 2 bits
    compressor.bytes_per_value             # 0.075

The values that are not sent remain on the rank, and its next pseudo-gradient contains them: SparseLoCo, arXiv
2508.15706; DeMo, 2411.19870.

The ascending positions of a chunk are packed in an Elias-Fano code (Elias 1974): the low bits of each
position, and a bitmap with the high parts in unary. Its length is fixed, as with 12 plain bits per position,
but about half: 5.6 bits per position for 320 of 4,096. No code can have fewer than 5.1 bits on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.sync.quantize import Quantizer, in_blocks

CHUNK = 4096  # values of which the k largest are sent


class TopK:
    """Packs the k values of the largest magnitude in each chunk; all others are unpacked as 0.

    k: at least 1, and below CHUNK. quantizer: packs the values that are sent. Raises ValueError for another
    k.
    """

    def __init__(self, k: int, quantizer: Quantizer) -> None:
        if not 0 < k < CHUNK:
            raise ValueError(f"k is {k}: it must be at least 1 and below {CHUNK}")
        self._k, self._quantizer = k, quantizer
        self._low_bits = (CHUNK // k).bit_length() - 1
        self._unary = k + (CHUNK >> self._low_bits)  # one bit per position and per high part
        bits = self._unary + k * self._low_bits
        self._position_bytes = 4 * -(-bits // 32)  # of a chunk; whole words, so that scales are aligned

    @property
    def bytes_per_value(self) -> float:
        """Bytes sent for a chunk, divided by the number of all its values, sent or not."""
        return (self._position_bytes + self._k * self._quantizer.bytes_per_value) / CHUNK

    def pack(self, values: Tensor) -> Tensor:
        """Pack a flat tensor of floats into a flat uint8 tensor: positions, then the quantized values."""
        chunks = in_blocks(values, CHUNK)
        positions = chunks.abs().topk(self._k, dim=1, sorted=False).indices.sort(dim=1).values
        kept = self._quantizer.pack(chunks.gather(1, positions).flatten())
        return torch.cat([self._pack_positions(positions).flatten(), kept])

    def unpack(self, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The `n` values of `packed`, flat, as `dtype`: those sent, rounded by the quantizer, and zeros."""
        count = -(-n // CHUNK)
        split = count * self._position_bytes
        positions = self._unpack_positions(packed[:split].view(count, -1))
        kept = self._quantizer.unpack(packed[split:], count * self._k, dtype)
        chunks = torch.zeros(count, CHUNK, dtype=dtype, device=packed.device)
        return chunks.scatter_(1, positions, kept.view(count, -1)).flatten()[:n]

    def _pack_positions(self, positions: Tensor) -> Tensor:
        """Pack positions, (chunks, k) and ascending in each chunk, into uint8, (chunks, position bytes)."""
        count, device = len(positions), positions.device
        bits = torch.zeros(count, 8 * self._position_bytes, dtype=torch.uint8, device=device)
        # Position number i, with the high part h, sets bit h + i: h zeros and i ones are before this bit.
        bits.scatter_(1, (positions >> self._low_bits) + torch.arange(self._k, device=device), 1)
        if self._low_bits:
            low = positions[:, :, None] >> torch.arange(self._low_bits, device=device) & 1
            bits[:, self._unary : self._unary + low[0].numel()] = low.flatten(1).to(torch.uint8)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
        return (bits.view(count, -1, 8) * weights).sum(dim=2, dtype=torch.uint8)

    def _unpack_positions(self, packed: Tensor) -> Tensor:
        """The positions, int64, (chunks, k), in `packed`, the result of `_pack_positions`."""
        count, device = len(packed), packed.device
        bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten(1)
        unary = bits[:, : self._unary]
        number = unary.cumsum(dim=1) - 1  # of the position that a set bit stands for
        slot = torch.where(unary != 0, number, self._k).clamp_(max=self._k)  # k: those of zeros, dropped
        high = torch.arange(self._unary, device=device) - number
        positions = high.new_zeros(count, self._k + 1).scatter_(1, slot, high)[:, : self._k]
        positions = positions << self._low_bits
        if self._low_bits:
            low = bits[:, self._unary : self._unary + self._k * self._low_bits]
            low = low.reshape(count, self._k, -1).to(torch.int64)
            positions += (low << torch.arange(self._low_bits, device=device)).sum(dim=2)
        return positions
