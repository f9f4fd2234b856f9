"""The batch of a step is a pure function of (seed, step); epochs are permutations; ranks take slices."""

import numpy as np
import pytest

from trainer.data.loader import batch_rows, permutation, rank_rows

PINNED = [4, 1, 3, 6, 0, 7, 2, 5]


def test_the_same_seed_and_step_give_the_same_rows_in_any_order_of_asking() -> None:
    steps = [7, 0, 123, 7, 3]
    first = {step: batch_rows(42, step, 6, 25).tolist() for step in steps}
    for step in reversed(steps):
        assert batch_rows(42, step, 6, 25).tolist() == first[step]
    assert batch_rows(43, 7, 6, 25).tolist() != first[7]


@pytest.mark.parametrize(("rows_per_step", "n_rows"), [(4, 12), (5, 12), (7, 3), (1, 1), (12, 12)])
def test_every_epoch_is_a_permutation_also_where_batches_cross_its_border(
    rows_per_step: int, n_rows: int
) -> None:
    steps = -(-3 * n_rows // rows_per_step)
    walked = np.concatenate([batch_rows(1, step, rows_per_step, n_rows) for step in range(steps)])
    for epoch in range(3):
        assert sorted(walked[epoch * n_rows : (epoch + 1) * n_rows]) == list(range(n_rows))


def test_the_order_changes_from_epoch_to_epoch() -> None:
    assert batch_rows(1, 0, 50, 50).tolist() != batch_rows(1, 1, 50, 50).tolist()


def test_the_walk_does_not_depend_on_the_size_of_a_step() -> None:
    by_three = np.concatenate([batch_rows(5, step, 3, 10) for step in range(8)])
    by_eight = np.concatenate([batch_rows(5, step, 8, 10) for step in range(3)])
    assert by_three.tolist() == by_eight.tolist()


def test_the_order_is_pinned() -> None:
    # A resumed run reads the rows it would have read: these numbers must not change between releases.
    assert permutation(8, 42, 0).tolist() == PINNED
    assert batch_rows(42, 0, 8, 8).tolist() == PINNED


def test_a_caller_cannot_spoil_the_next_batch() -> None:
    rows = batch_rows(3, 0, 4, 8)
    before = rows.tolist()
    rows[:] = 0
    assert batch_rows(3, 0, 4, 8).tolist() == before


@pytest.mark.parametrize("shares", [[6], [3, 3], [1, 5], [2, 0, 4]])
def test_ranks_shares_make_up_the_batch(shares: list[int]) -> None:
    rows = batch_rows(9, 2, 6, 40)
    parts = [rank_rows(rows, shares, rank) for rank in range(len(shares))]
    assert [len(part) for part in parts] == shares
    assert np.concatenate(parts).tolist() == rows.tolist()


def test_shares_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="do not make up a batch of 6 rows"):
        rank_rows(np.arange(6), [3, 2], 0)


@pytest.mark.parametrize("arguments", [(-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0)])
def test_no_rows_is_an_error(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no batch"):
        batch_rows(*arguments)
