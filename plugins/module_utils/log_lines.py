# SPDX-License-Identifier: MIT
"""Parses the log of a run: its end, the last attempt, the first error. Standard library only."""

from __future__ import annotations

import os
import re
import signal

KILLED = "Killed (by SIGKILL, or because memory ran out)"
TAIL_BYTES = 1 << 18
ATTEMPT = "=== "
"""Prefix of the first line of an attempt in train.log. The script of the role launch's unit writes it."""
TRACEBACK = "Traceback (most recent call last):"
ERROR = re.compile(
    r"Traceback \(most recent call last\)|\b[A-Za-z_.]*(?:Error|Exception)\b\s*:"
    r"|\berror\b|\bfatal\b|\bkilled\b|out of memory|^\[rank \d+\] (?:retryable|final): |failed \(exitcode",
    re.IGNORECASE,
)
FRAME = re.compile(r"(?:\[[^]]*\]:? )?\s*frame #\d+: ")
"""A stack frame that torch's C++ prints after an error; it names a function, not the cause."""
END = re.compile(r"^\[rank \d+\] (?:retryable|final): ")
"""Prefix of the line in which a rank reports how it ended. Later lines of ranks are details of it."""
BY_SIGNAL = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: \d+")
RULE = re.compile(r"={20,}")
PREFIXED = re.compile(r"^\[[^]]*\]:? ")
"""The [rank] prefix of a line."""


def tail(path: str) -> list[str]:
    """The lines in the last 256 KiB (TAIL_BYTES) of a text file; [] if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > TAIL_BYTES else lines


def lines_after(path: str, start: int) -> tuple[list[str], int]:
    """The lines of a text file from byte `start` to the last line break: (lines, byte after that line break).

    If `start` is inside a line, the first line of the result is the rest of that line. A file that is shorter
    than `start` is read from its begin. Raises OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        start = start if start <= file.seek(0, os.SEEK_END) else 0
        file.seek(start)
        data, newline, _ = file.read().rpartition(b"\n")
    return data.decode("utf-8", "replace").splitlines(), start + len(data) + len(newline)


def attempt_of(lines: list[str]) -> list[str]:
    """The lines of the last attempt in a log; all lines if no line begins with ATTEMPT."""
    starts = [index for index, line in enumerate(lines) if line.startswith(ATTEMPT)]
    return lines[starts[-1] :] if starts else lines


def is_error(line: str) -> bool:
    """Whether a line reports an error or begins a traceback."""
    return bool(ERROR.search(line)) and not FRAME.match(line)


def first_error(lines: list[str], count: int) -> list[str]:
    """The first error in the lines of a log, with the lines that belong to it; at most `count` lines.

    Of a traceback the last lines are kept, because they name the cause. Lines after another error are taken
    only up to the next traceback, because torchrun's traceback reports only the end of its child process.
    If no line reports an error, the last `count` lines are returned.
    """
    lines = [line for line in lines if not FRAME.match(line)]
    for index, line in enumerate(lines):
        if not is_error(line):
            continue
        end = index + 1
        if END.match(line):
            while end < len(lines) and lines[end].startswith("[rank "):
                end += 1
            return lines[index:end][:count]
        if line.endswith(TRACEBACK):
            while end < len(lines) and PREFIXED.sub("", lines[end])[:1] in (" ", ""):
                end += 1
            return lines[index : end + 1][-count:]
        while end < len(lines) and TRACEBACK not in lines[end]:
            end += 1
        return lines[index:end][:count]
    return lines[-count:]


def signal_text(line: str) -> str:
    """A short text, such as `Ended by SIGTERM`, for torchrun's line about a rank that a signal has ended.

    Any other line is returned unchanged.
    """
    found = BY_SIGNAL.search(line)
    if not found:
        return line
    number = int(found.group(1))
    if number == signal.SIGKILL:
        return KILLED
    try:
        return "Ended by " + signal.Signals(number).name
    except ValueError:
        return line


def without_torchrun_report(texts: list[str]) -> list[int]:
    """Indices of all lines except torchrun's own traceback and table, which report only that a rank ended."""
    kept, skipping, rules = [], False, 0
    for index, text in enumerate(texts):
        if text == TRACEBACK and any("ChildFailedError" in later for later in texts[index : index + 40]):
            skipping, rules = True, 0
        if not skipping or text.startswith("[rank "):
            kept.append(index)
        rules += bool(skipping and RULE.fullmatch(text.rstrip()))
        skipping = skipping and rules < 2
    return kept
