"""The tracker on rank 0: writes figures to files; a separate process sends them to the server.

    tracker = Tracker(run_dir, resume_step, facts, uri, log)
    tracker.step(step, {"loss": 3.2, "tok_per_s": 1200.0})
    tracker.sample(step, "Once upon a time ...")
    tracker.close("finished")

Only `close` waits for the network, at the end of a run and for a bounded time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.data.files import write_whole
from trainer.tracking import files
from trainer.tracking.files import Facts, JsonLines
from trainer.tracking.mlflow_run import is_server, shown_uri
from trainer.tracking.system import SystemSampler

# At the end of a run, after its outcome is written, rank 0 waits until the server has everything: at most
# this long, and this long without progress.
CLOSING_SECONDS = 30.0
STALLED_SECONDS = 10.0
# If the attempt must end fast, or the server does not answer.
HURRY_SECONDS = 1.0
LAST_MESSAGES_SECONDS = 0.2
RESTART_SECONDS = (1.0, 5.0, 15.0, 60.0)  # before the sender restarts: by the number of crashes in a row
LAG_SECONDS = 60.0  # a larger lag of the tracker is reported
REMIND_SECONDS = 1800.0
PATIENCE = 60.0  # time-out of a request; only the sender waits for it

Log = Callable[[str], None]


class Tracker:
    """Writes figures, samples and system metrics to the run directory; with a `uri`, runs the sender."""

    def __init__(self, run_dir: Path, resume_step: int, facts: Facts, uri: str, log: Log) -> None:
        """Write facts.json; drop the lines of metrics.jsonl after `resume_step`: their steps are repeated."""
        self._run_dir = run_dir
        facts.save(run_dir)
        self._metrics = JsonLines(run_dir / files.METRICS, resume_step or -1)
        self._system = SystemSampler(run_dir)
        self._sender: SenderProcess | None = None
        self._lag: Lag | None = None
        if uri and not is_server(uri):
            log(
                f"warning: {shown_uri(uri)!r} is no address of a tracker, such as http://HOST:5000. The "
                "figures are in metrics.jsonl only. To send them later: python -m trainer track --run-dir "
                f"{run_dir} --tracker-uri http://HOST:5000"
            )
        elif uri:
            self._lag = Lag(uri, self._metrics.figures, log)
            self._sender = SenderProcess(run_dir, uri, self._lag, log)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Append the figures of a step or of an evaluation to metrics.jsonl."""
        before = self._metrics.figures
        self._metrics.write(step, values, time.time())
        if self._lag is not None:
            self._lag.wrote(self._metrics.figures - before)

    def sample(self, step: int, text: str) -> None:
        """Write a text that was generated after `step` to samples/step_NNNNNN.txt."""
        folder = self._run_dir / files.SAMPLES
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"step_{step:06d}.txt", (text.rstrip("\n") + "\n").encode())

    def close(self, outcome: str, hurry: bool = False) -> None:
        """End the tracking. Waits while the sender makes progress, at most 30 s, with `hurry` at most 1 s."""
        self._system.close()
        if self._sender is not None:
            self._sender.close(outcome, hurry or outcome == "retryable")


class Lag:
    """Counts the figures of metrics.jsonl that the tracker does not have yet, and logs a long lag."""

    def __init__(self, uri: str, written: int, log: Log) -> None:
        self._tracker, self._log = f"The tracker at {shown_uri(uri)}", log
        self._lock = threading.Lock()
        self._written, self._sent = written, 0
        self._since = time.time()  # not later than the time of the oldest figure that is not sent
        self._reported: float | None = None

    def wrote(self, figures: int) -> None:
        """Count `figures` written figures. Log a lag above LAG_SECONDS, and again every REMIND_SECONDS."""
        now = time.time()
        with self._lock:
            if self._sent >= self._written:
                self._since = now
            self._written += figures
            behind, since = self._written - self._sent, self._since
            due = since + LAG_SECONDS if self._reported is None else self._reported + REMIND_SECONDS
            if now < due:
                return
            self._reported = now
        self._log(
            f"warning: {self._tracker} is {behind:,} figures behind, since {_clock(since)}. They are in "
            f"{files.METRICS} and are sent when it answers."
        )

    def sent(self, figures: int, written_at: float) -> None:
        """Set the number of figures that the tracker has, and the Unix time at which the last was written."""
        with self._lock:
            self._sent, self._since = figures, max(self._since, written_at)
            near = figures >= self._written or time.time() - self._since < LAG_SECONDS
            caught_up = near and self._reported is not None
            if caught_up:
                self._reported = None
        if caught_up:
            self._log(f"{self._tracker} has caught up with {files.METRICS}.")


