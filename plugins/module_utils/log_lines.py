# SPDX-License-Identifier: MIT
"""Reading a run's log: its end, its last attempt, the first error in it. Standard library only."""

from __future__ import annotations

import os
import re
import signal

KILLED = "Killed (by SIGKILL, or because memory ran out)"
TAIL_BYTES = 1 << 18
ATTEMPT = "=== "
"""What the line begins with that opens an attempt in train.log (see the role's unit)."""
TRACEBACK = "Traceback (most recent call last):"
ERROR = re.compile(
    r"Traceback \(most recent call last\)|\b[A-Za-z_.]*(?:Error|Exception)\b\s*:"
    r"|\berror\b|\bfatal\b|\bkilled\b|out of memory|^\[rank \d+\] (?:retryable|final): |failed \(exitcode",
    re.IGNORECASE,
)
FRAME = re.compile(r"(?:\[[^]]*\]:? )?\s*frame #\d+: ")
"""A line of the stack that torch's C++ prints behind an error; it names its functions, not what is wrong."""
END = re.compile(r"^\[rank \d+\] (?:retryable|final): ")
"""How a rank says its own end; what follows of ranks is detail, what follows of torchrun is echo."""
BY_SIGNAL = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: \d+")
RULE = re.compile(r"={20,}")
PREFIXED = re.compile(r"^\[[^]]*\]:? ")
"""The rank in front of a line."""


def tail(path: str) -> list[str]:
    """The lines in the last TAIL_BYTES of a text file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > TAIL_BYTES else lines


def attempt_of(lines: list[str]) -> list[str]:
    """The lines since the last attempt began."""
    starts = [index for index, line in enumerate(lines) if line.startswith(ATTEMPT)]
    return lines[starts[-1] :] if starts else lines


def tells_error(line: str) -> bool:
    """Whether a line is, or begins, the word on something that went wrong."""
    return bool(ERROR.search(line)) and not FRAME.match(line)


def first_error(lines: list[str], count: int) -> list[str]:
    """The first line of an error and what follows it, at most `count` lines.

    Of a traceback its end is kept, where the reason stands. The traceback of torchrun
    about the end of its child has no cause, so other lines are taken only up to the next one.
    """
    lines = [line for line in lines if not FRAME.match(line)]
    for index, line in enumerate(lines):
        if not tells_error(line):
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


def in_words(line: str) -> str:
    """torchrun's line on a rank that a signal has ended, as a sentence; any other line as it is."""
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


def without_echo(texts: list[str]) -> list[int]:
    """Positions of the lines without torchrun's own traceback and table, which say only that a rank ended."""
    kept, echo, rules = [], False, 0
    for index, text in enumerate(texts):
        if text == TRACEBACK and any("ChildFailedError" in later for later in texts[index : index + 40]):
            echo, rules = True, 0
        if not echo or text.startswith("[rank "):
            kept.append(index)
        rules += bool(echo and RULE.fullmatch(text.rstrip()))
        echo = echo and rules < 2
    return kept
