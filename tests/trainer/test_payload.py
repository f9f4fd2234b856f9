"""Bytes on the wire at depth 8, by count. That a run sends what is predicted stands in test_sync.py."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from counted_bytes import predicted_bytes

from trainer.config import SYNC_MODES
from trainer.model.gpt import GPT, GPTConfig
from trainer.placement.cost_model import CostModel, StepWork, payload
from trainer.placement.microbenchmark import Link, Speed
from trainer.sync.fragment import Outer

D8 = GPTConfig.from_depth(8, vocab_size=32768, sequence_len=1024)
ROWS_OF_2048 = 1200  # different tokens among 2,048 of English; code has fewer
MEGABYTE = 1e6


@pytest.mark.parametrize(("mode", "most"), [("exact", 181), ("fast", 94)])
def test_payload_at_depth_8(mode: str, most: float) -> None:
    """With two ranks of 2,048 tokens; with more, as a ring sends it, 2(N-1)/N of what is to be summed."""
    draw = torch.Generator().manual_seed(1)
    for world_size in (2, 4, 8):
        tokens = [torch.randperm(32768, generator=draw)[:ROWS_OF_2048] for _ in range(world_size)]
        active = [each.sort().values for each in tokens]
        sent = [predicted_bytes(mode, D8, world_size, rank, by_rank=active) for rank in range(world_size)]
        ring = 2 * (world_size - 1) / world_size
        assert mean(sent) <= most * MEGABYTE * ring
        assert max(sent) <= 1.02 * mean(sent)


def test_a_mode_without_a_known_cost_gets_no_price() -> None:
    work = StepWork(1, 1, 1, 1, (), 1, lambda rows: rows)
    speed = Speed(row=1.0, muon=1.0, adamw=1.0)
    for predictor in (
        CostModel([speed], None, work, ["a"]),
        CostModel([speed] * 2, Link(1e6, 0.0), work, ["a", "b"]),
    ):
        with pytest.raises(ValueError, match=f"the sync mode 'none', only for {', '.join(SYNC_MODES)}"):
            predictor.step("none", 4)
    with pytest.raises(ValueError, match="none"):
        payload("none", work, 4, 2)


@pytest.mark.parametrize(
    ("mode", "outer"),
    [
        ("dense", None),
        ("exact", None),
        ("fast", None),
        ("local", Outer()),
        ("local", Outer(steps=10, bits=4)),
        ("local", Outer(bits=2)),
        ("local", Outer(bits=2, topk=352)),
    ],
)
def test_the_formula_that_predicts_a_step_has_the_same_bytes(mode: str, outer: Outer | None) -> None:
    with torch.device("meta"):
        counts = GPT(D8).param_counts()
    tables = counts["wte"] + counts["value_embeds"]
    work = StepWork(
        tables=tables,
        table_width=tables // D8.padded_vocab_size,
        matrices=counts["transformer_matrices"],
        others=counts["lm_head"] + counts["scalars"],
        matrix_flops=(),
        micro_batch=2,
        active=lambda rows: 30 * rows,  # few enough that the number of rows counts
    )
    active = 30 * 4 * (outer.steps + 32 if outer else 1)
    for world_size in (2, 4):
        # As many rows of each owner rank, of which each rank uses those of its part of the 4 rows of data.
        by_rank = [64 * torch.arange(30 * 4 // world_size)] * world_size
        counted = predicted_bytes(mode, D8, world_size, 0, active, outer, by_rank)
        assert payload(mode, work, 4, world_size, outer) == pytest.approx(counted, rel=1e-3)
