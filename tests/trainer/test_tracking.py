"""Nothing a run wrote is lost, sent twice or waited for, however the tracker behaves.

A sick server is played by a stand-in; a real one is talked to in test_tracker_server.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from conftest import free_port, train_here
from mlflow_stand_in import StandIn
from tracked_run import FACTS, Track, end, steps, until

from trainer.checkpoint.storage import TrainState
from trainer.config import RunConfig
from trainer.health.attempt import Attempt
from trainer.health.run_status import RunStatus
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.tracking import tracker
from trainer.tracking.files import Facts
from trainer.tracking.reporter import Reporter
from trainer.tracking.tracker import Tracker


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Tracker]]:
    """Make trackers of the run in tmp_path, which are closed when the test is over."""
    made: list[Tracker] = []

    def make(
        uri: str, resume_step: int = 0, facts: Facts = FACTS, printed: list[str] | None = None
    ) -> Tracker:
        made.append(
            Tracker(tmp_path, resume_step, facts, uri, (printed if printed is not None else []).append)
        )
        return made[-1]

    yield make
    for each in made:
        each.close("stopped", hurry=True)


# -- the server --------------------------------------------------------------------------------------------


def test_a_server_in_health_has_everything_once(
    server: StandIn, begin: Callable[..., Tracker], tmp_path: Path, track: Track
) -> None:
    printed: list[str] = []
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 500)
    notes.sample(250, "Once upon a time")
    notes.core(250, "Task, Accuracy, Centered\n")
    notes.step(500, {"val_bpb": 1.25})
    until(lambda: any("Tracked at" in line for line in printed), "it says where")
    assert track(server.uri)[0] == 2, "the run itself is sending"
    end(tmp_path, "finished")
    notes.close("finished")
    assert not any("lacks" in line for line in printed)

    run = server.run
    assert server.history("train/step_loss") == [(step, 3.0 - 0.01 * step) for step in range(1, 501)]
    assert server.history("val/bpb") == [(500, 1.25)]
    assert server.history("system/load_1_minute")
    assert server.received == len(run["points"])
    assert run["status"] == "FINISHED"
    assert run["params"] == {"depth": "2", "odd/name_": "x" * 6000}
    assert FACTS.tags.items() <= run["tags"].items()
    artifacts = dict(run["artifacts"])
    assert artifacts["samples/step_000250.txt"] == b"Once upon a time\n"
    assert artifacts["core/step_000250.csv"] == b"Task, Accuracy, Centered\n"
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
    printed: list[str] = []
    begin(server.uri, printed=printed)
    until(lambda: printed, "it says where")
    assert printed[0].startswith("Tracked at http://tower:5000/#/experiments/")


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"<p>not here</p>", "error 404"),
        (200, b"<p>hello</p>", "something other than JSON"),
    ],
)
def test_what_answers_but_is_no_mlflow_is_reported(
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
    assert f"is not an MLflow server (a request for its experiments returns {says})" in text
    assert "does not answer" not in text
    assert "it received 0 figures. Nothing is lost" in text


def test_a_server_that_is_away_gets_it_afterwards(
    begin: Callable[..., Tracker], tmp_path: Path, track: Track
) -> None:
    port, printed = free_port(), list[str]()
    notes = begin(f"http://127.0.0.1:{port}", printed=printed)
    steps(notes, 1, 3000)
    until(lambda: printed, "it says that the server is away")
    began = time.monotonic()
    notes.close("finished")
    assert time.monotonic() - began < tracker.STALLED_SECONDS - 1, "it waits for no server that is away"
    assert len(printed) == 2, printed
    assert "does not answer (Connection refused); training continues without it" in printed[0]
    assert f"python -m trainer track --run-dir {tmp_path}" in printed[1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3000

    end(tmp_path, "stopped")
    status, text = track(f"http://127.0.0.1:{port}")
    assert status == 1
    assert "does not answer" in text
    assert "Nothing is lost" in text
    server = StandIn(port)
    status, text = track(server.uri)
    assert status == 0, text
    assert [step for step, _ in server.history("train/step_loss")] == list(range(1, 3001))
    assert server.run["status"] == "KILLED"
    server.close()


def test_a_server_that_comes_back_gets_what_it_missed(begin: Callable[..., Tracker], tmp_path: Path) -> None:
    server, printed = StandIn(), list[str]()
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 10)
    until(lambda: server.runs and len(server.history("train/step_loss")) == 10, "the first steps arrive")
    server.close()
    kept = server.experiments, server.runs
    steps(notes, 11, 20)
    until(lambda: any("training continues without it" in line for line in printed), "it says that it is away")
    server = StandIn(server.port)
    server.experiments, server.runs = kept
    until(lambda: len(server.history("train/step_loss")) == 20, "the missed steps arrive")
    until(lambda: any("is back" in line for line in printed), "it says that it is back")
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
    printed: list[str] = []
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 100)
    until(lambda: any("does not answer" in line for line in printed), "it says so")
    began = time.monotonic()
    notes.close("finished")
    assert time.monotonic() - began < tracker.CLOSING_SECONDS / 2
    assert "lacks the end" in printed[-1]
    server.illness = ""
    end(tmp_path, "finished")
    status, text = track(server.uri)
    assert status == 0, text
    assert len(server.history("train/step_loss")) == 100
    assert server.run["status"] == "FINISHED"


def test_in_a_hurry_a_second_is_all(server: StandIn, begin: Callable[..., Tracker]) -> None:
    server.illness = "slow"
    notes = begin(server.uri)
    until(lambda: server.requests, "the sender is asking")
    steps(notes, 1, 10)
    began = time.monotonic()
    notes.close("stopped", hurry=True)
    assert time.monotonic() - began < tracker.STALLED_SECONDS - 1


def test_a_server_that_lost_the_run_gets_all_of_it_again(
    server: StandIn, begin: Callable[..., Tracker]
) -> None:
    printed: list[str] = []
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 10)
    until(lambda: server.runs and len(server.history("train/step_loss")) == 10, "the first steps arrive")
    server.lose_everything()
    steps(notes, 11, 20)
    until(lambda: server.runs and len(server.history("train/step_loss")) == 20, "all steps are there again")
    assert any("has lost this run" in line for line in printed)
    notes.close("finished")
    assert server.run["params"]["depth"] == "2"


def test_a_resumed_run_sends_no_step_twice(
    server: StandIn, begin: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "HURRY_SECONDS", 10.0)  # other tests may use the processors
    first = begin(server.uri)
    steps(first, 1, 20)
    until(lambda: server.runs and len(server.history("train/step_loss")) == 20, "the first steps arrive")
    first.close("retryable")
    assert server.run["status"] == "FAILED"

    changed = Facts("run", "d1", {**FACTS.params, "depth": "3", "new": "1"}, {"world_size": "1"})
    second = begin(server.uri, resume_step=10, facts=changed)
    steps(second, 11, 15)
    until(lambda: server.run["status"] == "RUNNING", "it continues in the same run")
    steps(second, 16, 30)
    second.close("finished")
    assert [step for step, _ in server.history("train/step_loss")] == list(range(1, 31))
    assert server.run["params"] == {"depth": "2", "odd/name_": "x" * 6000, "new": "1"}
    assert (server.run["tags"]["now.depth"], server.run["tags"]["world_size"]) == ("3", "1")


def test_an_elected_coordinator_sends_only_what_the_server_lacks(
    server: StandIn, begin: Callable[..., Tracker], tmp_path: Path
) -> None:
    """It has the figures of all steps too, with its own times, and no record of what was sent."""
    first = begin(server.uri)
    steps(first, 1, 20)
    until(lambda: server.runs and len(server.history("train/step_loss")) == 20, "the first steps arrive")
    first.close("retryable")
    (tmp_path / "tracker.json").unlink()
    (tmp_path / "term.json").write_text(json.dumps({"term": 1}))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    own = [json.dumps({**line, "time": line["time"] + 0.5}) for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in own))
    second = begin(server.uri, resume_step=20)
    steps(second, 21, 30)
    second.close("finished")
    assert len(server.runs) == 1
    assert [step for step, _ in server.history("train/step_loss")] == list(range(1, 31))


def test_the_sender_goes_with_rank_0(server: StandIn, tmp_path: Path, track: Track) -> None:
    """Killed without a word, rank 0 leaves nothing behind that holds the run; its last lines arrive."""
    program = f"""
