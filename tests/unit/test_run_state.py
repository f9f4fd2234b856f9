"""The modules run_state, over made-up run directories, and installed_environment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ansible_collections.nanofleet.fleet.plugins.module_utils import log_lines as log
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_dir as run_dir_facts
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_report as report
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_status as status
from ansible_collections.nanofleet.fleet.plugins.module_utils import systemd_unit as unit_facts
from ansible_collections.nanofleet.fleet.plugins.modules import (
    installed_environment,
    run_state,
)
from role_files import call
from run_states import beat

from trainer.code_digest import code_digest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"run_id": "a", "config": {"depth": 2}, "hosts": ["h1", "h2"]})
    )
    return folder


def test_nothing_ever_ran(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = call(run_state, monkeypatch, state_dir=str(systemd / "nowhere"))
    assert (state["found"], state["run_id"], state["ended"], state["runs"]) == (False, "", True, [])


def test_a_live_run_is_read_whole(systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "state").write_text("active")
    beat = {"rank": 0, "step": 3, "num_iterations": 9, "loss": 5.0, "time": time.time() - 4}
    (run_dir / "heartbeat-0.json").write_text(json.dumps(beat))
    (run_dir / "heartbeat-1.json").write_text('{"rank": 1, "st')
    (run_dir / "attempt.json").write_text('{"pid": 7, "began": 7.5}')
    (run_dir / "metrics.jsonl").write_text(
        '{"step":2,"loss":5.5}\n{"step":2,"val_bpb":2.0}\n{"step":3,"loss":5.0}\n{"ste'
    )
    (run_dir / "checkpoints" / "step_000002").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_000002" / "meta.json").write_text("{}")
    (run_dir / "checkpoints" / "step_000003").mkdir()
    state = call(run_state, monkeypatch, state_dir=str(systemd))
    assert state["run_id"] == "a", "the active run is the one meant"
    assert state["active_units"] == ["nanofleet-a.service"], "the tracker is no run"
    assert state["heartbeats"][0]["age"] == pytest.approx(4, abs=1)
    assert len(state["heartbeats"]) == 1, "a half-written file is no heartbeat"
    assert (state["metrics"]["step"], state["evaluation"]["val_bpb"]) == (3, 2.0)
    assert state["began"] == 7.5
    assert state["checkpoint"] == "checkpoints/step_000002", "one without meta.json is not whole"
    assert (state["ended"], state["failed_unit"], state["stepped"], state["error"]) == (
        False,
        False,
        True,
        [],
    )
    assert not state["changed"]


def test_the_first_error_of_the_last_attempt_is_found(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [f'  File "x.py", line {n}' for n in range(30)]
    (run_dir / "train.log").write_text(
        "\n".join(["=== nanofleet-a started", "OldError: before", "=== nanofleet-a started", "[rank 0] load",
                   "Traceback (most recent call last):", *frames, "ValueError: the cause", "an Error: echo"])
    )  # fmt: skip
    (systemd / "state").write_text("failed")
    state = call(run_state, monkeypatch, state_dir=str(systemd), log_lines=5)
    assert state["failed_unit"]
    assert state["error"][-1] == "ValueError: the cause"
    assert len(state["error"]) == 5


def test_frames_of_torchs_own_stack_are_no_error() -> None:
    stack = [f"frame #{n}: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d" for n in range(30)]
    trace = ["Traceback (most recent call last):", '  File "rendezvous.py", line 67',
             "torch.distributed.DistStoreError: Timed out after 46 seconds waiting for clients."]  # fmt: skip
    assert log.first_error(["[rank 0] step 6/9", *stack, *trace, *stack], 20) == trace
    assert not any(log.is_error(line) for line in stack)


def test_torchruns_own_traceback_is_left_out() -> None:
    lines = ["[rank 0] step 6/9", "E1121 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7)"]
    follow = ["Traceback (most recent call last):", '  File "run.py"', "ChildFailedError: trainer FAILED"]
    assert log.first_error([*lines, *follow], 20) == lines[1:]


def test_torchruns_word_for_a_rank_that_a_signal_ended_is_put_signal_text() -> None:
    line = "E1121 16:55:44.1 7 api.py:1002] failed (exitcode: {}) local_rank: 0 (pid: 7) of binary: python"
    assert log.signal_text(line.format(-9)) == log.KILLED == report.KILLED
    assert log.signal_text(line.format(-11)) == "Ended by SIGSEGV"
    for kept in (line.format(-99), line.format(1), "ValueError: no rows"):
        assert log.signal_text(kept) == kept


def test_a_rank_that_was_just_killed_is_reported_from_its_attempts(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemd / "state").write_text("failed")
    (run_dir / "heartbeat-0.json").write_text(json.dumps({**beat(), "time": time.time()}))
    (run_dir / "train.log").write_text(
        "=== nanofleet-a started\nE1121 16:55:44 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7)\n"
    )
    dead = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    printed = status.status_screen({"tower": dead}, "a")
    assert f"tower: {log.KILLED} in forward after step 3." in printed.splitlines()
    assert "exitcode" not in printed
    settled = "Killed by SIGKILL in forward after step 3: by hand, or by the kernel because memory ran out."
    (run_dir / "outcome.json").write_text(json.dumps({"outcome": "retryable", "reason": settled}))
    dead = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    assert status.status_screen({"tower": dead}, "a").count("Killed") == 1


def test_a_rank_that_has_ended_is_distinguished_from_one_that_lives(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit may still be up: torchrun takes its time to end after its rank has."""
    (systemd / "state").write_text("active")
    for rank in (0, 1):
        beat = {"rank": rank, "time": time.time() - 30, "entered": 1.0, "pid": os.getpid()}
        (run_dir / f"heartbeat-{rank}.json").write_text(json.dumps(beat))

    def over() -> list[bool]:
        read = call(run_state, monkeypatch, state_dir=str(systemd))
        return [beat["over"] for beat in read["heartbeats"]]

    assert over() == [False, False]
    (run_dir / "outcome-1.json").write_text('{"rank": 1, "outcome": "retryable"}')
    assert over() == [False, True]
    (run_dir / "heartbeat-0.json").write_text(json.dumps({"rank": 0, "time": time.time(), "pid": 2**22 + 1}))
    assert over() == [True, True], "there is no such process"
    (run_dir / "heartbeat-0.json").write_text(json.dumps({"rank": 0, "time": time.time()}))
    assert over() == [False, True]
    (systemd / "state").write_text("deactivating")
    assert over() == [True, True]


