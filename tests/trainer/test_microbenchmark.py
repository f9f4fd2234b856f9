"""How long work takes once it is warm, by a clock that work itself moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.placement import microbenchmark


class Clock:
    """Work that takes `first` seconds when memory is new and `later` ones afterwards."""

    def __init__(self, first: float, later: float) -> None:
        self.now, self.times, self.first, self.later = 1000.0, 0, first, later

    def work(self) -> None:
        self.now += self.later if self.times else self.first
        self.times += 1


@pytest.fixture
def seconds_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], float]:
    def measure(clock: Clock) -> float:
        monkeypatch.setattr(microbenchmark.time, "monotonic", lambda: clock.now)
        return microbenchmark._seconds_of(clock.work)

    return measure


@pytest.mark.parametrize(
    ("first", "later", "times"),
    [
        (0.03, 0.01, 61),  # over 0.6 s
        (13.0, 9.0, 3),  # of long work two warm times are enough
        (39.0, 26.0, 2),  # of very long work one: two rows of depth 8 on a third of a core
    ],
)
def test_the_first_time_does_not_count(
    seconds_of: Callable[[Clock], float], first: float, later: float, times: int
) -> None:
    clock = Clock(first, later)
    assert seconds_of(clock) == pytest.approx(later)
    assert clock.times in (times, times + 1)  # a sum of hundredths may fall short of 0.6


def test_work_that_is_never_warm_in_time_is_measured_once(seconds_of: Callable[[Clock], float]) -> None:
    clock = Clock(60.0, 40.0)
    assert seconds_of(clock) == 60.0
    assert clock.times == 1
