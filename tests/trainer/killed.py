"""Trainings that are killed between two lines: SIGKILL as the n-th line of the trainer's own code is reached.

A process that has imported torch, but computed nothing, is forked for each attempt: an import costs seconds.

    python tests/trainer/killed.py < JSON      # [data_dir, [[run_dir, {knob: value}, line, [modules]], ...]]

Prints one JSON list: per request [exit code (negative: signal), lines of those modules that were reached].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

TRAINER = Path(__file__).resolve().parents[2] / "trainer"


class Lines:
    """Counts the lines run in some of the trainer's modules, on all threads; kills at the one asked for."""

    def __init__(self, modules: list[str], kill_at: int) -> None:
        self.files = {str(TRAINER / module) for module in modules}
        self.kill_at = kill_at
        self.count = 0
        self.seen: list[str] = []

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.count += 1
            self.seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace

    def watch(self) -> None:
        if self.files:
            threading.settrace(self.trace)
            sys.settrace(self.trace)


def attempt(data_dir: str, run_dir: str, settings: dict[str, Any], lines: Lines) -> int:
    """Train in this process, as `python -m trainer train` does; returns its exit code."""
    from trainer.__main__ import main

    arguments = ["train", "--data-dir", data_dir, "--run-dir", run_dir, "--run-id", "killed"]
    for name, value in settings.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    lines.watch()
    return main(arguments)


def in_a_child(
    data_dir: str, run_dir: str, settings: dict[str, Any], kill_at: int, modules: list[str]
) -> Any:
    """[exit code, lines reached] of an attempt in a forked process."""
    reached, report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reached)
        log = os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        lines = Lines(modules, kill_at)
        code = 99
        try:
            code = attempt(data_dir, run_dir, settings, lines)
        finally:
            sys.settrace(None)
            sys.stdout.flush()
            with os.fdopen(report, "w") as pipe:
                json.dump(lines.seen, pipe)
            os._exit(code)
    os.close(report)
    with os.fdopen(reached) as pipe:
        printed = pipe.read()
    _, status = os.waitpid(child, 0)
    return [os.waitstatus_to_exitcode(status), json.loads(printed) if printed else []]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401

    import trainer.train  # noqa: F401

    data_dir, requests = json.loads(sys.stdin.read())
    print(json.dumps([in_a_child(data_dir, *request) for request in requests]))


if __name__ == "__main__":
    main()
