"""What a run leaves for people: metrics.jsonl beside it, always, and an MLflow run when there is a server.

MLflow is spoken to by a thread of its own through a bounded queue: training never waits for it, and a server
that is away costs one line in the log. What it missed is sent when it is back within the run.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EXPERIMENT = "nanofleet"
RUN_ID_TAG = "nanofleet.run_id"
QUEUE_SIZE = 10_000
BATCH_METRICS = 1_000  # the most MLflow takes in one call
BATCH_PARAMS = 100
SEND_EVERY_SECONDS = 2.0
RETRY_SECONDS = 15.0
REQUEST_SECONDS = 5
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "retryable": "FAILED", "final": "FAILED"}


class MetricsFile:
    """metrics.jsonl: one JSON object a line, added as it happens."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Goes on after `resume_step`: later lines belong to steps that will be done again."""
        self.path = path
        lines = []
        if resume_step and path.exists():
            lines = [
                line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= resume_step
            ]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the run

    def write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(dict(values)) + "\n")


def _step(line: str) -> float:
    """The step of a line; a line that was cut short counts as never reached."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class MlflowTracker:
    """An MLflow run named run_id. Every call returns at once."""

    def __init__(
        self,
        uri: str,
        run_id: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._uri, self._name, self._say = uri, run_id, say
        self._params = {key: str(value)[:500] for key, value in params.items()}
        self._tags = {RUN_ID_TAG: run_id, **tags}
        self._queue: queue.Queue[tuple[str, float, int, int]] = queue.Queue(QUEUE_SIZE)
        self._closing = threading.Event()
        self._status = ""
        self._artifacts: list[Path] = []
        self._client: Any = None
        self._mlflow_run = ""
        self._away = False
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values of a step; when the queue is full they are left to metrics.jsonl."""
        now = int(time.time() * 1000)
        for name, value in values.items():
            try:
                self._queue.put_nowait((name, float(value), now, step))
            except queue.Full:
                return

    def close(self, outcome: str, artifacts: list[Path], seconds: float) -> None:
        """End the MLflow run, waiting at most `seconds` for what is still to be sent."""
        self._status, self._artifacts = STATUS[outcome], artifacts
        self._closing.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"The tracker at {self._uri} does not have everything; metrics.jsonl does.")

    def _work(self) -> None:
        pending: list[tuple[str, float, int, int]] = []
        while True:
            closing = self._closing.wait(RETRY_SECONDS if self._away else SEND_EVERY_SECONDS)
            while len(pending) < QUEUE_SIZE and not self._queue.empty():
                pending.append(self._queue.get_nowait())
            try:
                self._send(pending)
                if closing:
                    self._finish()
                if self._away:
                    self._away = False
                    self._say(f"The tracker at {self._uri} is back.")
            except Exception as error:  # whatever ails the tracker, the training goes on
                if not self._away:
                    self._away = True
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                    self._say(
                        f"The tracker at {self._uri} does not answer ({reason}); training goes on without it."
                    )
            if closing:
                return

    def _connect(self) -> None:
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_SECONDS)
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        from mlflow import MlflowClient
        from mlflow.entities import Param, ViewType

        client = MlflowClient(self._uri)
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT)
        runs = client.search_runs(
            [experiment],
            f"tags.`{RUN_ID_TAG}` = '{self._name}'",
            run_view_type=ViewType.ACTIVE_ONLY,
            max_results=1,
        )
        if runs:
            self._mlflow_run = runs[0].info.run_id
            client.update_run(self._mlflow_run, status="RUNNING")
        else:
            self._mlflow_run = client.create_run(experiment, tags=self._tags, run_name=self._name).info.run_id
        params = [Param(key, value) for key, value in self._params.items()]
        for start in range(0, len(params), BATCH_PARAMS):
            client.log_batch(self._mlflow_run, params=params[start : start + BATCH_PARAMS], synchronous=True)
        self._client = client

    def _send(self, pending: list[tuple[str, float, int, int]]) -> None:
        """Send what is pending and take it off the list as it arrives."""
        if self._client is None:
            self._connect()
        from mlflow.entities import Metric

        while pending:
            batch = [Metric(*values) for values in pending[:BATCH_METRICS]]
            self._client.log_batch(self._mlflow_run, metrics=batch, synchronous=True)
            del pending[:BATCH_METRICS]

    def _finish(self) -> None:
        for path in self._artifacts:
            if path.exists():
                self._client.log_artifact(self._mlflow_run, str(path))
        self._client.set_terminated(self._mlflow_run, status=self._status)


class Tracker:
    """Rank 0's metrics: the file, and MLflow where it is asked for."""

    def __init__(self, run_dir: Path, resume_step: int, mlflow: MlflowTracker | None) -> None:
        self._file = MetricsFile(run_dir / "metrics.jsonl", resume_step)
        self._mlflow = mlflow
        self._artifacts = [run_dir / "metrics.jsonl", run_dir / "sample.txt", run_dir / "run.json"]

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Note the figures of a step or of an evaluation."""
        self._file.write({"step": step, **values, "time": time.time()})
        if self._mlflow is not None:
            self._mlflow.metrics(step, values)

    def close(self, outcome: str, hurry: bool = False) -> None:
        """End the tracking; waits longer for a run that is done than for one in a hurry."""
        if self._mlflow is not None:
            done = outcome in ("finished", "stopped") and not hurry
            self._mlflow.close(outcome, self._artifacts if done else [], 15.0 if done else 3.0)
