"""How a rank speaks: lines for a person, with the rank in front, or for a program, one JSON object a line.

    say = Voice(place)
    say("Saved checkpoints/step_000100 in 0.8 s.", event="saved", figures={"step": 100, "seconds": 0.8})

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
    """Says each line whole and at once on standard output; a reader that has left does not end the run."""

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
        """Say `text`; what it tells in `figures` a program reads as fields of their own."""
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
        """Show the traceback of an error that no sentence was made for."""
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
        """Say how the attempt ended; `detail` are lines under the sentence."""
        text = f"{outcome}: {reason}" + (f"\n{detail}" if detail else "")
        level = "info" if outcome in ("finished", "stopped") else "error"
        self(text, event="outcome", level=level, figures={"outcome": outcome, "reason": reason})

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            sys.stdout.write(text)
            sys.stdout.flush()


def set_up_streams() -> None:
    """Make both streams go out line by line, whatever they are and whatever the locale can write.

    A crash in native code leaves the Python stack of all threads on standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have put something else there
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()


def flush_streams() -> None:
    """Bring out what is still held back, before the process ends without Python's own farewell."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()


def _plain(value: Any) -> Any:
    """A value that JSON can hold: numbers that are none become null, what is unknown becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
