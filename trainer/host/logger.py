"""The log of a rank: lines with the rank as prefix, or one JSON object per line.

    log = RunLogger(env)
    log.info("Saved checkpoints/step_000100 in 0.8 s.", extra=fields("saved", step=100, seconds=0.8))

[rank 0] Saved checkpoints/step_000100 in 0.8 s.
{"step": 100, "seconds": 0.8, "time": 1763710000.1, "rank": 0, "host": "a", "level": "info", ...}
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import math
import sys
import traceback
from typing import Any

from trainer.host.rank_env import RankEnv


class RunLogger(logging.Logger):
    """The logger of a rank, which writes to standard output.

    env: the environment of the rank. Each line has the rank, and as JSON also the host. as_json: whether each
    line is a JSON object. The logger is not registered with the module logging, so libraries do not log to
    it.
    """

    def __init__(self, env: RankEnv, as_json: bool = False) -> None:
        super().__init__("trainer", logging.INFO)
        self._as_json = as_json
        self.begin(env)

    def begin(self, env: RankEnv) -> None:
        """Show the rank of `env` in all later lines. Call this again when this process gets another rank."""
        self.handlers = [StdoutHandler(env, self._as_json)]

    def failure(self, error: BaseException) -> None:
        """Log the traceback of an unexpected error: to standard error, or as one line of JSON."""
        if self._as_json:
            text = "".join(traceback.format_exception(error))
            self.error(f"{type(error).__name__}: {error}", extra=fields("traceback", traceback=text))
        else:
            traceback.print_exception(error)

    def ended(self, outcome: str, reason: str, detail: str = "") -> None:
        """Log how the attempt ended.

        outcome: finished, stopped, retryable or final. reason: a sentence. detail: text for further lines; ""
        for none.
        """
        text = f"{outcome}: {reason}" + (f"\n{detail}" if detail else "")
        level = logging.INFO if outcome in ("finished", "stopped") else logging.ERROR
        self.log(level, text, extra=fields("outcome", outcome=outcome, reason=reason))


def fields(event: str, **figures: Any) -> dict[str, Any]:
    """The `extra` argument of a logging call: {"event": event, "figures": {name: value}}.

    event: the name of the event. figures: values that become fields of the line in a JSON log.
    """
    return {"event": event, "figures": figures}


class StdoutHandler(logging.Handler):
    """A log handler that writes whole lines to the current sys.stdout. A closed pipe does not end the run.

    env: the environment of the rank. as_json: whether each log record becomes a line of JSON; if not, each
    line of its message begins with the rank, as "[rank 0] ".
    """

    def __init__(self, env: RankEnv, as_json: bool) -> None:
        super().__init__()
        self._env, self._as_json = env, as_json

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            prefix = f"[rank {self._env.rank}] "
            return prefix + record.getMessage().replace("\n", "\n" + prefix)
        line = {
            **getattr(record, "figures", {}),
            "time": record.created,
            "rank": self._env.rank,
            "host": self._env.host,
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "note"),
            "message": record.getMessage(),
        }
        return json.dumps(_plain(line))


def set_up_streams() -> None:
    """Make stdout and stderr line-buffered, and print characters that their encoding lacks as escapes.

    Also enables faulthandler: a crash in native code prints the Python stacks of all threads on stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may have put something else there
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    with contextlib.suppress(OSError):
        faulthandler.enable()


def flush_streams() -> None:
    """Flush stdout and stderr, before the process ends without the interpreter's cleanup."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            stream.flush()


def _plain(value: Any) -> Any:
    """`value` for JSON: numbers that are not finite become null, values of unknown types become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
