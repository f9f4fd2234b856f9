"""What a fault led to: the line that was waited for, its row on the page, a playbook's message."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass
class Row:
    """A line of docs/faults.md."""

    fault: str
    seconds: float
    said: str
    then: str


@dataclass
class Said:
    """A line that was waited for."""

    planted: float
    line: str = ""
    log: str = ""
    seconds: float = 0.0


def message(output: str, words: str) -> str:
    """The message of a playbook's output that has the words, as one line, without Ansible's own around it."""
    for block in re.split(r"\n\s*\n|(?=msg: )", output):
        text = " ".join(block.split())
        if words in text:
            return plain(text)
    raise AssertionError(f"{words!r} is not in:\n{output}")


def plain(text: str) -> str:
    """A message without the task's name, where it stands, and quotes."""
    text = re.sub(r"^TASK \[[^\]]*\] \**\s*", "", text)
    text = re.sub(r"^\[ERROR\]: Task failed: (Action failed: )?", "", text)
    text = re.split(r" Origin: |['\"]? TASK \[", text)[0]
    return text.removeprefix("msg: ").strip("'\"|>- ")
