"""What a fault led to: the line that was waited for, its row on the page, a playbook's message."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Row:
    """A line of docs/faults.md."""

    fault: str
    seconds: float
    printed: str
    then: str
    pause: Pause | None = None  # of a run that continued


@dataclass(frozen=True)
class Pause:
    """What a fault cost a run: seconds from planting it to the next step made, steps that were done again."""

    seconds: float
    repeated: int

    @classmethod
    def of(cls, times: Mapping[int, float], planted: float, made: int, resumed: int | None) -> Pause:
        """From the time of each step in metrics.jsonl, where a resumed run replaces the steps it does again.

        `planted` is by the same clock, `made` the last step before the run paused, `resumed` the step of the
        checkpoint that it continued from; None where the same attempt continued, after its longest wait.
        """
        if resumed is not None:
            return cls(times[resumed + 1] - planted, max(0, made - resumed))
        after = sorted(at for at in times.values() if at >= planted)
        waits = [at - before for before, at in itertools.pairwise([planted, *after])]
        return cls(after[waits.index(max(waits))] - planted, 0)


@dataclass
class AwaitedLine:
    """A line that was waited for."""

    planted: float
    planted_at: float  # by the clock of the calendar, as metrics.jsonl has it
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
    text = re.sub(r"^(ok|changed): \[[^\]]*\] (?=\[ERROR\])", "", text)  # of another host
    text = re.sub(r"^\[ERROR\]: Task failed: (Action failed: )?", "", text)
    text = re.split(r" Origin: |['\"]? TASK \[", text)[0]
    return text.removeprefix("msg: ").strip("'\"|>- ")
