"""Nothing a run wrote is lost, sent twice or waited for, however the tracker behaves.

A sick server is played by a stand-in; a real one is talked to in test_tracker_server.py.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import free_port, train_here
from mlflow_stand_in import StandIn

from trainer.__main__ import main
from trainer.config import RunConfig
from trainer.host.facts import host_facts, tags_of_hosts
from trainer.host.place import Place
from trainer.outcome import Attempt
from trainer.tracking import files, tracker
from trainer.tracking.files import Cursor, Facts, JsonLines, NewLines
from trainer.tracking.mlflow_run import clean_key, is_server, reason, shown_uri
from trainer.tracking.plots import POINTS, make_plots, read_series
from trainer.tracking.system import SystemSampler
from trainer.tracking.tracker import Tracker

FACTS = Facts("run", "d1", {"depth": "2", "odd/name?": "x" * 9000}, {"host.0.cpu": "fast", "world_size": "2"})
ANSWER_SECONDS = 30.0  # importing mlflow takes seconds on a busy machine


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Tracker]]:
    """Make trackers of the run in tmp_path, which are closed when the test is over."""
    made: list[Tracker] = []

    def make(uri: str, resume_step: int = 0, facts: Facts = FACTS, said: list[str] | None = None) -> Tracker:
        made.append(Tracker(tmp_path, resume_step, facts, uri, (said if said is not None else []).append))
        return made[-1]

    yield make
    for each in made:
        each.close("stopped", hurry=True)


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def steps(notes: Tracker, first: int, last: int) -> None:
    """Write down steps; it may not take any time to speak of."""
    began = time.monotonic()
    for step in range(first, last + 1):
        notes.step(step, {"loss": 3.0 - 0.01 * step, "tok_per_s": 100.0})
    assert time.monotonic() - began < 0.5


Track = Callable[[str], tuple[int, str]]


@pytest.fixture
def track(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Track:
    """Type `python -m trainer track` for the run in tmp_path: its exit code and what it said."""
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")  # what it sets is taken back after the test

    def type_it(uri: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(["track", "--run-dir", str(tmp_path), "--tracker-uri", uri])
        return status, "".join(capfd.readouterr())

    return type_it


def end(run_dir: Path, outcome: str) -> None:
    (run_dir / "outcome.json").write_text(json.dumps({"outcome": outcome}))


# -- the files ---------------------------------------------------------------------------------------------


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3, "time": 1}\n{"step": 3, "loss": 1, "time": 2}\n{"step": 2, "lo')
    JsonLines(path, last_step=2).write(2, {"loss": math.nan, "lr": 0.5}, time=3.0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 3, "time": 1},
        {"step": 2, "loss": None, "lr": 0.5, "time": 3.0},
    ]
    assert JsonLines(path).last_step == 2
    JsonLines(path, last_step=-1)
    assert path.read_text() == ""


def test_new_lines_come_in_portions_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = NewLines(path)
    assert tail.read(10) == []
    lines = JsonLines(path)
    for step in range(5):
        lines.write(step, {"loss": 1.0}, time=0.0)
    with open(path, "a") as file:
        file.write('{"step": 5, "ti')
    assert [line["step"] for line in tail.read(3)] == [0, 1, 2]
    assert [line["step"] for line in tail.read(3)] == [0, 1, 2], "what was not taken comes again"
    tail.taken()
    assert [line["step"] for line in tail.read(3)] == [3, 4]
    tail.taken()
    assert tail.read(3) == []
    JsonLines(path, last_step=1)  # another file in its place
    assert [line["step"] for line in tail.read(3)] == [0, 1]


def test_a_cursor_belongs_to_one_server_and_one_configuration(tmp_path: Path) -> None:
    cursor = Cursor.load(tmp_path, "http://a", FACTS)
    cursor.steps["loss"] = 7
    cursor.save(tmp_path)
    line = {"step": 7, "loss": 1.0, "val_bpb": 2, "time": 1.0, "none": None}
    assert Cursor.load(tmp_path, "http://a", FACTS).new_points(line) == {"val_bpb": 2.0}
    assert Cursor.load(tmp_path, "http://b", FACTS).steps == {}
    assert Cursor.load(tmp_path, "http://a", Facts("run", "d2")).steps == {}
    (tmp_path / files.CURSOR).write_text("{")
    assert Cursor.load(tmp_path, "http://a", FACTS).steps == {}


def test_names_and_addresses_are_made_fit() -> None:
    assert clean_key("host.0/a?ä=1") == "host.0/a_ä_1"
    assert clean_key("../../etc//passwd") == "etc/passwd"
    assert clean_key("") == "_"
    assert len(clean_key("x" * 999)) == 250
    assert shown_uri("https://me:secret@server:5000/") == "https://server:5000"
    assert is_server("http://10.0.0.2:5000")
    assert not any(map(is_server, ("localhost:5000", "mlruns", "sqlite:///x.db", "http://", "")))
    refused = RuntimeError("GET http://me:secret@server failed")
    assert reason(refused) == "GET http://server failed"
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert reason(refused) == "Connection refused"


def test_plots_are_pictures_of_bounded_size(tmp_path: Path) -> None:
    assert make_plots(tmp_path) == []
    lines = JsonLines(tmp_path / files.METRICS)
    for step in range(3 * POINTS):
        lines.write(step, {"loss": step, "tok_per_s": 1.0, "data_s": 0.1, "sync_s": 0.2}, time=0.0)
    lines.write(step, {"val_bpb": 1.5, "val_loss": 4.0}, time=0.0)
    shown, values = read_series(tmp_path / files.METRICS)["loss"]
    assert shown == values == list(range(0, 3 * POINTS, 4))
    made = make_plots(tmp_path)
    assert sorted(path.name for path in made) == ["loss.png", "throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in made)
    before = [path.stat().st_mtime_ns for path in made]
    assert [path.stat().st_mtime_ns for path in make_plots(tmp_path)] == before, "nothing new, nothing drawn"


def test_the_host_is_sampled(tmp_path: Path) -> None:
    sampler = SystemSampler(tmp_path, every_seconds=0.05)
    path = tmp_path / files.SYSTEM
    until(lambda: len(path.read_text().splitlines()) >= 2, "it takes samples")
    sampler.close()
    taken = [json.loads(line) for line in path.read_text().splitlines()]
    again = SystemSampler(tmp_path)
    again.close()  # the last sample is taken at the end
    taken.append(json.loads(path.read_text().splitlines()[-1]))
    assert [line["step"] for line in taken] == list(range(len(taken))), "an attempt goes on counting"
    last = taken[-1]
    assert last["system/process_memory_megabytes"] == pytest.approx(
        psutil.Process().memory_info().rss / 1e6, rel=0.2
    )
    assert last["system/disk_available_megabytes"] > 0
    assert 0 <= last["system/cpu_utilization_percentage"] <= 100


def test_facts_of_hosts_are_tags() -> None:
    facts = host_facts()
    assert {"hostname", "system", "machine", "cpu", "cores", "memory", "python", "torch"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())
    assert tags_of_hosts([{"cpu": "a"}, {"cpu": "b"}]) == {"host.0.cpu": "a", "host.1.cpu": "b"}


# -- the server --------------------------------------------------------------------------------------------


def test_a_server_in_health_has_everything_once(
    server: StandIn, begin: Callable[..., Tracker], tmp_path: Path, track: Track
) -> None:
    said: list[str] = []
    notes = begin(server.uri, said=said)
    steps(notes, 1, 500)
    notes.sample(250, "Once upon a time")
    notes.step(500, {"val_bpb": 1.25})
    until(lambda: any("Tracked at" in line for line in said), "it says where")
    assert track(server.uri)[0] == 2, "the run itself is sending"
    end(tmp_path, "finished")
    notes.close("finished")
    assert not any("lacks" in line for line in said)

    run = server.run
    assert server.history("loss") == [(step, 3.0 - 0.01 * step) for step in range(1, 501)]
    assert server.history("val_bpb") == [(500, 1.25)]
    assert server.history("system/load_1_minute")
    assert server.received == len(run["points"])
    assert run["status"] == "FINISHED"
    assert run["params"] == {"depth": "2", "odd/name_": "x" * 6000}
    assert FACTS.tags.items() <= run["tags"].items()
    artifacts = dict(run["artifacts"])
    assert artifacts["samples/step_000250.txt"] == b"Once upon a time\n"
    assert artifacts["metrics.jsonl"] == (tmp_path / "metrics.jsonl").read_bytes()
    assert {"plots/loss.png", "plots/throughput.png", "outcome.json", "system.jsonl"} <= artifacts.keys()

    requests = server.requests
    status, text = track(server.uri)
    assert (status, "0 figures were missing" in text) == (0, True), text
    assert server.requests == requests + 1, "it looks whether the run is there and sends nothing"
    assert len(run["artifacts"]) == len(artifacts)


def test_the_link_has_the_address_that_people_reach(
    server: StandIn, begin: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOFLEET_TRACKER_PAGE", "http://tower:5000")
    said: list[str] = []
    begin(server.uri, said=said)
    until(lambda: said, "it says where")
    assert said[0].startswith("Tracked at http://tower:5000/#/experiments/")


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"<p>not here</p>", "it answers error 404"),
        (200, b"<p>hello</p>", "it answers something other than JSON"),
    ],
)
def test_what_answers_but_is_no_mlflow_is_told_so(
    begin: Callable[..., Tracker], tmp_path: Path, track: Track, status: int, body: bytes, says: str
) -> None:
    class Page(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - http.server's names

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        steps(begin(""), 1, 3)
        code, text = track(f"http://127.0.0.1:{page.server_port}")
        page.shutdown()
    assert code == 1
    assert f"is no MLflow server ({says}" in text
    assert "does not answer" not in text
    assert "it got 0 figures. Nothing is lost" in text


def test_a_server_that_is_away_gets_it_afterwards(
    begin: Callable[..., Tracker], tmp_path: Path, track: Track
) -> None:
    port, said = free_port(), list[str]()
    notes = begin(f"http://127.0.0.1:{port}", said=said)
    steps(notes, 1, 3000)
    until(lambda: said, "it says that the server is away")
    began = time.monotonic()
    notes.close("finished")
    assert time.monotonic() - began < 2.0
    assert len(said) == 2, said
    assert "does not answer (Connection refused); training goes on without it" in said[0]
    assert f"python -m trainer track --run-dir {tmp_path}" in said[1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3000

    end(tmp_path, "stopped")
    status, text = track(f"http://127.0.0.1:{port}")
    assert status == 1
    assert "does not answer" in text
    assert "Nothing is lost" in text
    server = StandIn(port)
    status, text = track(server.uri)
    assert status == 0, text
    assert [step for step, _ in server.history("loss")] == list(range(1, 3001))
    assert server.run["status"] == "KILLED"
    server.close()


def test_a_server_that_comes_back_gets_what_it_missed(begin: Callable[..., Tracker], tmp_path: Path) -> None:
    server, said = StandIn(), list[str]()
    notes = begin(server.uri, said=said)
    steps(notes, 1, 10)
    until(lambda: server.runs and len(server.history("loss")) == 10, "the first steps arrive")
    server.close()
    kept = server.experiments, server.runs
    steps(notes, 11, 20)
    until(lambda: any("training goes on without it" in line for line in said), "it says that it is away")
    server = StandIn(server.port)
    server.experiments, server.runs = kept
    until(lambda: len(server.history("loss")) == 20, "the missed steps arrive")
    until(lambda: any("is back" in line for line in said), "it says that it is back")
    notes.close("finished")
    assert server.run["status"] == "FINISHED"
    server.close()


@pytest.mark.parametrize(
    "illness",
    ["hangs", "fails", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slow", "trickles"))],
)
def test_a_sick_server_is_not_waited_for(
    illness: str,
    server: StandIn,
    begin: Callable[..., Tracker],
    tmp_path: Path,
    track: Track,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "PATIENCE", 1.0)
    monkeypatch.setattr(tracker, "STALLED_SECONDS", 2.0)
    server.illness = illness
    said: list[str] = []
    notes = begin(server.uri, said=said)
    steps(notes, 1, 100)
    until(lambda: any("does not answer" in line for line in said), "it says so")
    began = time.monotonic()
    notes.close("finished")
    assert time.monotonic() - began < 4.0
    assert "lacks the end" in said[-1]
    server.illness = ""
    end(tmp_path, "finished")
    status, text = track(server.uri)
    assert status == 0, text
    assert len(server.history("loss")) == 100
    assert server.run["status"] == "FINISHED"


def test_in_a_hurry_a_second_is_all(server: StandIn, begin: Callable[..., Tracker]) -> None:
    server.illness = "slow"
    notes = begin(server.uri)
    until(lambda: server.requests, "the sender is asking")
    steps(notes, 1, 10)
    began = time.monotonic()
    notes.close("stopped", hurry=True)
    assert time.monotonic() - began < 1.5


def test_a_server_that_lost_the_run_gets_all_of_it_again(
    server: StandIn, begin: Callable[..., Tracker]
) -> None:
    said: list[str] = []
    notes = begin(server.uri, said=said)
    steps(notes, 1, 10)
    until(lambda: server.runs and len(server.history("loss")) == 10, "the first steps arrive")
    server.lose_everything()
    steps(notes, 11, 20)
    until(lambda: server.runs and len(server.history("loss")) == 20, "all steps are there again")
    assert any("no longer has this run" in line for line in said)
    notes.close("finished")
    assert server.run["params"]["depth"] == "2"


def test_a_resumed_run_sends_no_step_twice(server: StandIn, begin: Callable[..., Tracker]) -> None:
    first = begin(server.uri)
    steps(first, 1, 20)
    until(lambda: server.runs and len(server.history("loss")) == 20, "the first steps arrive")
    first.close("retryable")
    assert server.run["status"] == "FAILED"

    changed = Facts("run", "d1", {**FACTS.params, "depth": "3", "new": "1"}, {"world_size": "1"})
    second = begin(server.uri, resume_step=10, facts=changed)
    steps(second, 11, 15)
    until(lambda: server.run["status"] == "RUNNING", "it goes on in the same run")
    steps(second, 16, 30)
    second.close("finished")
    assert [step for step, _ in server.history("loss")] == list(range(1, 31))
    assert server.run["params"] == {"depth": "2", "odd/name_": "x" * 6000, "new": "1"}
    assert (server.run["tags"]["now.depth"], server.run["tags"]["world_size"]) == ("3", "1")


def test_the_sender_goes_with_rank_0(server: StandIn, tmp_path: Path, track: Track) -> None:
    """Killed without a word, rank 0 leaves nothing behind that holds the run; its last lines arrive."""
    program = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from trainer.tracking.tracker import Tracker
from trainer.tracking.files import Facts
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})  # as the trainer does
facts = Facts("run", "d1")
tracker = Tracker(Path({str(tmp_path)!r}), 0, facts, {server.uri!r}, lambda text: print(text, flush=True))
tracker.step(1, {{"loss": 1.0}})
sys.stdin.readline()
tracker.step(2, {{"loss": 0.5}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank_0.stdout is not None
    assert rank_0.stdin is not None
    assert "Tracked at" in rank_0.stdout.readline()
    (sender,) = psutil.Process(rank_0.pid).children()
    rank_0.stdin.write("\n")
    rank_0.stdin.close()
    assert rank_0.wait(10) == -signal.SIGKILL
    rank_0.stdout.close()
    sender.wait(10)
    assert [step for step, _ in server.history("loss")] == [1, 2]
    status, text = track(server.uri)
    assert (status, "no outcome yet" in text) == (0, True), text
    assert server.run["status"] == "RUNNING"


def test_a_sender_that_died_is_started_again(
    server: StandIn, begin: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "RESTART_SECONDS", 0.1)
    said: list[str] = []
    notes = begin(server.uri, said=said)
    steps(notes, 1, 5)
    until(lambda: server.runs and len(server.history("loss")) == 5, "the first steps arrive")
    (sender,) = psutil.Process(os.getpid()).children()
    sender.kill()
    steps(notes, 6, 9)
    until(lambda: len(server.history("loss")) == 9, "the later steps arrive")
    assert any("ended (-9)" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run-dir", "."], "No tracker address was given"),
        (["--run-dir", ".", "--tracker-uri", "localhost:5000"], "'localhost:5000' is no address of a server"),
        (["--run-dir", "/nowhere", "--tracker-uri", "http://127.0.0.1:1"], "/nowhere cannot be used"),
        (["--run-dir", ".", "--tracker-uri", "http://127.0.0.1:1"], "facts.json cannot be read"),
    ],
)
def test_what_cannot_be_tracked_is_told_in_a_sentence(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "track", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MLFLOW_TRACKING_URI": ""},
        check=False,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


# -- a training --------------------------------------------------------------------------------------------


def test_a_run_without_a_tracker_can_be_sent_later(
    server: StandIn, data_dir: Path, tmp_path: Path, track: Track
) -> None:
    """All knobs and what follows from them are params, digests and hosts are tags."""
    attempt = train_here(data_dir, tmp_path)
    assert not server.requests
    assert attempt.path.exists()
    assert track(server.uri)[0] == 0
    run = server.run
    assert set(RunConfig.field_names()) <= run["params"].keys()
    assert run["params"]["model.n_embd"] == "32"
    assert run["params"]["plan.tokens"] == str(6 * 160)
    assert int(run["params"]["parameters.total"]) > 10_000
    digests = {"digest.config", "digest.run_file", "digest.trainer", "digest.rows", "digest.tokenizer"}
    assert digests | {"host.0.cpu", "host.0.compute dtype", "hosts", "shares"} <= run["tags"].keys()
    assert [step for step, _ in server.history("loss")] == [1, 2, 3, 4, 5, 6]
    assert run["status"] == "FINISHED"
    assert dict(run["artifacts"])["samples/step_000006.txt"].startswith(b"The ")


def test_an_end_does_not_keep_another_waiting(tmp_path: Path) -> None:
    """SIGTERM while the tracker is given the rest: the first outcome stands, and the process may go."""
    attempt = Attempt(tmp_path, Place())
    attempt.begin()
    going, released = threading.Event(), threading.Event()

    def linger(outcome: str, hurry: bool) -> None:
        going.set()
        released.wait(10)

    attempt.at_end(linger)
    first = threading.Thread(target=attempt.end, args=("finished", "All done."))
    first.start()
    assert going.wait(10)
    began = time.monotonic()
    assert not attempt.end("stopped", "SIGTERM", hurry=True)
    assert time.monotonic() - began < 1
    released.set()
    first.join(10)
    assert json.loads(attempt.path.read_text())["outcome"] == "finished"
