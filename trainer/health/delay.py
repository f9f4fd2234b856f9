"""Time limits: when a step is late, when its delay is reported, and when a lost rank ends the attempt."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping

from trainer.config import ConfigError
from trainer.health.diagnosis import Verdict

STALL_VARIABLE = "NANOFLEET_STALL_SECONDS"
STALL_SECONDS = 60.0
REPORT_SECONDS = 10.0
IMPAIRED_STALLS = 5  # a run ends when a peer's traffic has been impaired for this many stall times


def stall_seconds() -> float:
    """The shortest time, in seconds, after which a step is late: NANOFLEET_STALL_SECONDS, by default 60.

    Raises ConfigError if the variable is not a number above 0.
    """
    text = os.environ.get(STALL_VARIABLE, "") or str(STALL_SECONDS)
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ConfigError(f"{STALL_VARIABLE} is {text!r} in the environment: it takes seconds, above 0.")


class DelayReport:
    """Decides when a late stage is reported, and when a lost rank ends the attempt.

    A stage is a step, an evaluation or loading (see `Stage`). A rank is lost if it is gone, frozen or
    unreachable, or if traffic with it is impaired. reported: whether this delay has been reported.
    """

    def __init__(self, stall: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a delay that has not been reported.

        stall: the stall time in seconds (see `stall_seconds`). clock: returns the time in seconds; tests pass
        another one.
        """
        self._every, self._clock = min(REPORT_SECONDS, stall / 4), clock
        self._longest = IMPAIRED_STALLS * stall
        # Seconds that a verdict must last before it ends the attempt.
        self._limits = {
            Verdict.GONE: self._every,
            Verdict.FROZEN: stall,
            Verdict.UNREACHABLE: stall,
            Verdict.IMPAIRED: self._longest,
        }
        self._next = self._report_again_at = 0.0
        # By lost rank: its verdict, since when it has this verdict, since when it is lost.
        self._lost: dict[int, tuple[Verdict, float, float]] = {}
        self.reported = False

    @property
    def is_due(self) -> bool:
        """Whether to collect evidence now: at first, then every 10 s, or every stall / 4 if that is less."""
        return self._clock() >= self._next

    def should_report(self, lost: Mapping[int, Verdict], late_seconds: float) -> bool:
        """Record the verdicts on lost ranks; returns whether to log a report now.

        lost: {lost rank: its verdict}. late_seconds: the seconds since the late stage began. True at the
        first call, when the lost ranks or their verdicts change, and when `late_seconds` has doubled since
        the last report.
        """
        now, before, self._lost = self._clock(), self._lost, {}
        self._next = now + self._every
        for rank, verdict in lost.items():
            previous, since, lost_since = before.get(rank, (verdict, now, now))
            self._lost[rank] = verdict, since if previous == verdict else now, lost_since
        changed = {rank: verdict for rank, (verdict, _, _) in before.items()} != dict(lost)
        wants = not self.reported or changed or late_seconds >= self._report_again_at
        if wants:
            self.reported, self._report_again_at = True, 2 * late_seconds
        return wants

    @property
    def is_over(self) -> bool:
        """Whether a rank has been lost for so long that the attempt must end.

        Each verdict has a time limit. The attempt must end if a rank has had one verdict for the limit of
        that verdict, or has been lost with changing verdicts for the longest limit (5 stall times).
        """
        now = self._clock()
        return any(
            now - since >= self._limits[verdict] or now - lost_since >= self._longest
            for verdict, since, lost_since in self._lost.values()
        )
