"""A real MLflow server on SQLite: a run's figures there equal its metrics.jsonl, through every interruption.

The server is installed once into .cache of this checkout, by the pins of constraints.txt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, flags, free_port

from trainer.tracking import files
from trainer.tracking.files import read_lines
from trainer.tracking.names import metric_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120


@pytest.fixture(scope="session")
def mlflow() -> Path:
    """The mlflow command of the version that is pinned."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next(line for line in pins if line.startswith("mlflow=="))
    home = ROOT / ".cache" / pin.replace("==", "-")
    if not (home / "whole").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), "mlflow"], check=True)
        (home / "whole").touch()
    return home / "bin" / "mlflow"


class Server:
    """An MLflow server that can be ended and started again on its port, with or without its database."""

    def __init__(self, mlflow: Path, folder: Path) -> None:
        self.mlflow, self.folder, self.port = mlflow, folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    def start(self) -> None:
        command = [
            str(self.mlflow),
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        } | quiet
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Start again with an empty database."""
        self.stop()
        for path in self.folder.glob("mlflow.db*"):
            path.unlink()
        self.start()


@pytest.fixture
def server(mlflow: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(mlflow, tmp_path / "server")
    server.start()
    yield server
    server.stop()


def train(
    data_dir: Path, run_dir: Path, uri: str, log: Path | None = None, **settings: Any
) -> subprocess.Popen[str]:
    given = flags(
        {**TINY, "tracker": "mlflow", "num_iterations": 400, "save_every": 50, "eval_every": 50} | settings
    )
    command = [
        sys.executable,
        "-m",
        "trainer",
        "train",
        "--data-dir",
        str(data_dir),
        "--run-dir",
        str(run_dir),
    ]
    with contextlib.ExitStack() as open_files:
        return subprocess.Popen(
            [*command, "--run-id", "real", "--tracker-uri", uri, *given],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=open_files.enter_context(open(log, "wb")) if log else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def reach(run_dir: Path, step: int) -> None:
    until(
        lambda: any(line["step"] >= step for _, line in read_lines(run_dir / files.METRICS)),
        f"step {step} is reached",
    )


def sent(run_dir: Path) -> int:
    """The last step whose loss the server has."""
    try:
        return int(json.loads((run_dir / files.CURSOR).read_text())["steps"].get("train/step_loss", 0))
    except FileNotFoundError:
        return 0


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def check_equal(uri: str, run_dir: Path, status: str = "FINISHED") -> str:
    """The server has one point for each figure of each line and no other; returns the run's id there."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("nanochat-d2")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == status
    written: dict[str, list[tuple[int, float]]] = {}
    for name in (files.METRICS, files.SYSTEM):
        for _, line in read_lines(run_dir / name):
            for key in line.keys() - {"step", "time"}:
                written.setdefault(metric_of(key), []).append((line["step"], line[key]))
    assert {"train/step_loss", "val/bpb", "phase_seconds/sync", "system/load_1_minute"} <= written.keys()
    for key, points in written.items():
        history = sorted(
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)
        )
        assert [step for step, _ in history] == [step for step, _ in points], key
        # The durations of a step that was done twice are of either time.
        if key in ("train/step_loss", "val/bpb"):
            assert [value for _, value in history] == pytest.approx([value for _, value in points]), key
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"metrics.jsonl", "system.jsonl", "facts.json", "outcome.json", "plots"} <= artifacts
    return str(run.info.run_id)


def test_killed_runs_and_killed_servers_leave_no_gap(server: Server, data_dir: Path, tmp_path: Path) -> None:
    """Rank 0 is killed once, the server goes away and comes back: the figures are whole and there once."""
    run_dir = tmp_path / "run"
    endless = {"num_iterations": 1_000_000}
    first = train(data_dir, run_dir, server.uri, **endless)
    until(lambda: sent(run_dir) >= 75, "the first steps arrive")
    first.kill()
    first.communicate()
    newest = max(line["step"] for _, line in read_lines(run_dir / files.METRICS))

    log = tmp_path / "second.log"
    second = train(data_dir, run_dir, server.uri, log, **endless)
    until(lambda: sent(run_dir) > newest, "steps that the first attempt had not done arrive")
    server.stop()
    until(lambda: "training continues without it" in log.read_text(), "its absence is noticed")
    reach(run_dir, sent(run_dir) + 50)
    missed = max(line["step"] for _, line in read_lines(run_dir / files.METRICS))
    server.start()
    until(lambda: sent(run_dir) >= missed, "the missed steps arrive in the same run")
    (run_dir / "stop").touch()
    assert second.wait(300) == 0, log.read_text()
    assert "Resuming from the checkpoint of step" in log.read_text()
    assert track(run_dir, server.uri) == 0, "on a busy host the end may be left to it"
    check_equal(server.uri, run_dir, status="KILLED")


def test_after_the_run_it_is_sent_and_sent_again(server: Server, data_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    server.stop()
    run = train(data_dir, run_dir, server.uri)
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert "training continues without it" in printed
    server.start()
    assert track(run_dir, server.uri) == 0
    begun = check_equal(server.uri, run_dir)
    assert track(run_dir, server.uri) == 0
    (
        run_dir / files.CURSOR
    ).unlink()  # nobody knows any more what was sent: the database tells the same point
    assert track(run_dir, server.uri) == 0
    assert check_equal(server.uri, run_dir) == begun

    server.forget()
    assert track(run_dir, server.uri) == 0
    check_equal(server.uri, run_dir)
    (run_dir / "outcome.json").write_text(json.dumps({"outcome": "stopped"}))
    assert track(run_dir, server.uri) == 0
    deleted = check_equal(server.uri, run_dir, status="KILLED")
    from mlflow import MlflowClient

    MlflowClient(server.uri).delete_run(deleted)
    assert track(run_dir, server.uri) == 0
    assert check_equal(server.uri, run_dir, status="KILLED") != deleted


def track(run_dir: Path, uri: str) -> int:
    command = [sys.executable, "-m", "trainer", "track", "--run-dir", str(run_dir), "--tracker-uri", uri]
    return subprocess.run(command, check=False).returncode
