"""Who takes how many rows of a step: split by speed, and split anew when a host slows down. Pure arithmetic.

    split_rows([0.2, 0.6], 16)                     # seconds a row by rank -> [12, 4]
    balancer = Balancer(shares)                    # on rank 0 alone; it decides for all
    balancer.note([2.4, 2.5], 3.1)                 # each rank's seconds for its rows of a step, the step's
    balancer.propose()                             # another table, where that pays, and why

Speeds are measured, and measurements are noisy: a table is left only for one that takes off a tenth of a step
or more, so equal hosts keep equal shares, and with them the bits of their losses.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from trainer.data.loader import equal_split

GAIN = 0.1  # of a step's time: what another table must take off
WINDOW_STEPS = 10  # the median of which is a rank's speed
REST_STEPS = 20  # at least, between two changes
WARMING_STEPS = 2  # of an attempt, and after each change: buffers grow, kernels are prepared
ALIKE = 1.1  # ranks whose speeds differ by less count as equally fast


def split_rows(seconds_per_row: Sequence[float], rows: int, fixed: Sequence[float] = ()) -> list[int]:
    """The table that minimises the slowest rank's `fixed` + rows * seconds, by rank: at least one row each.

    Equal ranks get shares as equal as can be, the first ranks one more.
    """
    if rows < len(seconds_per_row) or min(seconds_per_row) <= 0:
        raise ValueError(f"{rows} rows cannot be split by {list(seconds_per_row)} seconds a row")
    start = list(fixed) or [0.0] * len(seconds_per_row)
    shares = [1] * len(seconds_per_row)
    ends = [(start[rank] + 2 * seconds, rank) for rank, seconds in enumerate(seconds_per_row)]
    heapq.heapify(ends)
    for _ in range(rows - len(shares)):  # each row to the rank that would be done with it first
        _, rank = heapq.heappop(ends)
        shares[rank] += 1
        heapq.heappush(ends, (start[rank] + (shares[rank] + 1) * seconds_per_row[rank], rank))
    return shares


def slowest(seconds_per_row: Sequence[float], shares: Sequence[int]) -> float:
    """Seconds until the last rank has computed its rows."""
    return max(seconds * share for seconds, share in zip(seconds_per_row, shares, strict=True))


def relative_speeds(seconds: Sequence[float]) -> list[float]:
    """Speeds by rank from the seconds for equal work, the fastest 1, in twentieths; all 1 where alike."""
    best = min(seconds)
    if max(seconds) < ALIKE * best:
        return [1.0] * len(seconds)
    return [max(1, round(20 * best / each)) / 20 for each in seconds]


class Change(NamedTuple):
    """Another table, and why."""

    shares: list[int]
    reason: str


def first_table(seconds_per_row: Sequence[float], rows: int, names: Sequence[str]) -> Change:
    """The table that a run begins with, from the speeds measured before it; `names` are the ranks' hosts."""
    equal = equal_split(rows, len(names))
    split = split_rows(seconds_per_row, rows)
    part = slowest(seconds_per_row, split) / slowest(seconds_per_row, equal)
    if part > 1 - GAIN:
        return Change(equal, f"{table_of(equal, names)}: their speeds are alike")
    speeds = ", ".join(f"{seconds:.3g}" for seconds in seconds_per_row)
    reason = f"{table_of(split, names)}: {part:.0%} of the time of equal shares ({speeds} s a row)"
    return Change(split, reason)


def table_of(shares: Sequence[int], names: Sequence[str]) -> str:
    """tower 11 rows, laptop 5 rows."""
    return ", ".join(
        f"{name} {share} row{'s' if share != 1 else ''}" for name, share in zip(names, shares, strict=True)
    )


class Balancer:
    """Watches what each rank needs for a row and says when another table pays."""

    def __init__(self, shares: Sequence[int], names: Sequence[str]) -> None:
        self.shares, self._names = list(shares), list(names)
        self._seconds: deque[list[float]] = deque(maxlen=WINDOW_STEPS)
        self._whole: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps = 0  # since the last change

    def note(self, seconds: Sequence[float], step_seconds: float) -> None:
        """Seconds that each rank computed for its rows of one more step, and those of the whole step."""
        self._steps += 1
        if self._steps > WARMING_STEPS:
            self._whole.append(step_seconds)
            self._seconds.append([each / rows for each, rows in zip(seconds, self.shares, strict=True)])

    @property
    def seconds_per_row(self) -> list[float]:
        """By rank, the median of the window."""
        return [statistics.median(of_rank) for of_rank in zip(*self._seconds, strict=True)]

    def propose(self) -> Change | None:
        """A table that takes off a tenth of a step or more; None while there is none, or it is too early."""
        if len(self._seconds) < WINDOW_STEPS or self._steps < REST_STEPS:
            return None
        now = self.seconds_per_row
        if min(now) <= 0:
            return None
        split = split_rows(now, sum(self.shares))
        gain = slowest(now, self.shares) - slowest(now, split)
        if gain < GAIN * statistics.median(self._whole):
            return None
        speeds = ", ".join(f"{name} {each:.3g}" for name, each in zip(self._names, now, strict=True))
        return Change(
            split,
            f"{table_of(split, self._names)}, before {'/'.join(map(str, self.shares))}: "
            f"{gain:.2g} s less a step (seconds a row: {speeds})",
        )

    def take(self, shares: Sequence[int]) -> None:
        """From now on these are the shares."""
        self.shares, self._steps = list(shares), 0
        self._seconds.clear()
        self._whole.clear()
