"""One line of progress for a long step: redrawn on a terminal, repeated every few seconds in a log."""

import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 5.0
RATE_SECONDS = 20.0  # the rate is that of so much time: an average over hours says little on what is left


class Progress:
    """Counts bytes (or, with `unit`, other things), from several threads if need be.

    with Progress("reading text", total) as progress: progress.add(n)
    """

    def __init__(self, label: str, total: int = 0, unit: str = "MB") -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self.brought = 0  # of `done`, what was there before the step began
        self.terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self.shown = self.started if not self.terminal else 0.0
        self.marks = deque([(self.started, 0)])  # when how much was done, to tell the rate
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.started

    def add(self, n: int) -> None:
        """Count `n` more (less, where work is lost) and show the line if its last sight is long ago."""
        with self.lock:
            self.done += n
            now = time.monotonic()
            if now - self.shown < (TERMINAL_SECONDS if self.terminal else LOG_SECONDS):
                return
            self.shown = now
            self.say()

    def bring(self, n: int) -> None:
        """Count `n` that an earlier run has done: they are no part of the rate."""
        with self.lock:
            self.done += n
            self.brought += n

    def note(self, text: str) -> None:
        """A line of its own."""
        with self.lock:
            sys.stderr.write(f"\r\033[K{text}\n" if self.terminal else f"{text}\n")
            sys.stderr.flush()

    def say(self) -> None:
        """Show the line now."""
        sys.stderr.write(f"\r\033[K{self.line()}" if self.terminal else f"{self.line()}\n")
        sys.stderr.flush()

    def line(self) -> str:
        """`reading text: 12.0 of 60.0 MB (20%), 3.0 MB/s, 4 s, 16 s left`"""
        now = time.monotonic()
        self.marks.append((now, self.done - self.brought))
        while len(self.marks) > 2 and now - self.marks[1][0] > RATE_SECONDS:
            self.marks.popleft()
        since, before = self.marks[0]
        rate = max(0.0, (self.done - self.brought - before) / max(now - since, 1e-3))
        parts = [f"{self._figure(self.done)} {self.unit}"]
        if self.total:
            share = min(100, 100 * self.done // self.total)
            parts = [f"{self._figure(self.done)} of {self._figure(self.total)} {self.unit} ({share}%)"]
        parts += [f"{self._figure(rate)} {self.unit}/s", duration(self.seconds)]
        if rate and self.total > self.done:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        return f"{self.label}: " + ", ".join(parts)

    def _figure(self, n: float) -> str:
        return f"{n / 1e6:,.1f}" if self.unit == "MB" else f"{n:,.0f}"


def duration(seconds: float) -> str:
    """`8 s`, `2 min 05 s`, `3 h 20 min`"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
