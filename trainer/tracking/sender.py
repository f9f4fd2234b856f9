"""Sends the figures and files of a run to its MLflow server, in a process beside rank 0 or after the run.

python -m trainer track --run-dir runs/mine --tracker-uri http://coordinator:5000

Rank 0 starts `python -m trainer.tracking.sender --run-dir DIR --messages FD` with the address in
MLFLOW_TRACKING_URI. When the run ends, the sender reads the outcome, such as finished, from standard
input; an end of file without it means that rank 0 has died. The sender writes JSON lines to the pipe FD:

{"log": text}             a line for the log
{"unavailable": true}     the server does not answer; false: it answers again
{"sent": n}               n figures were sent; 0: a file was sent, figures were refused, or plots are drawn
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from trainer.config import ConfigError
from trainer.data.files import try_lock
from trainer.formatting import counted
from trainer.options import number_from_zero
from trainer.tracking import files
from trainer.tracking.files import Cursor, Facts, NewLines
from trainer.tracking.mlflow_run import (
    BATCH_METRICS,
    STATUS,
    FiguresRejectedError,
    MlflowRun,
    Point,
    RunLostError,
    describe_failure,
    is_server,
    reason,
    shown_uri,
)

POLL_SECONDS = 2.0
RETRY_SECONDS = (2.0, 5.0, 15.0, 30.0)  # after the first, second, third, and every later failure
LINES_AT_ONCE = 200
ORPHAN_SECONDS = 2.0  # to send the last lines after rank 0 has died
CLOSING_SECONDS = 60.0  # rank 0 ends this process sooner
REMIND_SECONDS = 1800.0  # between two reports of a lag
LOCK = ".tracker.lock"
SYSTEM = "system/"  # begins the metrics of a host

Report = Callable[[dict[str, Any]], None]  # handles a message, as above


class Sender:
    """Sends the figures and files of a run directory that the server lacks.

    run_dir: directory of the run. facts, cursor: contents of its facts.json and tracker.json. Methods raise
    exceptions if the server fails. A later call then sends the missing figures and files.
    """

    def __init__(self, run_dir: Path, uri: str, patience: float, report: Report) -> None:
        """Read facts.json and tracker.json in `run_dir`.

        uri: address of the server. patience: time-out of a request in seconds, and the shortest lag that is
        reported (see `report_lag`). report: called with each message, a dict as at the top of this file.
        Raises OSError or ValueError if facts.json cannot be read.
        """
        self.run_dir, self.uri, self.report = run_dir, uri, report
        self.facts = Facts.load(run_dir)
        self.cursor = Cursor.load(run_dir, shown_uri(uri), self.facts)
        self._patience = patience
        self._lag_since = time.time()
        self._lag_reported: float | None = None
        self._set_back()

    def _set_back(self) -> None:
        """Start with the first line of each file; the cursor skips what the server has."""
        self._run: MlflowRun | None = None
        self._metrics = NewLines(self.run_dir / files.METRICS)
        self._system = NewLines(self.run_dir / files.SYSTEM)

    def open(self, running: bool) -> MlflowRun:
        """The run on the server. Without a known id, it is searched for there, and created if missing.

        running: whether to set its status to RUNNING. Raises RunLostError if the id is known and the server
        no longer has the run.
        """
        if self._run is None:
            run = MlflowRun(self.uri, self.facts, self.cursor.mlflow_run, self._patience)
            run.open(running)
            if not self.cursor.mlflow_run and _was_elected(self.run_dir):
                # Another host has sent the figures so far, with its own times.
                self.cursor.steps = run.last_steps(left_out=SYSTEM)
            self.cursor.mlflow_run = run.id
            if running:
                self.cursor.status = ""
            self.cursor.save(self.run_dir)
            self._run = run
            self.report({"log": f"Tracked at {run.page}"})
        return self._run

    def send(self) -> None:
        """Send all new figures and samples of a run that is training."""
        self._recreate_if_lost(lambda: self._send(running=True))
        if self._lag_reported is not None:
            self._lag_reported = None
            self.report({"log": f"The tracker at {shown_uri(self.uri)} has caught up with {files.METRICS}."})

    def finish(self, outcome: str | None) -> None:
        """Send the rest at the end of a run: figures, samples, final status, plots and the other files.

        outcome: finished, stopped, retryable or final; None if there is no outcome. Without an outcome, no
        final status is sent. If it is retryable, plots and the other files are left for the next attempt.
        """
        self._recreate_if_lost(lambda: self._finish(outcome))

    def _recreate_if_lost(self, work: Callable[[], None]) -> None:
        """Call `work`. If the server has lost the run, call it again to create the run and send all."""
        try:
            work()
        except RunLostError:
            self.report({"log": "The tracker has lost this run. It is created again, with all steps."})
            self.cursor = Cursor(self.cursor.uri, self.facts.run_id, self.facts.digest)
            self._set_back()
            work()

    def report_lag(self) -> None:
        """Report a lag if the server has lacked figures for `patience` seconds (see `__init__`) or longer.

        The report is repeated every REMIND_SECONDS.
        """
        lines = [line for line, _ in itertools.islice(self._metrics, 1)]
        if not lines:
            return
        since, now = max(self._lag_since, lines[0]["time"]), time.time()
        if now >= (
            since + self._patience if self._lag_reported is None else self._lag_reported + REMIND_SECONDS
        ):
            self._lag_reported = now
            lag = sum(len(self.cursor.new_points(line)) for line, _ in self._metrics)
            clock = time.strftime("%a %H:%M:%S", time.localtime(since))
            text = (
                f"{shown_uri(self.uri)} is {lag:,} figures behind, since {clock}. They are in {files.METRICS}"
            )
            self.report({"log": f"warning: The tracker at {text} and are sent when it answers."})

    def _send(self, running: bool) -> None:
        run = self.open(running)
        for new_lines in (self._metrics, self._system):
            while batch := list(itertools.islice(new_lines, LINES_AT_ONCE)):
                self._send_lines(run, [line for line, _ in batch])
                new_lines.offset = batch[-1][1]
                if running:
                    self.report_lag()
        for folder in (files.SAMPLES, files.CORE):
            self._put_files(run, (self.run_dir / folder).glob("*"))

    def _finish(self, outcome: str | None) -> None:
        self._send(running=False)
        run = self.open(running=False)
        if outcome is not None and self.cursor.status != STATUS[outcome]:
            run.end(STATUS[outcome])
            self.cursor.status = STATUS[outcome]
            self.cursor.save(self.run_dir)
        if outcome == "retryable":  # the next attempt sends the files
            return
        try:
            from trainer.tracking.plots import make_plots

            make_plots(self.run_dir)
        except Exception as error:  # a run without plots is still a run
            self.report({"log": f"The plots could not be drawn: {reason(error)}"})
        self.report({"sent": 0})
        self._put_files(run, (self.run_dir / name for name in files.KEPT_AT_THE_END))
        self._put_files(run, (self.run_dir / files.PLOTS).glob("*.png"))

    def _send_lines(self, run: MlflowRun, lines: list[dict[str, Any]]) -> None:
        points: list[Point] = [
            (name, value, line["time"], line["step"])
            for line in lines
            for name, value in self.cursor.new_points(line).items()
        ]
        for start in range(0, len(points), BATCH_METRICS):
            batch, sent = points[start : start + BATCH_METRICS], 0
            try:
                run.log(batch)
                sent = len(batch)
            except FiguresRejectedError as error:
                text = f"The tracker refuses figures of step {batch[0][3]}: {error}."
                self.report({"log": f"{text} They are in {files.METRICS} only."})
            self.cursor.steps.update({name: step for name, _, _, step in batch})
            self.cursor.save(self.run_dir)
            self.report({"sent": sent})

    def _put_files(self, run: MlflowRun, paths: Iterable[Path]) -> None:
        for path in sorted(paths):
            name = path.relative_to(self.run_dir).as_posix()
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            version = f"{stat.st_size} {stat.st_mtime_ns}"
            if self.cursor.artifacts.get(name) == version or path.name.startswith("."):
                continue
            try:
                run.put(path, name.rpartition("/")[0])
            except FiguresRejectedError as error:
                self.report({"log": f"The tracker refuses {name}: {error}"})
            self.cursor.artifacts[name] = version
            self.cursor.save(self.run_dir)
            self.report({"sent": 0})


# -- beside rank 0 -----------------------------------------------------------------------------------------


def follow(run_dir: Path, uri: str, patience: float, messages: IO[str]) -> int:
    """Send new figures until rank 0 reports the outcome or dies, then the rest.

    Returns 0 if the server has everything, else 1. run_dir, uri, patience: as for Sender. messages: the pipe
    to rank 0, for the JSON lines that the top of this file lists.
    """

    def report(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # rank 0 has died, which also closes standard input
            print(json.dumps(message), file=messages, flush=True)

    with contextlib.suppress(OSError):
        os.nice(10)
    # Rank 0 receives the same signals and still sends an outcome. Its blocked SIGTERM is inherited.
    signal.signal(signal.SIGTERM, lambda *_: exit_after(ORPHAN_SECONDS))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank_0 = OutcomeReader()
    while not (lock := try_lock(run_dir / LOCK, 0)):  # the sender of an earlier attempt is about to exit
        rank_0.wait(POLL_SECONDS)
        if rank_0.ended:
            return 1
    with lock:
        sender = Sender(run_dir, uri, patience, report)
        failures = 0
        prepared = False
        while True:
            try:
                if rank_0.ended:
                    sender.finish(rank_0.outcome)
                    return 0
                sender.send()
                if failures:
                    report({"unavailable": False, "log": f"The tracker at {shown_uri(uri)} is back."})
                failures = 0
                if not prepared:
                    prepared = True
                    _prepare_plots()
            except Exception as error:  # any failure of the server is retried
                if rank_0.ended:
                    report({"unavailable": True})
                    return 1
                if not failures:
                    problem = f"The tracker at {shown_uri(uri)} {describe_failure(error)}"
                    report({"unavailable": True, "log": f"{problem}; training continues without it."})
                failures += 1
                sender.report_lag()
            rank_0.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1] if failures else POLL_SECONDS)


def _was_elected(run_dir: Path) -> bool:
    """Whether the hosts of an elastic run have elected another coordinator than the first."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        return int(json.loads((run_dir / "term.json").read_text(encoding="utf-8"))["term"]) > 0
    return False