def test_a_unit_gone_without_an_outcome_has_failed(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(run_state, monkeypatch, state_dir=str(systemd))["failed_unit"]
    (run_dir / "outcome.json").write_text('{"outcome": "finished"}')
    assert not call(run_state, monkeypatch, state_dir=str(systemd))["failed_unit"]


def test_a_host_that_was_rebooted_has_not_failed(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit is gone, whether the ranks were killed or ended when the host shut down."""
    now = time.time()
    (run_dir / "heartbeat-0.json").write_text(json.dumps({"rank": 0, "time": now - 900, "loss": 5.0}))
    (run_dir / "attempt.json").write_text(json.dumps({"pid": 7, "began": now - 1000}))
    asked = {"state_dir": str(systemd), "run_id": "a"}
    monkeypatch.setattr(run_dir_facts, "booted", lambda _now: now - 60)
    cut = call(run_state, monkeypatch, **asked)
    assert (cut["rebooted"], cut["failed_unit"], cut["error"]) == (now - 60, False, [])
    shut_down = {"outcome": "stopped", "settled": False, "time": now - 100}
    (run_dir / "outcome.json").write_text(json.dumps(shut_down))
    assert call(run_state, monkeypatch, **asked)["rebooted"] == now - 60
    (run_dir / "outcome.json").write_text(json.dumps({**shut_down, "settled": True}))
    assert call(run_state, monkeypatch, **asked)["rebooted"] is None, "somebody had stopped it before"
    (run_dir / "outcome.json").unlink()
    monkeypatch.setattr(run_dir_facts, "booted", lambda _now: now - 2000)
    killed = call(run_state, monkeypatch, **asked)
    assert (killed["rebooted"], killed["failed_unit"]) == (None, True), "the host was up all the time"


def test_the_first_process_shows_when_a_host_booted() -> None:
    elapsed = subprocess.run(["ps", "-o", "etimes=", "-p", "1"], capture_output=True, text=True, check=True)
    up_since = unit_facts.booted(time.time())
    assert up_since == pytest.approx(time.time() - int(elapsed.stdout), abs=3)


def test_a_resumed_run_is_newer_than_one_made_after_it(tmp_path):
    for moment, run_id in enumerate(("older", "newer"), 1):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "run.json").write_text("{}")
        os.utime(tmp_path / run_id / "run.json", (moment, moment))
    assert [run["run_id"] for run in run_dir_facts.known_runs(str(tmp_path), [])] == ["newer", "older"]
    (tmp_path / "older" / "heartbeat-0.json").write_text("{}")  # resumed, and so the newer one
    assert [run["run_id"] for run in run_dir_facts.known_runs(str(tmp_path), [])] == ["older", "newer"]


def test_a_file_may_vanish_while_runs_are_listed(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    os.utime(tmp_path / "a" / "run.json", (7, 7))
    names_in = run_dir_facts.names_in
    monkeypatch.setattr(run_dir_facts, "names_in", lambda folder: [*names_in(folder), "heartbeat-0.json"])
    assert [(run["run_id"], run["time"]) for run in run_dir_facts.known_runs(str(tmp_path), [])] == [("a", 7)]


def test_without_root_both_systemds_are_asked_and_only_ones_own_processes_count(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemd / "state").write_text("active")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    state = call(run_state, monkeypatch, state_dir=str(systemd))
    assert (state["run_id"], state["unit"]["scope"], state["ended"]) == ("a", "user", False)
    assert state["known_units"] == ["nanofleet-a.service"]
    monkeypatch.setattr(unit_facts, "unit_of", lambda _pid: "nanofleet-a.service")
    monkeypatch.setattr(unit_facts, "_uid_of", lambda pid: 1000 if pid == os.getpid() else 1001)
    assert unit_facts.processes_of("nanofleet-a", "user") == [os.getpid()]
    assert len(unit_facts.processes_of("nanofleet-a")) > 1


# -- what is installed ---------------------------------------------------------------------------------------


def test_an_environment_is_read_by_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's Python has torch and the trainer, as that of a run has."""
    installed = call(installed_environment, monkeypatch, check=True, python=sys.executable)["installed"]
    assert installed["environment"] == Path(sys.prefix).resolve().name
    assert installed["python"] == platform.python_version()
    assert installed["trainer"] == code_digest()
    assert installed["torch"] == torch.__version__
    assert call(installed_environment, monkeypatch, python="/nowhere/python")["installed"] == {}
    known = {"installed": {"torch": "1"}, "cores": 2}
    assert call(installed_environment, monkeypatch, python="/nowhere/python", known=known)["cores"] == 2


def test_an_environment_without_torch_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'The environment /v is not complete: no torch. Fix: x' >&2\nexit 1\n")
    python.chmod(0o755)
    result = call(installed_environment, monkeypatch, python=str(python))
    assert result["failed"]
    assert "is not complete" in result["msg"]
