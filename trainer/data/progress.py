"""Progress of long work on standard error: tqdm's bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 5.0


class Progress(tqdm):
    """A progress counter on standard error, in bytes or in `unit`. Several threads may call `add` at once.

    with Progress("reading text", total) as progress: progress.add(n)
    """

    monitor_interval = 0  # tqdm's own thread would redraw a bar that has stopped

    def __init__(self, label: str, total: int = 0, unit: str = "B") -> None:
        self.terminal = sys.stderr.isatty()
        self.lock = threading.Lock()
        super().__init__(
            desc=label,
            total=total or None,
            unit=unit,
            unit_scale=True,
            leave=False,
            file=sys.stderr,
            ncols=None if self.terminal else 0,  # 0: figures without a bar
            mininterval=TERMINAL_SECONDS if self.terminal else LOG_SECONDS,
            delay=0 if self.terminal else LOG_SECONDS,
            miniters=1,
        )

    def add(self, n: int) -> None:
        """Add `n` to the count; a negative `n` subtracts work that has to be repeated."""
        with self.lock:
            self.update(n)

    def add_existing(self, n: int) -> None:
        """Add `n`, work that an earlier process has completed, to the count but not to the displayed rate."""
        with self.lock:
            self.initial += n
            self.n += n
            self.last_print_n += n

    def note(self, text: str) -> None:
        """Print `text` as a line of its own on standard error, above the bar if there is one."""
        if self.terminal:
            self.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Called by tqdm at each update: draws the bar on a terminal, else prints the figures as a line."""
        if self.terminal:
            return super().display(msg, pos)
        print(self, file=sys.stderr, flush=True)
        return True

    def close(self) -> None:
        """End the progress: on a terminal the bar is removed, in a log the printed lines stay."""
        if not self.terminal:
            self.disable = True  # tqdm would print carriage returns
        super().close()
