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
PATIENCE = 60.0  # time-out of a request; only the sender waits for it

Log = Callable[[str], None]


class Tracker:
    """Writes figures, samples and system metrics to the run directory, and runs the sender."""

    def __init__(
        self, run_dir: Path, resume_step: int, facts: Facts, uri: str, log: Log, is_main: bool = True
    ) -> None:
        """Write facts.json; drop the lines of metrics.jsonl after `resume_step`, whose steps are repeated.

        run_dir: directory of the run. facts: content of facts.json. uri: address of the MLflow server; "": no
        sender. log: called with each message. is_main: whether this rank is rank 0, which also samples the
        system metrics.
        """
        self._run_dir = run_dir
        facts.save(run_dir)
        self._path = run_dir / files.METRICS
        self._metrics = JsonLines(self._path, resume_step or -1)
        self._system = SystemSampler(run_dir) if is_main else None
        self._sender: SenderProcess | None = None
        if uri and not is_server(uri):
            log(
                f"warning: {shown_uri(uri)!r} is no address of a tracker, such as http://HOST:5000. The "
                "figures are in metrics.jsonl only. To send them later: python -m trainer track --run-dir "
                f"{run_dir} --tracker-uri http://HOST:5000"
            )
        elif uri:
            self._sender = SenderProcess(run_dir, uri, log)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl. step: number of completed steps. values: such as {"loss": 3.2}."""
        self._metrics.write(step, values, time.time())

    @property
    def last_step(self) -> int:
        """The step of the last line in metrics.jsonl; -1 if there is no line."""
        return self._metrics.last_step

    def lines_from(self, step: int) -> bytes:
        """The lines of metrics.jsonl from the step `step` on."""
        return b"".join(raw for raw, line in files.read_lines(self._path) if line["step"] >= step)

    def drop_after(self, step: int) -> None:
        """Drop the lines of metrics.jsonl of later steps than `step`: these steps are trained again."""
        self._metrics.drop_after(step)

    def take_lines(self, lines: bytes) -> None:
        """Add to metrics.jsonl the lines that it lacks, from the file of another host.

        lines: whole lines of that file, beginning with `last_step` of this file or an earlier step. The lines
        of `last_step` are replaced, because some of them may be missing. Lines of earlier steps are ignored.
        """
        last = self.last_step
        self.drop_after(last - 1)
        for raw in lines.splitlines(keepends=True):
            line = files.parse(raw)
            if line is not None and last <= line["step"]:
                self._metrics.append(raw, int(line["step"]))

    def sample(self, step: int, text: str) -> None:
        """Write a text that was generated after `step` to samples/step_NNNNNN.txt."""
        self._write(files.SAMPLES, f"step_{step:06d}.txt", text.rstrip("\n") + "\n")

    def core(self, step: int, table: str) -> None:
        """Write the result of CORE after `step` to core/step_NNNNNN.csv. table: its tasks as CSV."""
        self._write(files.CORE, f"step_{step:06d}.csv", table)

    def _write(self, folder: str, name: str, text: str) -> None:
        (self._run_dir / folder).mkdir(exist_ok=True)
        write_whole(self._run_dir / folder / name, text.encode())

    def close(self, outcome: str, hurry: bool = False) -> None:
        """End the tracking. Waits while the sender makes progress, at most 30 s.

        outcome: finished, stopped, retryable or final. If `hurry` is true, the outcome is retryable or the
        server does not answer, waits at most 1 s.
        """
        if self._system is not None:
            self._system.close()
        if self._sender is not None:
            self._sender.close(outcome, hurry or outcome == "retryable")


class SenderProcess:
    """Runs the sender process (trainer.tracking.sender) from a thread, and restarts it if it crashes.

    run_dir: directory of the run. uri: address of the server. log: called with each message. Messages of the
    sender arrive through a separate pipe. The sender's other output is written to standard error.
    """

    def __init__(self, run_dir: Path, uri: str, log: Log) -> None:
        self._run_dir, self._uri, self._log = run_dir, uri, log
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

        Waits at most 1 s if `hurry` is true or the server does not answer. A second call does nothing.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            process = self._process
        complete = process is not None and self._finish(process, outcome, hurry)
        self._thread.join(LAST_MESSAGES_SECONDS)
        if not complete:
            uri = shown_uri(self._uri)
            self._log(
                f"The tracker at {uri} lacks the end of this run; nothing is lost. When it answers, type: "
                f"python -m trainer track --run-dir {self._run_dir} --tracker-uri {uri}"
            )

    def _finish(self, process: subprocess.Popen[str], outcome: str, hurry: bool) -> bool:
        """Send the outcome, wait for the process, then kill it; returns whether it has sent everything."""
        with contextlib.suppress(OSError, ValueError):  # it may have died
            assert process.stdin is not None
            process.stdin.write(outcome + "\n")
            process.stdin.close()
        began = self._progress = time.monotonic()
        announced = False
        while process.poll() is None:
            now = time.monotonic()
            limit = HURRY_SECONDS if hurry or self._unavailable else CLOSING_SECONDS
            if now - began >= limit or now - self._progress >= STALLED_SECONDS:
                break
            if now - began >= HURRY_SECONDS and not announced:
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
            message = dict(json.loads(line))
        except (ValueError, TypeError):
            message = {}
        self._unavailable = message.get("unavailable", self._unavailable)
        if "sent" in message:
            self._crashes = 0
        if "log" in message:
            self._log(message["log"])
        if not message.keys() & {"unavailable", "sent", "log"}:
            self._log(
                f"warning: the process that sends to the tracker printed: {line.strip()[:200]}. No figure is "
                "lost: all are in metrics.jsonl."
            )
