"""A stand-in for an MLflow server that can fall ill on demand, which a real one cannot.

It keeps experiments, runs, params, tags, points and artifacts in memory and speaks as much of MLflow's REST
API as a tracking client uses. A point that comes twice is one point, as in MLflow's database; `received`
counts both. The tests of a healthy server use a real one (test_tracker_server.py).
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

Answer = tuple[int, dict[str, Any]]
MISSING: Answer = (404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "there is none"})


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that has left before the answer came is what some tests are about."""


class StandIn:
    """`illness`: "", "slow" (30 s an answer), "hangs" (stops in mid-answer), "trickles" or "fails" (500)."""

    def __init__(self, port: int = 0) -> None:
        self.illness = ""
        self.requests = 0
        self.lose_everything()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                stand_in._handle(self)

            do_GET = do_POST = do_PUT = do_PATCH = handle_any  # noqa: N815 - http.server's names

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.uri = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Vanish: connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()

    def lose_everything(self) -> None:
        """As a server whose database was made again."""
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.received = 0

    @property
    def run(self) -> dict[str, Any]:
        """The only run there is."""
        (run,) = self.runs.values()
        return run

    def history(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every point of a figure, in the order of steps."""
        return sorted((step, value) for key, value, _, step in self.run["points"] if key == name)

    # -- answers ---------------------------------------------------------------------------------------

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        url = urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if self.illness == "slow":
            time.sleep(30)
        if self.illness == "fails":
            self._write(request, 500, b"Internal Server Error")
            return
        if self.illness in ("hangs", "trickles"):
            request.send_response(200)
            request.send_header("Content-Length", "1000")
            request.end_headers()
            for _ in range(300):
                if self.illness == "trickles":
                    request.wfile.write(b" ")
                time.sleep(0.2)
            return
        if "/mlflow-artifacts/artifacts/" in url.path:
            run_id, _, name = url.path.split("/mlflow-artifacts/artifacts/")[1].partition("/artifacts/")
            self.runs[run_id.split("/")[-1]]["artifacts"].append((name, body))
            self._write(request, 200, b"{}")
            return
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        call = url.path.partition("/mlflow/")[2]
        status, answer = self._answer(call, {**query, **(json.loads(body) if body else {})})
        self._write(request, status, json.dumps(answer).encode())

    @staticmethod
    def _write(request: BaseHTTPRequestHandler, status: int, data: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _answer(self, call: str, ask: dict[str, Any]) -> Answer:
        answers: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "experiments/get-by-name": self._experiment,
            "experiments/create": self._create_experiment,
            "runs/search": self._search,
            "runs/create": self._create,
            "runs/get": lambda ask: (200, {"run": self._shown(self.runs[ask["run_id"]])}),
            "runs/update": self._update,
            "runs/log-batch": self._log,
            "metrics/get-history": self._history,
        }
        if call not in answers:
            return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": call}
        if ask.get("run_id", "") not in ("", *self.runs):
            return MISSING
        return answers[call](ask)

    def _experiment(self, ask: dict[str, Any]) -> Answer:
        name = ask["experiment_name"]
        if name not in self.experiments:
            return MISSING
        shown = {"experiment_id": self.experiments[name], "name": name, "lifecycle_stage": "active"}
        return 200, {"experiment": shown}

    def _create_experiment(self, ask: dict[str, Any]) -> Answer:
        self.experiments[ask["name"]] = str(len(self.experiments) + 1)
        return 200, {"experiment_id": self.experiments[ask["name"]]}

    def _search(self, ask: dict[str, Any]) -> Answer:
        wanted = [part.split(" = ") for part in ask["filter"].split(" and ")]
        tags = {key.removeprefix("tags.").strip("`"): value.strip("'") for key, value in wanted}
        return 200, {
            "runs": [self._shown(run) for run in self.runs.values() if tags.items() <= run["tags"].items()]
        }

    def _create(self, ask: dict[str, Any]) -> Answer:
        run_id = uuid.uuid4().hex  # MLflow keeps the place of artifacts in mind by run
        self.runs[run_id] = {
            "id": run_id,
            "status": "RUNNING",
            "experiment": ask["experiment_id"],
            "tags": {tag["key"]: tag["value"] for tag in ask["tags"]},
            "params": {},
            "points": set(),
            "artifacts": [],
        }
        return 200, {"run": self._shown(self.runs[run_id])}

    def _update(self, ask: dict[str, Any]) -> Answer:
        run = self.runs[ask["run_id"]]
        run["status"] = ask["status"]
        return 200, {"run_info": self._shown(run)["info"]}

    def _log(self, ask: dict[str, Any]) -> Answer:
        run = self.runs[ask["run_id"]]
        for param in ask.get("params", ()):
            if run["params"].setdefault(param["key"], param["value"]) != param["value"]:
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "a param cannot change"}
        run["tags"] |= {tag["key"]: tag["value"] for tag in ask.get("tags", ())}
        for point in ask.get("metrics", ()):
            run["points"].add((point["key"], point["value"], point["timestamp"], int(point.get("step", 0))))
            self.received += 1
        return 200, {}

    def _history(self, ask: dict[str, Any]) -> Answer:
        points = self.runs[ask["run_id"]]["points"]
        return 200, {"metrics": [_metric(point) for point in points if point[0] == ask["metric_key"]]}

    def _shown(self, run: dict[str, Any]) -> dict[str, Any]:
        info = {
            "run_id": run["id"],
            "run_uuid": run["id"],
            "experiment_id": run["experiment"],
            "status": run["status"],
            "lifecycle_stage": "active",
            "artifact_uri": f"mlflow-artifacts:/{run['id']}/artifacts",
        }
        pairs = {name: [{"key": k, "value": v} for k, v in run[name].items()] for name in ("params", "tags")}
        newest = {point[0]: point for point in sorted(run["points"], key=lambda point: point[3])}
        return {"info": info, "data": {**pairs, "metrics": [_metric(point) for point in newest.values()]}}


def _metric(point: tuple[str, float, int, int]) -> dict[str, Any]:
    return dict(zip(("key", "value", "timestamp", "step"), point, strict=True))


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()
