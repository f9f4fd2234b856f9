"""Bytes on the wire at depth 8, by count."""

from __future__ import annotations

from statistics import mean

import pytest

from trainer.model import GPTConfig
from trainer.sync.payload import predicted_bytes

D8 = GPTConfig.from_depth(8, vocab_size=32768, sequence_len=1024)
# Different tokens among two times 2,048 of English, of which 2,048 have about 1,200; code has fewer.
ROWS_OF_4096 = 2050
MEGABYTE = 1e6


@pytest.mark.parametrize(("mode", "most"), [("exact", 190), ("fast", 100)])
def test_payload_at_depth_8(mode: str, most: float) -> None:
    """With two ranks of 2,048 tokens; with more, as a ring sends it, 2(N-1)/N of what is to be summed."""
    for world_size in (2, 4, 8):
        sent = [predicted_bytes(mode, D8, world_size, rank, ROWS_OF_4096) for rank in range(world_size)]
        ring = 2 * (world_size - 1) / world_size
        assert mean(sent) <= most * MEGABYTE * ring
        assert max(sent) <= 1.02 * mean(sent)
