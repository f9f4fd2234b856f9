"""The log of a rank: lines with the rank as prefix, or one JSON object per line.

    log = RunLogger(env)
    log("Saved checkpoints/step_000100 in 0.8 s.", event="saved", figures={"step": 100, "seconds": 0.8})

[rank 0] Saved checkpoints/step_000100 in 0.8 s.
{"time": 1763710000.1, "rank": 0, "host": "a", "level": "info", "event": "saved", "message": "Saved ...", ...}
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import math
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from trainer.host.rank_env import RankEnv


class RunLogger:
    """Writes whole lines to standard output at once; a closed pipe does not end the run."""

    def __init__(self, env: RankEnv, as_json: bool = False) -> None:
        self._rank, self._host, self._as_json = env.rank, env.host, as_json

    def __call__(
        self,
        text: str,
        *,
        event: str = "note",
        level: str = "info",
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Log `text`; as JSON, `figures` become fields."""
        if self._as_json:
            line = {
                **(figures or {}),
                "time": time.time(),
                "rank": self._rank,
                "host": self._host,
                "level": level,
                "event": event,
                "message": text,
            }
            self._write(json.dumps(_plain(line)) + "\n")
        else:
            self._write("".join(f"[rank {self._rank}] {part}\n" for part in text.split("\n")))

    def failure(self, error: BaseException) -> None:
        """Log the traceback of an unexpected error."""
        if self._as_json:
            text = "".join(traceback.format_exception(error))
            self(
                f"{type(error).__name__}: {error}",
                event="traceback",
                level="error",
                figures={"traceback": text},
            )
        else:
            traceback.print_exception(error)

    def ended(self, outcome: str, reason: str, detail: str = "") -> None:
        """Log the outcome of the attempt; `detail` are further lines."""
        text = f"{outcome}: {reason}" + (f"\n{detail}" if detail else "")
        level = "info" if outcome in ("finished", "stopped") else "error"
        self(text, event="outcome", level=level, figures={"outcome": outcome, "reason": reason})

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            sys.stdout.write(text)
            sys.stdout.flush()


def set_up_streams() -> None:
    """Make both streams line-buffered and independent of the locale.

    A crash in native code prints the Python stacks of all threads on standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have put something else there
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()


def flush_streams() -> None:
    """Flush both streams, before the process ends without the interpreter's cleanup."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            stream.flush()


def _plain(value: Any) -> Any:
    """A value for JSON: numbers that are not finite become null, unknown types become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
