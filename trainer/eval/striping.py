"""How ranks divide the items (questions) of a task: block by block. All ranks share the items of a block.

After each block they add up their results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from trainer.distributed.process_group import Collectives

BLOCK = 16  # items of a rank between two sums over the ranks


def blocks(n_items: int, group: Collectives) -> Iterator[range]:
    """Yield the blocks of a task in order, each as the range of the indices of its items.

    n_items: number of items of the task. group: the ranks. A block has BLOCK items times the number of ranks;
    the last block may have fewer.
    """
    size = BLOCK * group.world_size
    for first in range(0, n_items, size):
        yield range(first, min(first + size, n_items))


def own_items(
    block: range, group: Collectives, costs: Sequence[float] = (), shares: Sequence[int] = ()
) -> list[int]:
    """The indices of those items of a block that this rank evaluates, in order.

    block: indices of the items of the block. group: the ranks. costs: estimated cost of each item of the
    block, in any unit; empty: equal costs. shares: proportions in which the ranks divide the work; empty:
    equal parts. Items are assigned in order of falling cost, each to the rank that would finish it first
    (longest processing time first).
    """
    costs = costs or [1.0] * len(block)
    shares = shares or [1] * group.world_size
    ranks = [rank for rank, share in enumerate(shares) if share > 0]
    loads = dict.fromkeys(ranks, 0.0)
    owners = {}
    for place in sorted(range(len(block)), key=lambda place: -costs[place]):
        owner = min(ranks, key=lambda rank: (loads[rank] + costs[place]) / shares[rank])
        loads[owner] += costs[place]
        owners[block[place]] = owner
    return sorted(number for number, owner in owners.items() if owner == group.rank)


def add_up(group: Collectives, began: float, *values: float) -> list[int]:
    """The sum of each of `values` over all ranks, rounded to integers.

    A collective call. All ranks pass the same number of values. began: the time (time.monotonic) at which
    this rank began its items of the block. The longer these took, the longer this rank waits for the other
    ranks before the collective times out.
    """
    group.wait_for_slower(time.monotonic() - began)
    totals = torch.tensor(values, dtype=torch.float64)
    group.all_reduce([totals])
    return [round(total) for total in totals.tolist()]
