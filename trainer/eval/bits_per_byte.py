"""Bits per byte on the validation split, computed by all ranks: a loss independent of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.loader import Split, proportional_split, rank_rows
from trainer.distributed.process_group import Collectives
from trainer.model.gpt import GPT


class Evaluation(NamedTuple):
    """The result of an evaluation: val_bpb in bits per byte of text, val_loss in nats per token."""

    val_bpb: float
    val_loss: float


@torch.no_grad()
def evaluate(
    model: GPT,
    rows: Split | NDArray[Any],
    token_bytes: Tensor,
    eval_tokens: int,
    device_batch_size: int,
    group: Collectives,
    shares: Sequence[int] = (1,),
) -> Evaluation:
    """Evaluate on the first rows that hold `eval_tokens` targets, rounded up, at most all. A collective call.

    rows: (n, T+1) token ids. token_bytes: (V,) bytes of text of each token, 0 for special tokens, which
    val_bpb leaves out. Each rank evaluates a part of the rows in proportion to its rows per step in `shares`.
    """
    n_rows = min(len(rows), math.ceil(eval_tokens / (rows.shape[1] - 1)))
    mine = rank_rows(np.arange(n_rows), proportional_split(shares, n_rows), group.rank)
    device = model.device
    token_bytes = token_bytes.to(device)
    totals = torch.zeros(4, dtype=torch.float64)  # nats of targets with bytes, bytes, nats of all, tokens
    for start in range(0, len(mine), device_batch_size):
        batch = torch.from_numpy(rows[mine[start : start + device_batch_size]].astype(np.int64)).to(device)
        targets = batch[:, 1:].flatten()
        losses = model(batch[:, :-1], batch[:, 1:], loss_reduction="none").double()  # (rows * T)
        size = token_bytes[targets]
        totals += torch.stack(
            [
                losses[size > 0].sum(),
                size.sum().double(),
                losses.sum(),
                torch.tensor(float(len(targets)), dtype=torch.float64, device=device),
            ]
        ).cpu()
    group.all_reduce([totals])
    nats_with_bytes, text_bytes, nats, tokens = totals.tolist()
    return Evaluation(nats_with_bytes / (math.log(2) * max(text_bytes, 1)), nats / tokens)
