"""The batch split: rows per rank by measured speed, changed when a host slows down. Pure arithmetic.

    split_rows([0.2, 0.6], 16)                     # seconds a row by rank -> [12, 4]
    balancer = Balancer(shares, names)             # on rank 0, which decides for all
    balancer.record([2.4, 2.5], 3.1)               # seconds of each rank for its rows, and of the step
    balancer.propose()                             # a faster split and the reason, or None

Measurements are noisy: a split changes only if that saves a tenth of a step or more. So equal hosts keep an
equal split, and a repeated run computes bitwise equal losses.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from trainer.data.loader import equal_split
from trainer.formatting import counted

GAIN = 0.1  # the part of a step's time that another split must save
WINDOW_STEPS = 10  # a rank's speed is the median over these
REST_STEPS = 20  # the least between two changes
WARMING_STEPS = 2  # not measured, at the start and after each change: buffers grow, kernels load
ALIKE = 1.1  # speeds that differ by a smaller factor count as equal


def split_rows(seconds_per_row: Sequence[float], rows: int) -> list[int]:
    """Rows per rank for a step of `rows` rows, so that the last rank finishes as early as possible.

    seconds_per_row: seconds that each rank takes for one row, in rank order. Each rank gets at least one row.
    Equal ranks get an equal split; with a remainder, the first ranks get one row more. Raises ValueError if
    there are fewer rows than ranks, or if a rank takes 0 seconds or less.
    """
    if rows < len(seconds_per_row) or min(seconds_per_row) <= 0:
        raise ValueError(f"{rows} rows cannot be split by {list(seconds_per_row)} seconds a row")
    shares = [1] * len(seconds_per_row)
    ends = [(2 * seconds, rank) for rank, seconds in enumerate(seconds_per_row)]
    heapq.heapify(ends)
    for _ in range(rows - len(shares)):  # each row to the rank that would finish it first
        rank = ends[0][1]
        shares[rank] += 1
        heapq.heapreplace(ends, ((shares[rank] + 1) * seconds_per_row[rank], rank))
    return shares


def slowest(seconds_per_row: Sequence[float], shares: Sequence[int]) -> float:
    """Seconds that the slowest rank takes for its rows.

    seconds_per_row: seconds that each rank takes for one row. shares: rows per rank.
    """
    return max(seconds * share for seconds, share in zip(seconds_per_row, shares, strict=True))


def relative_speeds(seconds: Sequence[float]) -> list[float]:
    """The speed of each rank relative to the fastest rank, whose speed is 1; rounded to multiples of 1/20.

    seconds: seconds that each rank takes for equal work. If they differ by a factor below ALIKE, all speeds
    are 1.
    """
    best = min(seconds)
    if max(seconds) < ALIKE * best:
        return [1.0] * len(seconds)
    return [max(1, round(20 * best / each)) / 20 for each in seconds]


class SplitChange(NamedTuple):
    """A batch split with the text that explains it.

    shares: rows per rank. reason: the text for the log, such as "tower 8 rows, laptop 8 rows: their speeds
    are alike".
    """

    shares: list[int]
    reason: str


def first_split(seconds_per_row: Sequence[float], rows: int, names: Sequence[str]) -> SplitChange:
    """The batch split at the start of a run: by measured speed if that pays, else equal.

    A split by speed pays if it makes a step shorter by the fraction GAIN or more. seconds_per_row: seconds
    that each rank takes for one row. rows: rows of a step over all ranks. names: names of the ranks.
    """
    equal = equal_split(rows, len(names))
    split = split_rows(seconds_per_row, rows)
    part = slowest(seconds_per_row, split) / slowest(seconds_per_row, equal)
    if part > 1 - GAIN:
        alike = max(seconds_per_row) < ALIKE * min(seconds_per_row)
        why = "their speeds are alike" if alike else "no other split makes a step a tenth shorter"
        return SplitChange(equal, f"{describe_split(equal, names)}: {why}")
    speeds = ", ".join(f"{seconds:.3g}" for seconds in seconds_per_row)
    reason = (
        f"{describe_split(split, names)}: a step takes {part:.0%} of the time that it takes with equal rows "
        f"(seconds per row: {speeds})"
    )
    return SplitChange(split, reason)


def describe_split(shares: Sequence[int], names: Sequence[str]) -> str:
    """The batch split as text: "tower 11 rows, laptop 5 rows". shares, names: rows and name of each rank."""
    return ", ".join(f"{name} {counted(rows, 'row')}" for name, rows in zip(names, shares, strict=True))


class Balancer:
    """Measures the seconds per row of each rank, and proposes a faster batch split during the run.

    shares: rows per rank at the start. names: names of the ranks. The attribute `shares` has the current rows
    per rank. The attribute `proposed` is a split that the ranks have not applied yet; None if there is none.
    """

    def __init__(self, shares: Sequence[int], names: Sequence[str]) -> None:
        self.shares, self._names = list(shares), list(names)
        self.proposed: SplitChange | None = None
        self._seconds: deque[list[float]] = deque(maxlen=WINDOW_STEPS)
        self._whole: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps = 0  # since the last change

    def update(self, applied: Sequence[int], seconds: Sequence[float], step_seconds: float) -> None:
        """Call this after each step: records the step and, if another split is faster, sets `proposed`.

        applied: the new rows per rank, if the ranks have changed their batch split after this step; empty if
        not. After a change, measuring starts from the beginning. While a proposal is not applied, nothing is
        recorded. seconds, step_seconds: as for `record`.
        """
        if applied:
            self.apply(applied)
        elif self.proposed is None:
            self.record(seconds, step_seconds)
            self.proposed = self.propose()

    def record(self, seconds: Sequence[float], step_seconds: float) -> None:
        """Record the times of a step.

        The first WARMING_STEPS steps, at the start and after a change of the split, are not recorded.
        seconds: seconds that each rank computed. step_seconds: seconds of the whole step.
        """
        self._steps += 1
        if self._steps > WARMING_STEPS:
            self._whole.append(step_seconds)
            self._seconds.append([each / rows for each, rows in zip(seconds, self.shares, strict=True)])

    def propose(self) -> SplitChange | None:
        """A split that saves a tenth of a step or more, computed from the recorded steps.

        None if there is no such split, or in the first REST_STEPS steps, at the start and after a change of
        the split.
        """
        if len(self._seconds) < WINDOW_STEPS or self._steps < REST_STEPS:
            return None
        now = [statistics.median(of_rank) for of_rank in zip(*self._seconds, strict=True)]
        if min(now) <= 0:
            return None
        split = split_rows(now, sum(self.shares))
        gain = slowest(now, self.shares) - slowest(now, split)
        if gain < GAIN * statistics.median(self._whole):
            return None
        speeds = ", ".join(f"{name} {each:.3g}" for name, each in zip(self._names, now, strict=True))
        return SplitChange(
            split,
            f"{describe_split(split, self._names)} (it was {'/'.join(map(str, self.shares))}), about "
            f"{gain:.2g} s less a step (measured seconds a row: {speeds})",
        )

    def apply(self, shares: Sequence[int]) -> None:
        """Set the rows per rank of the next steps, and discard the recorded steps."""
        self.shares, self._steps, self.proposed = list(shares), 0, None
        self._seconds.clear()
        self._whole.clear()
