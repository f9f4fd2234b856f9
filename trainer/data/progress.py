"""One line of progress for a long step: redrawn on a terminal, repeated every few seconds in a log."""

import sys
import time
from types import TracebackType
from typing import Self

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 5.0


class Progress:
    """Counts bytes of text. Use as a context manager: `with Progress("reading", total) as p: p.add(n)`."""

    def __init__(self, label: str, total_bytes: int = 0) -> None:
        self.label = label
        self.total = total_bytes
        self.done = 0
        self.terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self.shown = self.started if not self.terminal else 0.0

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

    def add(self, n_bytes: int) -> None:
        """Count `n_bytes` more and show it if the last sight of it is long enough ago."""
        self.done += n_bytes
        now = time.monotonic()
        if now - self.shown < (TERMINAL_SECONDS if self.terminal else LOG_SECONDS):
            return
        self.shown = now
        self.say()

    def say(self) -> None:
        """Show the line now."""
        line = f"{self.label}: {self.done / 1e6:,.1f} MB"
        if self.total:
            line += f" of {self.total / 1e6:,.1f} ({min(100, 100 * self.done // self.total)}%)"
        line += f", {self.seconds:.0f} s"
        sys.stderr.write(f"\r\033[K{line}" if self.terminal else f"{line}\n")
        sys.stderr.flush()
