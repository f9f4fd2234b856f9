"""Runs one stage, which is a playbook or a command: shows its progress live, then its result."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from fleet import ROOT
from fleet.playbooks import CancelledError, Failure, Job, Stage, environment, log_of
from fleet.progress import Screen, done_line, failure_lines, stage_line, stage_plain

_TAIL_LINES = 20


def run_playbook(screen: Screen, job: Job) -> bool:
    """Run a playbook and show its progress live; returns whether the playbook succeeded.

    screen: shows the progress; messages and failures of the playbook stay on the screen. job: the playbook.
    """
    started = time.monotonic()
    shown = 0

    def tick() -> None:
        nonlocal shown
        for note in job.stage.notes[shown:]:
            screen.say(Text("\n".join(f"  {line}" for line in note.splitlines())))
        shown = len(job.stage.notes)
        screen.plain(lambda: stage_plain(job.stage), time.monotonic() - started)

    screen.show(lambda: stage_line(job.stage, time.monotonic() - started))
    try:
        good = job.follow(tick)
    finally:
        screen.clear()
    if good:
        changed = f"{job.stage.changed} changed" if job.stage.changed else "nothing to change"
        screen.say(done_line(job.name, job.seconds, changed))
    else:
        screen.say(failed(job))
    return good


def failed(job: Job) -> Text:
    """The text about a job that has failed: its failures in full and the path of its log."""
    return failure_lines(job.name, job.stage.failures, _tail(job.log), str(job.log))


def run_command(screen: Screen, name: str, doing: str, command: Sequence[str]) -> tuple[bool, float]:
    """Run a command and show its newest line of output. Returns (whether it succeeded, seconds).

    screen: shows the line. name: name of the stage and its log. doing: the text until the first line of
    output. command: the program and its arguments.
    """
    log, started = log_of(name), time.monotonic()

    def stage() -> Stage:
        return Stage(name, play=(_tail(log) or [doing])[-1])

    with open(log, "wb") as output:
        screen.show(lambda: stage_line(stage(), time.monotonic() - started))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                screen.plain(lambda: stage_plain(stage()), time.monotonic() - started)
                time.sleep(0.1)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise CancelledError from None
        finally:
            screen.clear()
    if process.returncode:
        failure = Failure("this machine", " ".join(command[1:4]), "\n".join(_tail(log)))
        screen.say(failure_lines(name, [failure], [], str(log)))
    return process.returncode == 0, time.monotonic() - started


def _tail(log: Path) -> list[str]:
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-_TAIL_LINES:]
