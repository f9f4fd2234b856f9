"""How ranks divide the items (questions) of a task: in blocks; after each they add up their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trainer.data.loader import proportional_split, rank_rows
from trainer.distributed.process_group import Collectives

BLOCK = 16  # items of a rank between two sums over the ranks


def blocks(n_items: int, group: Collectives) -> Iterator[range]:
    """Yield the numbers of the items of each block, as a range, in order.

    n_items: of the task. group: the ranks.
    """
    size = BLOCK * group.world_size
    for first in range(0, n_items, size):
        yield range(first, min(first + size, n_items))


def own_items(block: range, group: Collectives, shares: Sequence[int] = ()) -> list[int]:
    """The items of a block that this rank evaluates, in proportion to `shares`; empty: equally many."""
    split = proportional_split(shares or [1] * group.world_size, len(block))
    numbers: list[int] = rank_rows(np.array(block), split, group.rank).tolist()
    return numbers


def add_up(group: Collectives, *values: float) -> list[int]:
    """The sums over all ranks of each of the given values, as integers. All ranks must call it."""
    totals = torch.tensor(values, dtype=torch.float64)
    group.all_reduce([totals])
    return [round(total) for total in totals.tolist()]
