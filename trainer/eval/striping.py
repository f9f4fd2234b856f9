"""How ranks divide the items (questions) of a task: in blocks; after each they add up their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trainer.distributed.process_group import Collectives

BLOCK = 16  # items of a rank between two sums over the ranks


def blocks(n_items: int, group: Collectives) -> Iterator[range]:
    """Yield the indices of the items of each block, as a range, in order.

    n_items: number of items of the task. group: the ranks; each has BLOCK items of a block.
    """
    size = BLOCK * group.world_size
    for first in range(0, n_items, size):
        yield range(first, min(first + size, n_items))


def own_items(
    block: range, group: Collectives, costs: Sequence[float] = (), shares: Sequence[int] = ()
) -> list[int]:
    """The indices of those items of a block that this rank evaluates, in order.

    block: indices of its items. group: the ranks. costs: about how long each item of the block takes; empty:
    equally long. shares: proportions in which the ranks divide the work; empty: equally. The most expensive
    item is assigned first, each to the rank that would be done first with it (longest processing time first).
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


def add_up(group: Collectives, *values: float) -> list[int]:
    """The sum of each of `values` over all ranks, as integers. All ranks call it with equally many values."""
    totals = torch.tensor(values, dtype=torch.float64)
    group.all_reduce([totals])
    return [round(total) for total in totals.tolist()]
