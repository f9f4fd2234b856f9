"""Bits per byte on the validation split, computed by all ranks: a loss independent of the vocabulary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.loader import IGNORED_TARGET, Split, proportional_split, rank_rows, read_sequences
from trainer.distributed.process_group import Collectives
from trainer.model.gpt import GPT


class ValidationResult(NamedTuple):
    """The result of an evaluation on the validation split.

    val_bpb: bits per byte of text. val_loss: mean loss in nats per token.
    """

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
) -> ValidationResult:
    """Compute bits per byte and loss on the first rows of a split.

    A collective call; all ranks return the same result. Raises RowsChangedError if a row of a Split differs
    from its checksum.
    rows: (n, T+1) token ids, one sequence per row. In a Split of conversations, only the tokens whose highest
        bit (TRAINED) is set are targets.
    token_bytes: (V,) number of bytes in the text of each token; 0 for special tokens, which count for the
        loss but not for the bits per byte.
    eval_tokens: number of positions to evaluate, rounded up to whole rows of T; at most all rows.
    device_batch_size: number of rows in a forward pass.
    group: the ranks.
    shares: rows per rank in a training step; the ranks divide the evaluated rows in the same proportions.
    """
    n_rows = min(len(rows), math.ceil(eval_tokens / (rows.shape[1] - 1)))
    mine = rank_rows(np.arange(n_rows), proportional_split(shares, n_rows), group.rank)
    device = model.device
    token_bytes = token_bytes.to(device)
    began = time.monotonic()
    totals = torch.zeros(4, dtype=torch.float64)  # nats of targets with bytes, bytes, nats of all, tokens
    for start in range(0, len(mine), device_batch_size):
        tokens, targets = read_sequences(rows, mine[start : start + device_batch_size])
        idx_BT = torch.from_numpy(tokens[:, :-1].astype(np.int64)).to(device)
        targets_BT = torch.from_numpy(targets).to(device)
        losses = model(idx_BT, targets_BT, loss_reduction="none").double()  # (rows * T)
        counted = (targets_BT != IGNORED_TARGET).flatten()
        size = token_bytes[targets_BT.flatten().clamp_min(0)] * counted
        totals += torch.stack(
            [
                losses[size > 0].sum(),
                size.sum().double(),
                losses.sum(),
                counted.sum().double(),
            ]
        ).cpu()
    group.wait_for_slower(time.monotonic() - began)
    group.all_reduce([totals])
    nats_with_bytes, text_bytes, nats, n_targets = totals.tolist()
    return ValidationResult(nats_with_bytes / (math.log(2) * max(text_bytes, 1)), nats / max(n_targets, 1))
