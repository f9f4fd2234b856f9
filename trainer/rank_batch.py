"""The part of a global batch that one rank trains on, as tensors on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.data.loader import Batch, active_rows, count_targets, rank_rows


class RankBatch(NamedTuple):
    """What a rank trains on in a step. Every rank knows the number of targets of the global batch."""

    idx: Tensor  # (rows, T)
    targets: Tensor  # (rows, T); -1 where a token has no loss
    active: Tensor  # token ids in the inputs of all ranks, each once, ascending
    active_by_rank: list[Tensor]  # the same of each rank, on the CPU
    n_targets: int  # with a loss, in the global batch: the losses and gradients are divided by it
    n_targets_of_rank: int


def rank_batch(batch: Batch, shares: Sequence[int], rank: int, device: torch.device) -> RankBatch:
    """The rows of `rank` in the global batch. shares: rows per rank."""
    tokens = torch.from_numpy(rank_rows(batch.tokens, shares, rank).astype(np.int64)).to(device)
    targets = rank_rows(batch.targets, shares, rank)
    return RankBatch(
        idx=tokens[:, :-1],
        targets=torch.from_numpy(targets).to(device),
        active=torch.from_numpy(batch.active).to(device),
        active_by_rank=[torch.from_numpy(ids) for ids in active_rows(batch.tokens, shares)],
        n_targets=count_targets(batch.targets),
        n_targets_of_rank=count_targets(targets),
    )
