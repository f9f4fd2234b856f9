"""How the items of a task are divided over the ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast
from unittest.mock import Mock

import pytest

from trainer.distributed.process_group import Collectives
from trainer.eval.striping import BLOCK, add_up, blocks, own_items


@dataclass
class FakeRanks:
    rank: int
    world_size: int


def divide(block: range, world_size: int, **settings: list[float] | list[int]) -> list[list[int]]:
    ranks = [cast("Collectives", FakeRanks(rank, world_size)) for rank in range(world_size)]
    return [own_items(block, rank, **settings) for rank in ranks]  # type: ignore[arg-type]


def test_blocks_hold_the_items_of_all_ranks_in_order() -> None:
    found = list(blocks(2 * BLOCK * 3 + 1, cast("Collectives", FakeRanks(0, 3))))
    assert [len(block) for block in found] == [BLOCK * 3, BLOCK * 3, 1]
    assert [number for block in found for number in block] == list(range(2 * BLOCK * 3 + 1))


def test_a_rank_waits_for_slower_ones_before_it_adds_up() -> None:
    ranks = Mock()
    began = time.monotonic() - 100
    assert add_up(ranks, began, 3.0) == [3]
    (waits, (seconds,), _), (sums, _, _) = ranks.method_calls
    assert (waits, sums) == ("wait_for_slower", "all_reduce")
    assert seconds >= 100


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_item_has_one_rank(world_size: int) -> None:
    block = range(100, 147)
    found = divide(block, world_size, costs=[float(number % 7 + 1) for number in block])
    assert sorted(number for numbers in found for number in numbers) == list(block)
    assert all(numbers == sorted(numbers) for numbers in found)


def test_items_of_unequal_cost_give_ranks_about_equal_work() -> None:
    block = range(32)
    costs = [float(1 + number**2 % 37) for number in block]
    work = [sum(costs[number] for number in numbers) for numbers in divide(block, 2, costs=costs)]
    assert max(work) / min(work) < 1.02
    in_turn = [sum(costs[::2]), sum(costs[1::2])]
    assert max(in_turn) / min(in_turn) > 1.02  # otherwise this would prove nothing


def test_ranks_take_work_in_proportion_to_their_shares() -> None:
    block = range(40)
    assert [len(numbers) for numbers in divide(block, 3, shares=[1, 3, 0])] == [10, 30, 0]
    costs = [1.0, 2.0] * 20
    work = [
        sum(costs[number] for number in numbers) for numbers in divide(block, 2, costs=costs, shares=[1, 3])
    ]
    assert work == [15.0, 45.0]
