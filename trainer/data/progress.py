"""Progress of a long step: tqdm's bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 5.0


class Progress(tqdm):
    """Counts bytes (or, with `unit`, other things); threads may share it.

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
        """Count `n` more; a negative `n` removes lost work."""
        with self.lock:
            self.update(n)

    def add_existing(self, n: int) -> None:
        """Count `n` that an earlier process has done: they do not count for the rate."""
        with self.lock:
            self.initial += n
            self.n += n
            self.last_print_n += n

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if self.terminal:
            self.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Draw the bar, or print a line where there is no terminal."""
        if self.terminal:
            return super().display(msg, pos)
        print(self, file=sys.stderr, flush=True)
        return True

    def close(self) -> None:
        """Remove the bar; lines stay."""
        if not self.terminal:
            self.disable = True  # tqdm would print carriage returns
        super().close()
