"""How far the losses of a disturbed run may differ from those of one rank."""

import pytest
from e2e.continued import OTHER_ROWS, ROWS, _check_piece

EXPECTED = [3.0, 2.9, 2.8, 2.7, 2.6]


def check(difference: float, drifts: dict[int, float], step: int = 3) -> int:
    """Compare losses that differ at one of the steps 11 to 15; drifts: of the last step, by rows."""
    continued = []

    def losses(start: int, end: int, rows: int) -> list[float]:
        assert (start, end) == (10, 15)
        continued.append(rows)
        return [*EXPECTED[:-1], EXPECTED[-1] * (1 + drifts.get(rows, 0.0))]

    found = dict(enumerate(EXPECTED, 11))
    found[10 + step] *= 1 + difference
    others = _check_piece({1: dict(found), 2: {11: EXPECTED[0]}}, losses, (10, 15))
    assert continued[0] == ROWS
    return others


def test_equal_losses_need_no_other_micro_batches() -> None:
    assert check(1e-11, {}) == 0


@pytest.mark.parametrize("rows", OTHER_ROWS)
def test_as_much_as_training_amplifies_rounding_with_any_micro_batch(rows: int) -> None:
    assert check(1e-5, {rows: 1e-7}) == 1


def test_more_than_that_is_an_error() -> None:
    with pytest.raises(AssertionError, match="step 13, from the checkpoint of step 10"):
        check(1e-3, dict.fromkeys(OTHER_ROWS, 1e-7))
    with pytest.raises(AssertionError, match="step 11"):
        check(1e-5, dict.fromkeys(OTHER_ROWS, 1e-7), step=1)  # the drift begins four steps later
