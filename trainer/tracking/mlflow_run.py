"""A run on an MLflow server: finds or creates it, logs params, tags, figures and files.

Each point has the time of its line in metrics.jsonl. MLflow stores equal points once, so sending a point a
second time is safe.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.tracking.files import Facts
from trainer.tracking.names import clean_key

PAGE_VARIABLE = "NANOFLEET_TRACKER_PAGE"  # the server's address for browsers, if ranks use another one
RUN_ID_TAG, DIGEST_TAG = "nanofleet.run_id", "nanofleet.digest"
CHANGED_TAG = "now."  # prefix of the tag that has the new value of a changed param
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "retryable": "FAILED", "final": "FAILED"}
# MLflow's limits
BATCH_METRICS, BATCH_PARAMS = 1_000, 100
PARAM_CHARACTERS, TAG_CHARACTERS = 6_000, 8_000

Point = tuple[str, float, float, int]  # metric, value, time in seconds, step


class RunLostError(Exception):
    """Raised if the server no longer has the run, or has it marked as deleted."""


class FiguresRejectedError(Exception):
    """Raised if the server rejects a request as invalid, so that sending it again cannot help."""


class MlflowRun:
    """A run on an MLflow server. Methods raise exceptions if the server fails.

    id: MLflow's id of the run; "" before `open` has found or created it.
    """

    def __init__(self, uri: str, facts: Facts, mlflow_run: str = "", patience: float = 60.0) -> None:
        """Prepare the connection; nothing is sent before `open`.

        uri: address of the server. facts: the content of the run's facts.json. mlflow_run: MLflow's id of the
        run; "" if unknown. patience: time-out of a request in seconds.
        """
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, round(patience)))
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        from mlflow import MlflowClient

        self._client = MlflowClient(uri)
        self._uri, self._facts, self._patience = uri, facts, patience
        self.id = mlflow_run
        self._experiment = ""

    def open(self, running: bool) -> None:
        """Find or create the run on the server. running: whether to set its status to RUNNING.

        Raises RunLostError if `id` was known and the server no longer has the run with this id.
        """
        if self.id:
            found = self._ask(self._client.get_run, self.id)
            if found.info.lifecycle_stage != "active":
                raise RunLostError
        else:
            found = self._find_or_create()
            self.id = found.info.run_id
        self._experiment = found.info.experiment_id
        if running and found.info.status != "RUNNING":
            self._ask(self._client.update_run, self.id, status="RUNNING")
        self._describe(found.data.params, found.data.tags)

    def last_steps(self, left_out: str) -> dict[str, int]:
        """The last step of each metric that the server has: {metric: step}.

        left_out: metrics whose names begin with this text are left out.
        """
        names = list(self._ask(self._client.get_run, self.id).data.metrics)
        histories = {
            name: self._ask(self._client.get_metric_history, self.id, name)
            for name in names
            if not name.startswith(left_out)
        }
        return {name: max(point.step for point in found) for name, found in histories.items() if found}

    @property
    def page(self) -> str:
        """The URL of the page of the run, for a browser."""
        server = os.environ.get(PAGE_VARIABLE) or self._uri
        return f"{shown_uri(server)}/#/experiments/{self._experiment}/runs/{self.id}"

    def log(self, points: Sequence[Point]) -> None:
        """Send figures. points: at most BATCH_METRICS tuples (metric, value, Unix time, step).

        Raises RunLostError if the server no longer has the run, and FiguresRejectedError if it rejects
        the figures.
        """
        from mlflow.entities import Metric

        metrics = [Metric(name, value, round(at * 1000), step) for name, value, at, step in points]
        self._ask(self._client.log_batch, self.id, metrics=metrics, synchronous=True)

    def put(self, path: Path, folder: str) -> None:
        """Send the file `path` as an artifact.

        folder: folder for the file among the run's artifacts; "" is the top folder.
        """
        self._ask(self._client.log_artifact, self.id, str(path), folder or None)

    def end(self, status: str) -> None:
        """Set the final status of the run, such as FINISHED."""
        self._ask(self._client.set_terminated, self.id, status=status)

    def _find_or_create(self) -> Any:
        from mlflow.entities import ViewType

        tags = {RUN_ID_TAG: self._facts.run_id, DIGEST_TAG: self._facts.digest}
        name = self._facts.experiment
        experiment = self._ask(self._client.get_experiment_by_name, name)
        number = experiment.experiment_id if experiment else self._ask(self._client.create_experiment, name)
        if experiment and experiment.lifecycle_stage != "active":
            self._ask(self._client.restore_experiment, number)
        runs = experiment and self._ask(
            self._client.search_runs,
            [number],
            " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items()),
            run_view_type=ViewType.ACTIVE_ONLY,
            max_results=1,
        )
        if runs:
            return runs[0]
        return self._ask(self._client.create_run, number, tags=tags, run_name=self._facts.run_id)

    def _describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Send the params and tags of facts.json that the server lacks. params, tags: those that it has.

        MLflow does not allow changing a param. The new value of a changed param is sent as a tag.
        """
        from mlflow.entities import Param, RunTag

        wanted = {clean_key(key): value[:PARAM_CHARACTERS] for key, value in self._facts.params.items()}
        changed = {clean_key(CHANGED_TAG + key): v for key, v in wanted.items() if params.get(key, v) != v}
        wanted_tags = {clean_key(key): v[:TAG_CHARACTERS] for key, v in self._facts.tags.items()} | changed
        new = [Param(key, value) for key, value in wanted.items() if key not in params]
        new_tags = [RunTag(key, value) for key, value in wanted_tags.items() if tags.get(key) != value]
        for start in range(0, max(len(new), len(new_tags)), BATCH_PARAMS):
            part = slice(start, start + BATCH_PARAMS)
            self._ask(
                self._client.log_batch, self.id, params=new[part], tags=new_tags[part], synchronous=True
            )

    def _ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            with time_limit(self._patience):
                return call(*args, **kwargs)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise RunLostError from None
            if error.error_code == "INVALID_PARAMETER_VALUE":  # also the error for a deleted run
                lookup = self._client.get_run
                if self.id and call != lookup and self._ask(lookup, self.id).info.lifecycle_stage != "active":
                    raise RunLostError from None
                raise FiguresRejectedError(reason(error)) from None
            raise


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context that raises TimeoutError in the main thread after `seconds`, even in a blocking read."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, expire)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # restore an earlier alarm
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)))


def shown_uri(uri: str) -> str:
    """`uri` without user, password and trailing slash, for messages."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # such as a bracket that is not closed
        return re.sub(r"//[^/]*@", "//", uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def is_server(uri: str) -> bool:
    """Whether `uri` has the form http(s)://HOST. MLflow itself would accept folders and databases too."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def describe_failure(error: BaseException) -> str:
    """The text to log for a failed request: "does not answer (REASON)" or "is not an MLflow server (...)"."""
    answer = re.search(r"failed with error code (\d+) != 200|not in a valid JSON format", str(error))
    if not answer:
        return f"does not answer ({reason(error)})"
    what = f"error {answer[1]}" if answer[1] else "something other than JSON"
    return f"is not an MLflow server (a request for its experiments returns {what})"


def reason(error: BaseException) -> str:
    """The reason for `error` as a short text without passwords.

    For a network error, it is the text of the operating system; else the first line of the error's message.
    """
    inner = error
    while (cause := inner.__cause__ or inner.__context__) is not None:
        inner = cause
    if isinstance(inner, OSError):
        text = inner.strerror or str(inner)
    else:
        text = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"://[^/@\s]+@", "://", text)[:200].rstrip(". ") or type(error).__name__
