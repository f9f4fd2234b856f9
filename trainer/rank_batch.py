"""The part of a global batch that one rank trains on, as tensors on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.data.loader import Batch, active_rows, count_targets, rank_rows


class RankBatch(NamedTuple):
    """The rows of one step that this rank trains on, and the counts by which losses are divided.

    idx: token ids of the inputs, int64, (rows, T).
    targets: token ids to predict, int64, (rows, T); -1 where a token has no loss.
    active: token ids in the inputs of all ranks, each once, ascending; int64, (active rows,).
    active_by_rank: for each rank, the token ids in the inputs of that rank, in the same form; on the CPU.
    n_targets: targets with a loss in the global batch, over all ranks. The summed losses and gradients of the
        step are divided by this number.
    n_targets_of_rank: targets with a loss in the rows of this rank.
    """

    idx: Tensor
    targets: Tensor
    active: Tensor
    active_by_rank: list[Tensor]
    n_targets: int
    n_targets_of_rank: int


def rank_batch(batch: Batch, shares: Sequence[int], rank: int, device: torch.device) -> RankBatch:
    """The part of the global batch `batch` that `rank` trains on, as tensors on `device`.

    The tensors of `active_by_rank` are on the CPU. shares: rows of the global batch for each rank, in rank
    order. Raises ValueError if their sum is not the number of rows of `batch`, or if one is negative.
    """
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
