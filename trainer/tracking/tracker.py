"""Rank 0's side of the tracking: lines into files, and a process beside it that brings them to the server.

    tracker = Tracker(run_dir, resume_step, facts, uri, say)
    tracker.step(step, {"loss": 3.2, "tok_per_s": 1200.0})
    tracker.sample(step, "Once upon a time ...")
    tracker.close("finished")

Nothing here waits for a network, but `close` at an orderly end, for a bounded time.
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
from typing import Any

from trainer.data.files import write_whole
from trainer.tracking import files
from trainer.tracking.files import Facts, JsonLines
from trainer.tracking.mlflow_run import is_server, shown_uri
from trainer.tracking.system import SystemSampler

# At the end of a run, when its ranks are released and its outcome is written, this process waits until the
# server has everything: so long in all, and so long without a sign of progress.
CLOSING_SECONDS = 30.0
STALLED_SECONDS = 10.0
# At an end in a hurry, or when the server is known to be away.
HURRY_SECONDS = 1.0
LAST_WORDS_SECONDS = 0.2
RESTART_SECONDS = 60.0
PATIENCE = 60.0  # for one answer of the server; nobody waits for it but the process that asks

Say = Callable[[str], None]


class Tracker:
    """The figures, samples and host of a run, kept in its directory, and sent to `uri` unless it is empty."""

    def __init__(self, run_dir: Path, resume_step: int, facts: Facts, uri: str, say: Say) -> None:
        """Goes on after `resume_step`: later lines belong to steps that will be done again."""
        self._run_dir = run_dir
        facts.save(run_dir)
        self._metrics = JsonLines(run_dir / files.METRICS, resume_step or -1)
        self._system = SystemSampler(run_dir)
        self._sender: SenderProcess | None = None
        if uri and not is_server(uri):
            say(
                f"{shown_uri(uri)!r} is no address of a tracker (http://HOST:5000): metrics.jsonl has it all."
            )
        elif uri:
            try:
                self._sender = SenderProcess(run_dir, uri, say)
            except OSError as error:
                say(f"The tracker gets nothing: no process can be started ({error}). metrics.jsonl has it.")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Note the figures of a step or of an evaluation."""
        self._metrics.write(step, values, time.time())

    def sample(self, step: int, text: str) -> None:
        """Keep a text that the model wrote after `step`."""
        folder = self._run_dir / files.SAMPLES
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"step_{step:06d}.txt", (text.rstrip("\n") + "\n").encode())

    def close(self, outcome: str, hurry: bool = False) -> None:
        """End the tracking: a second at most in a hurry, else as long as the server makes progress."""
        self._system.close()
        if self._sender is not None:
            self._sender.close(outcome, hurry or outcome == "retryable")


class SenderProcess:
    """The process that talks to the server (trainer.tracking.sender), and a thread that hears it."""

    def __init__(self, run_dir: Path, uri: str, say: Say) -> None:
        self._run_dir, self._uri, self._say = run_dir, uri, say
        self._away = False
        self._progress = time.monotonic()
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._hear, name="tracker", daemon=True)
        self._thread.start()

    def close(self, outcome: str, hurry: bool) -> None:
        """Say how the run ended, and wait while what is left is sent; then the process is gone."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):  # it may have died
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"outcome": outcome}) + "\n")
            self._process.stdin.close()
        began = self._progress = time.monotonic()
        told = False
        while self._process.poll() is None:
            now = time.monotonic()
            if now - began >= HURRY_SECONDS:
                if hurry or self._away:
                    break
                if now - began >= CLOSING_SECONDS or now - self._progress >= STALLED_SECONDS:
                    break
                if not told:
                    told = True
                    self._say(
                        f"The training is over; giving the tracker at {shown_uri(self._uri)} the rest "
                        f"(for {CLOSING_SECONDS:.0f} s at most)."
                    )
            time.sleep(0.02)
        complete = self._process.poll() == 0
        self._process.kill()
        self._thread.join(LAST_WORDS_SECONDS)
        if not complete:
            self._say(
                f"The tracker at {shown_uri(self._uri)} lacks the end of this run; nothing is lost. When it "
                f"answers: python -m trainer track --run-dir {self._run_dir} "
                f"--tracker-uri {shown_uri(self._uri)}"
            )

    def _start(self) -> subprocess.Popen[str]:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "MLFLOW_TRACKING_URI": self._uri}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "trainer.tracking.sender", "--run-dir", str(self._run_dir)]
        command += ["--patience", str(PATIENCE)]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _hear(self) -> None:
        """Pass on what the process says; start it again when it dies while the run goes on."""
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._heed(json.loads(line))
            if self._closing.is_set():
                return
            self._say(
                f"The process that talks to the tracker ended ({self._process.wait()}); the next one starts "
                f"in {RESTART_SECONDS:.0f} s."
            )
            if self._closing.wait(RESTART_SECONDS):
                return
            with contextlib.suppress(OSError):  # the host is short of something: the next time, then
                self._process = self._start()

    def _heed(self, message: dict[str, Any]) -> None:
        self._progress = time.monotonic()
        self._away = message.get("away", self._away)
        if "say" in message:
            self._say(message["say"])