class SenderProcess:
    """Runs the sender process (trainer.tracking.sender) from a thread, and restarts it if it crashes.

    Messages of the sender arrive through a separate pipe. Its other output goes to standard error.
    """

    def __init__(self, run_dir: Path, uri: str, lag: Lag, log: Log) -> None:
        self._run_dir, self._uri, self._lag, self._log = run_dir, uri, lag, log
        self._unavailable = False  # whether the server does not answer
        self._crashes = 0  # in a row, without a figure sent between them
        self._progress = time.monotonic()
        self._lock = threading.Lock()  # held to start the process, which must not happen while closing
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._supervise, name="tracker", daemon=True)
        self._thread.start()

    def close(self, outcome: str, hurry: bool) -> None:
        """Send the outcome to the process, wait while it sends the rest, then kill it.

        It may be called again; a second call does nothing.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            process = self._process
        complete = process is not None and self._finish(process, outcome, hurry)
        self._thread.join(LAST_MESSAGES_SECONDS)
        if not complete:
            self._log(
                f"The tracker at {shown_uri(self._uri)} lacks the end of this run; nothing is lost. When it "
                f"answers: python -m trainer track --run-dir {self._run_dir} "
                f"--tracker-uri {shown_uri(self._uri)}"
            )

    def _finish(self, process: subprocess.Popen[str], outcome: str, hurry: bool) -> bool:
        """Send the outcome, wait for the process, then kill it; returns whether it has sent everything."""
        with contextlib.suppress(OSError, ValueError):  # it may have died
            assert process.stdin is not None
            process.stdin.write(json.dumps({"outcome": outcome}) + "\n")
            process.stdin.close()
        began = self._progress = time.monotonic()
        announced = False
        while process.poll() is None:
            now = time.monotonic()
            if now - began >= HURRY_SECONDS:
                if hurry or self._unavailable:
                    break
                if now - began >= CLOSING_SECONDS or now - self._progress >= STALLED_SECONDS:
                    break
                if not announced:
                    announced = True
                    self._log(
                        f"The training is over; sending the rest to the tracker at {shown_uri(self._uri)} "
                        f"(for {CLOSING_SECONDS:.0f} s at most)."
                    )
            time.sleep(0.02)
        complete = process.poll() == 0
        process.kill()
        return complete

    def _supervise(self) -> None:
        """Start the process, log its messages, and restart it if it ends during the run."""
        while not self._closing.is_set():
            try:
                ended = self._run_once()
            except OSError as error:
                ended = f"could not be started ({error.strerror})"
            if self._closing.is_set():
                return
            wait = RESTART_SECONDS[min(self._crashes, len(RESTART_SECONDS) - 1)]
            self._crashes += 1
            self._log(f"warning: the process that sends to the tracker {ended}; it restarts in {wait:g} s.")
            self._closing.wait(wait)

    def _run_once(self) -> str:
        """Run the process to its end and handle its messages. Returns how it ended, for a log line.

        Raises OSError if it cannot be started.
        """
        reader, writer = os.pipe()
        with open(reader, encoding="utf-8", errors="replace") as messages:
            try:
                with self._lock:
                    if self._closing.is_set():
                        return "was not needed"
                    self._process = process = self._start(writer)
            finally:
                os.close(writer)
            for line in messages:
                self._handle(line)
        code = process.wait()
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _start(self, messages: int) -> subprocess.Popen[str]:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "MLFLOW_TRACKING_URI": self._uri}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "trainer.tracking.sender", "--run-dir", str(self._run_dir)]
        command += ["--patience", str(PATIENCE), "--messages", str(messages)]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=2, text=True, pass_fds=[messages]
        )

    def _handle(self, line: str) -> None:
        """Handle a message of the sender; log anything else."""
        self._progress = time.monotonic()
        try:
            message = json.loads(line)
            self._unavailable = message.get("unavailable", self._unavailable)
            if "log" in message:
                self._log(message["log"])
            if "figures" in message:
                self._crashes = 0
                self._lag.sent(*message["figures"])
        except (ValueError, TypeError, AttributeError):
            self._log(f"The process that sends to the tracker wrote no valid message: {line.strip()[:200]}")


def _clock(at: float) -> str:
    return time.strftime("%a %H:%M:%S", time.localtime(at))
