"""A run to be tracked: its facts, its steps, its end, and patience with what sends them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.tracking.files import Facts
from trainer.tracking.tracker import Tracker

FACTS = Facts("run", "d1", {"depth": "2", "odd/name?": "x" * 9000}, {"host.0.cpu": "fast", "world_size": "2"})
ANSWER_SECONDS = 60.0  # importing mlflow takes seconds on a busy machine


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def steps(notes: Tracker, first: int, last: int) -> None:
    """Write down steps; that waits for no server, of which the sick ones take half a minute an answer."""
    began = time.monotonic()
    for step in range(first, last + 1):
        notes.step(step, {"loss": 3.0 - 0.01 * step, "tok_per_s": 100.0})
    assert time.monotonic() - began < 10


def end(run_dir: Path, outcome: str) -> None:
    (run_dir / "outcome.json").write_text(json.dumps({"outcome": outcome}))


Track = Callable[[str], tuple[int, str]]


@pytest.fixture
def track(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Track:
    """Type `python -m trainer track` for the run in tmp_path: its exit code and its output."""
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")  # what it sets is taken back after the test

    def type_it(uri: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(["track", "--run-dir", str(tmp_path), "--tracker-uri", uri])
        return status, "".join(capfd.readouterr())

    return type_it