import os, signal, sys, time
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
    assert rank_0.wait(60) == -signal.SIGKILL
    rank_0.stdout.close()
    sender.wait(60)
    assert [step for step, _ in server.history("train/step_loss")] == [1, 2]
    status, text = track(server.uri)
    assert (status, "no outcome yet" in text) == (0, True), text
    assert server.run["status"] == "RUNNING"


def test_a_sender_that_died_is_started_again(
    server: StandIn, begin: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "RESTART_SECONDS", (0.1,))
    printed: list[str] = []
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 5)
    until(lambda: server.runs and len(server.history("train/step_loss")) == 5, "the first steps arrive")
    children = psutil.Process(os.getpid()).children()
    (sender,) = (each for each in children if "trainer.tracking.sender" in each.cmdline())
    sender.kill()
    steps(notes, 6, 9)
    until(lambda: len(server.history("train/step_loss")) == 9, "the later steps arrive")
    assert any("was ended by signal 9; it restarts in 0.1 s" in line for line in printed)


def test_what_a_library_prints_ends_no_tracking(
    server: StandIn,
    begin: Callable[..., Tracker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On standard output, which is the log's, and even where the messages go."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if '--run-dir' in sys.orig_argv:\n"
        "    print('a library greets', flush=True)\n"
        "    sys.stdout.writelines(['half a line'])\n"
        "    if '--messages' in sys.orig_argv:\n"
        "        fd = int(sys.orig_argv[sys.orig_argv.index('--messages') + 1])\n"
        "        os.write(fd, b'what is this\\n[1]\\n3\\n\\xff\\n{\"figures\": 1}\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    printed: list[str] = []
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 10)
    until(lambda: any("Tracked at" in line for line in printed), "it says where")
    until(lambda: len(server.history("train/step_loss")) == 10, "the steps arrive")
    notes.close("finished")
    assert server.run["status"] == "FINISHED"
    assert "a library greets" in capfd.readouterr().err
    assert sum("process that sends to the tracker printed: " in line for line in printed) == 5, printed
    assert any("printed: what is this. No figure is lost" in line for line in printed)
    assert not any("lacks" in line for line in printed)


def test_a_sender_that_cannot_start_is_tried_less_and_less_often(
    begin: Callable[..., Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "RESTART_SECONDS", (0.05, 0.1, 0.2))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '--run-dir' in sys.orig_argv:\n    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    printed: list[str] = []
    begin("http://127.0.0.1:1", printed=printed)
    until(lambda: len(printed) >= 4, "it is started again and again")
    assert [line.rpartition(" in ")[2] for line in printed[:4]] == ["0.05 s.", "0.1 s.", "0.2 s.", "0.2 s."]
    assert all("the process that sends to the tracker ended with exit code 3" in line for line in printed[:4])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    until(lambda: "could not be started (No such file or directory)" in printed[-1], "nor can it be executed")


def test_a_lag_is_reported_with_its_length_and_its_end(
    begin: Callable[..., Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "PATIENCE", 5.0)  # also the lag that is reported
    server, printed = StandIn(), list[str]()
    notes = begin(server.uri, printed=printed)
    steps(notes, 1, 10)
    until(lambda: server.runs and len(server.history("train/tok_per_sec")) == 10, "the first steps arrive")
    server.close()
    kept = server.experiments, server.runs
    steps(notes, 11, 20)
    until(lambda: any("training continues without it" in line for line in printed), "it says that it is away")
    assert not any("behind" in line for line in printed), "not before it lasts"
    until(lambda: any("behind" in line for line in printed), "the lag is reported")
    (report,) = (line for line in printed if "behind" in line)
    assert report.startswith(f"warning: The tracker at {server.uri} is 20 figures behind, since ")
    steps(notes, 21, 30)
    server = StandIn(server.port)
    server.experiments, server.runs = kept
    until(lambda: any("has caught up with metrics.jsonl" in line for line in printed), "it says so")
    assert sum("behind" in line for line in printed) == 1, "once for a while"
    assert len(server.history("train/step_loss")) == 30
    server.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run-dir", "."], "No tracker address was given"),
        (
            ["--run-dir", ".", "--tracker-uri", "localhost:5000"],
            "'localhost:5000' is not the address of a tracker",
        ),
        (["--run-dir", "/nowhere", "--tracker-uri", "http://127.0.0.1:1"], "/nowhere cannot be used"),
        (["--run-dir", ".", "--tracker-uri", "http://127.0.0.1:1"], "facts.json cannot be read"),
    ],
)
def test_what_cannot_be_tracked_is_reported_in_a_sentence(
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
    """All settings and what follows from them are params, digests and hosts are tags."""
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
    assert [step for step, _ in server.history("train/step_loss")] == [1, 2, 3, 4, 5, 6]
    assert list(server.experiments) == ["nanochat-d2"]
    figures = {"train/loss", "train/lrm", "train/dt", "train/tok_per_sec", "train/epoch", "val/bpb"}
    figures |= {"total_training_flops", "total_training_time", "phase_seconds/sync"}
    assert figures <= {point[0] for point in run["points"]}
    assert run["status"] == "FINISHED"
    assert dict(run["artifacts"])["samples/step_000006.txt"].startswith(b"The ")


def test_the_members_of_an_elastic_run_are_on_the_server(
    server: StandIn, begin: Callable[..., Tracker], tmp_path: Path
) -> None:
    env = RankEnv()
    reporter = Reporter(RunStatus(tmp_path, env, "run"), Attempt(tmp_path, env), RunLogger(env), True)
    reporter.tracker = begin(server.uri)
    for step, hosts in ((1, 3), (5, 2)):
        reporter.train_state = TrainState(step=step)
        reporter.members(hosts, 2 * hosts)
    reporter.tracker.close("finished")
    assert server.history("hosts") == [(1, 3.0), (5, 2.0)]
    assert server.history("ranks") == [(1, 6.0), (5, 4.0)]


def test_an_end_does_not_keep_another_waiting(tmp_path: Path) -> None:
    """SIGTERM while the tracker is given the rest: the first outcome stands, and the process may go."""
    attempt = Attempt(tmp_path, RankEnv())
    attempt.begin()
    going, released = threading.Event(), threading.Event()

    def linger(outcome: str, hurry: bool) -> None:
        going.set()
        released.wait(60)

    attempt.at_end(linger)
    first = threading.Thread(target=attempt.end, args=("finished", "All done."))
    first.start()
    assert going.wait(60)
    began = time.monotonic()
    assert not attempt.end("stopped", "SIGTERM", hurry=True)
    assert time.monotonic() - began < 30
    released.set()
    first.join(10)
    assert json.loads(attempt.path.read_text())["outcome"] == "finished"