def _prepare_plots() -> None:
    """Import matplotlib during the run, so that the end of the run does not wait for the import."""
    with contextlib.suppress(Exception):  # reported when the plots are drawn
        from trainer.tracking.plots import prepare

        prepare()


class OutcomeReader:
    """Reads the outcome of the run from standard input.

    ended: whether rank 0 has sent the outcome or has died. outcome: finished, stopped, retryable or final;
    None if rank 0 has died or has not sent it yet.
    """

    def __init__(self) -> None:
        self.ended = False
        self.outcome: str | None = None

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the outcome and read it.

        Once rank 0 has sent the outcome or has died, this process exits within CLOSING_SECONDS.
        """
        if not self.ended and select.select([sys.stdin.fileno()], [], [], seconds)[0]:
            self.ended = True
            self.outcome = sys.stdin.readline().strip() or None
            exit_after(CLOSING_SECONDS if self.outcome else ORPHAN_SECONDS)


def exit_after(seconds: float) -> None:
    """End this process with exit code 1 after `seconds`, even if it waits for the server. Returns at once."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()


# -- after the run -----------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `track` to `parser`."""
    parser.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="directory with the files of the run"
    )
    parser.add_argument(
        "--tracker-uri", default="", metavar="URI", help="address of MLflow (default: MLFLOW_TRACKING_URI)"
    )
    parser.add_argument(
        "--patience",
        type=number_from_zero,
        default=60.0,
        metavar="SECONDS",
        help="time-out of a request (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `track`: send the figures and files of an ended run that the server lacks. Safe to repeat.

    Returns 0 if the server then has everything, 1 if the server fails. Raises ConfigError if the address or
    the run directory cannot be used, or if another process sends this run already.
    """
    uri = args.tracker_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise ConfigError("No tracker address was given: add --tracker-uri http://HOST:5000.")
    if not is_server(uri):
        raise ConfigError(
            f"{shown_uri(uri)!r} is not the address of a tracker. Give an address of this form: "
            "--tracker-uri http://HOST:5000"
        )
    sent = 0

    def report(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message.get("sent", 0)
        if "log" in message:
            print(message["log"], flush=True)

    try:
        lock = try_lock(args.run_dir / LOCK, 0)
    except OSError as error:
        raise ConfigError(
            f"The run directory {args.run_dir} cannot be used: {error.strerror}. Check that --run-dir exists "
            "and that you may write to it."
        ) from None
    if lock is None:
        raise ConfigError(
            f"Another process sends the run in {args.run_dir} already: rank 0 or another `track`. Wait until "
            "it has ended, then type this again."
        )
    with lock:
        try:
            sender = Sender(args.run_dir, uri, args.patience, report)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{args.run_dir / files.FACTS} cannot be read ({reason(error)}): --run-dir takes "
                "the directory of a run that has begun, on the host of its rank 0."
            ) from None
        outcome = _outcome(args.run_dir)
        try:
            sender.finish(outcome)
        except Exception as error:  # any failure of the server
            print(
                f"The tracker at {shown_uri(uri)} {describe_failure(error)}; it received "
                f"{counted(sent, 'figure')}. Nothing is lost: repeat the "
                "command when the tracker answers, or with another --tracker-uri.",
                file=sys.stderr,
            )
            return 1
    has = "The tracker has everything" if outcome else "The run has no outcome yet; the tracker has it so far"
    print(f"{has}: {sent:,} figures were missing.")
    return 0


def _outcome(run_dir: Path) -> str | None:
    """The outcome in outcome.json; None if the file is missing or cannot be read."""
    try:
        outcome = json.loads((run_dir / "outcome.json").read_text(encoding="utf-8"))["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return outcome if outcome in STATUS else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--messages", type=int, required=True, metavar="FD", help="pipe for messages")
    given = parser.parse_args()
    with open(given.messages, "w", encoding="utf-8") as pipe:
        os._exit(follow(given.run_dir, os.environ["MLFLOW_TRACKING_URI"], given.patience, pipe))
