"""The launch role's modules: transient_unit over fake systemd tools, run_state over made-up run folders."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils import log_lines as log
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_dir as run_dir_facts
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_report as report
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_status as status
from ansible_collections.nanofleet.fleet.plugins.module_utils import systemd_unit as unit_facts
from ansible_collections.nanofleet.fleet.plugins.modules import (
    installed_environment,
    run_state,
    transient_unit,
)
from role_files import call
from run_states import beat

from trainer.config import code_digest

# -- transient_unit, over fake systemctl and systemd-run -------------------------------------------------


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake tools on PATH that keep one unit's state in a file and note every command line."""
    tools = tmp_path / "bin"
    tools.mkdir()
    state, calls = tmp_path / "state", tmp_path / "calls"
    state.write_text("inactive")
    calls.touch()
    note = f'printf "%s\\n" "$(basename "$0") $*" >> {calls}\n'
    (tools / "systemctl").write_text(
        "#!/bin/sh\n"
        + note
        + f"""
[ "$1" = --user ] && shift
case "$1" in
  show) s=$(cat {state}); echo "ActiveState=$s"; echo LoadState=loaded; echo SubState=x; echo Result=exit-code
        echo MainPID=41; echo ExecMainStatus=1; echo NRestarts=0
        echo StateChangeTimestampMonotonic=1000000 ;;
  stop) [ -e {tmp_path}/stubborn ] || echo inactive > {state} ;;
  reset-failed) echo inactive > {state} ;;
  list-units) echo "nanofleet-a.service loaded $(cat {state}) x run"
              echo "nanofleet-tracker.service loaded active x t" ;;
esac
"""
    )
    (tools / "systemd-run").write_text(
        "#!/bin/sh\n"
        + note
        + f"[ -e {tmp_path}/refuse ] && {{ echo 'Bad thing' >&2; exit 1; }}\necho active > {state}\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        boot_entry, "_folders", lambda _scope: (str(tmp_path / "etc"), str(tmp_path / "units"))
    )
    # A lab on this machine may have a unit of that name, whose processes are this machine's.
    monkeypatch.setattr(transient_unit, "processes_of", lambda _name, _scope: [])
    return tmp_path


def called(systemd: Path, tool: str) -> list[str]:
    return [line for line in (systemd / "calls").read_text().splitlines() if line.startswith(tool)]


def test_a_unit_is_started_once(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, Any] = {
        "name": "nanofleet-a", "argv": ["/bin/echo", "$HOME 100%"], "user": "nanofleet",
        "properties": {"Nice": 5, "NoNewPrivileges": True, "SystemCallFilter": ["a", "b"]},
        "setenv": {"X": "1"},
    }  # fmt: skip
    first = call(transient_unit, monkeypatch, **wanted)
    assert first["changed"]
    assert first["unit"]["active_state"] == "active"
    assert first["unit"]["main_pid"] == 41
    (line,) = called(systemd, "systemd-run ")
    for part in ("--unit nanofleet-a.service", "Nice=5", "NoNewPrivileges=yes", "Filter=a", "Filter=b",
                 "User=nanofleet", "--setenv=X=1", "-- /bin/echo $$HOME 100%"):  # fmt: skip
        assert part in line
    second = call(transient_unit, monkeypatch, **wanted)
    assert not second["changed"]
    assert second["unit"]["active_state"] == "active"
    assert len(called(systemd, "systemd-run ")) == 1


def test_a_run_returns_after_a_boot_until_it_is_stopped(
    systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[str, Any] = {
        "name": "nanofleet-a", "argv": ["/bin/echo", "it's $HOME"], "user": "nanofleet",
        "boot_condition": ["/venv/python", "-m", "trainer", "again"],
    }  # fmt: skip
    (systemd / "units").mkdir()
    started = call(transient_unit, monkeypatch, **wanted)
    script, template = systemd / "etc" / "a.sh", systemd / "units" / "nanofleet@.service"
    assert script.stat().st_mode & 0o777 == 0o700, "root executes it"
    assert f"ExecStart=/bin/sh {systemd}/etc/%i.sh" in template.read_text()
    assert called(systemd, "systemctl enable") == ["systemctl enable nanofleet@a.service"]
    assert 'runuser -u nanofleet -- /venv/python -m trainer again "$event"\n' in script.read_text()
    assert f"ExecStopPost=+-/bin/sh {script} end" in " ".join(started["command"])
    assert boot_entry.entries("system") == ["nanofleet-a.service"]

    # The script types the command that the module has typed, and removes itself once the run is over.
    tools = systemd / "bin"
    (tools / "runuser").write_text(
        f"#!/bin/sh\necho $* >> {systemd}/asked\nexit $(cat {systemd}/condition)\n"
    )
    (tools / "runuser").chmod(0o755)
    (systemd / "condition").write_text("0")
    (systemd / "calls").write_text("")
    subprocess.run(["/bin/sh", str(script)], check=True)
    (line,) = called(systemd, "systemd-run ")
    assert line == " ".join(["systemd-run", "--no-block", *started["command"][1:]])
    subprocess.run(["/bin/sh", str(script), "end"], check=True)
    assert len(called(systemd, "systemd-run ")) == 1, (
        "an end that is to be followed by a restart starts nothing"
    )
    asked = (systemd / "asked").read_text().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in asked] == ["boot", "end"]
    (systemd / "condition").write_text("75")
    assert subprocess.run(["/bin/sh", str(script)], check=False).returncode == 1
    assert script.exists(), "the condition could not be asked: it is, when the host boots again"
    (systemd / "condition").write_text("1")
    subprocess.run(["/bin/sh", str(script), "end"], check=True)
    assert called(systemd, "systemctl disable") == ["systemctl disable nanofleet@a.service"]
    assert not script.parent.exists()
    assert not template.exists()


def test_whoever_ends_a_run_removes_its_return(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "units").mkdir()
    for name in ("a", "b"):
        boot_entry.write(f"nanofleet-{name}.service", ["systemd-run"], ["true"], "", "system")
    state = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    assert state["at_boot"]
    assert state["known_units"] == ["nanofleet-a.service", "nanofleet-b.service"]
    absent = {"name": "nanofleet-a", "state": "absent"}
    assert call(transient_unit, monkeypatch, check=True, **absent)["changed"]
    assert call(transient_unit, monkeypatch, **absent)["changed"], "the unit itself is gone already"
    assert not call(transient_unit, monkeypatch, **absent)["changed"]
    assert not call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")["at_boot"]
    assert (systemd / "units" / "nanofleet@.service").exists(), "b returns"
    assert call(transient_unit, monkeypatch, name="nanofleet-b", state="absent")["changed"]
    assert not (systemd / "etc").exists()


def test_without_root_a_unit_is_the_users_own(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(transient_unit.getpass, "getuser", lambda: "anna")
    wanted: dict[str, Any] = {
        "name": "nanofleet-a", "argv": ["x"], "user": "anna",
        "properties": {"Nice": 5, "ProtectHome": True, "CapabilityBoundingSet": "", "NoNewPrivileges": True},
    }  # fmt: skip
    first = call(transient_unit, monkeypatch, **wanted)
    assert first["left_out"] == ["CapabilityBoundingSet", "ProtectHome"]
    assert first["unit"]["scope"] == "user"
    (line,) = called(systemd, "systemd-run ")
    assert line.startswith("systemd-run --user --quiet --unit nanofleet-a.service --property=Nice=5")
    assert not any(name in line for name in ("ProtectHome", "CapabilityBoundingSet", "User="))
    assert call(transient_unit, monkeypatch, name="nanofleet-a", state="absent")["changed"]
    assert called(systemd, "systemctl --user stop") == ["systemctl --user stop -- nanofleet-a.service"]
    assert not [line for line in called(systemd, "systemctl ") if "--user" not in line]


def test_without_root_nobody_else_can_be_the_units_user(
    systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(transient_unit.getpass, "getuser", lambda: "anna")
    result = call(transient_unit, monkeypatch, name="nanofleet-a", argv=["x"], user="nanofleet")
    assert result["failed"]
    assert "anna cannot start nanofleet-a.service as nanofleet" in result["msg"]
    assert not called(systemd, "systemd-run ")


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


def test_a_failed_leftover_is_cleared_before_a_start(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "state").write_text("failed")
    assert call(transient_unit, monkeypatch, name="nanofleet-a", argv=["x"])["changed"]
    assert called(systemd, "systemctl reset-failed") == ["systemctl reset-failed -- nanofleet-a.service"]


def test_check_mode_starts_nothing_and_shows_the_command(
    systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    would = call(transient_unit, monkeypatch, check=True, name="nanofleet-a", argv=["x"])
    assert would["changed"]
    assert would["diff"]["after"]["command"][-1] == "x"
    assert not called(systemd, "systemd-run ")


def test_a_start_that_systemd_refuses_is_told(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "refuse").touch()
    result = call(transient_unit, monkeypatch, name="nanofleet-a", argv=["x"])
    assert result["failed"]
    assert "Bad thing" in result["msg"]
    assert "systemctl status nanofleet-a.service" in result["msg"]


def test_stopping_is_idempotent_and_absent_forgets(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "state").write_text("active")
    assert call(transient_unit, monkeypatch, name="nanofleet-a", state="stopped")["changed"]
    assert not call(transient_unit, monkeypatch, name="nanofleet-a", state="stopped")["changed"]
    (systemd / "state").write_text("failed")
    assert not call(transient_unit, monkeypatch, name="nanofleet-a", state="stopped")["changed"]
    assert call(transient_unit, monkeypatch, name="nanofleet-a", state="absent")["changed"]
    assert not call(transient_unit, monkeypatch, name="nanofleet-a", state="absent")["changed"]


def test_what_does_not_heed_a_stop_is_killed_after_a_grace(
    systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemd / "state").write_text("active")

    def processes(_name: str, _scope: str) -> list[int]:
        return [] if called(systemd, "systemctl kill") else [os.getpid()]

    monkeypatch.setattr(transient_unit, "processes_of", processes)
    result = call(transient_unit, monkeypatch, name="nanofleet-a", state="absent", grace=0)
    assert not result["failed"]
    verbs = [line.split()[1:3] for line in called(systemd, "systemctl ") if " show " not in line]
    assert verbs == [["stop", "--no-block"], ["kill", "--signal=KILL"], ["stop", "--"]]


def test_what_outlives_a_stop_is_named(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "state").write_text("active")
    monkeypatch.setattr(transient_unit, "processes_of", lambda _name, _scope: [os.getpid()])
    result = call(transient_unit, monkeypatch, name="nanofleet-a", state="stopped", timeout=0)
    assert result["failed"]
    assert f"process {os.getpid()}" in result["msg"]


def test_a_listener_is_named_with_its_process() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        (held,) = unit_facts.listeners([port])
        assert (held["port"], held["pid"]) == (port, os.getpid())
    assert unit_facts.listeners([port]) == []


def test_a_listener_that_ends_during_the_search_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a run between two attempts close the port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(unit_facts, "run", lambda _argv: (server.close(), "", ""))
        assert unit_facts.listeners([port]) == []


def test_a_listener_is_known_by_its_control_group_where_its_process_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root in a container sees the processes of others."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port, inode = server.getsockname()[1], os.fstat(server.fileno()).st_ino
        line = (
            f"LISTEN 0 128 127.0.0.1:{port} 0.0.0.0:* uid:0 ino:{inode} sk:1 "
            "cgroup:/pod/system.slice/nanofleet-a.service <->\n"
        )
        monkeypatch.setattr(unit_facts, "run", lambda _argv: (0, line, ""))
        (held,) = unit_facts.listeners([port])
    assert held == {
        "port": port, "pid": None, "user": "root", "command": "", "unit": "nanofleet-a.service"
    }  # fmt: skip


def test_a_listener_in_a_process_that_nobody_shows_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(unit_facts, "run", lambda _argv: (1, "", "ss: not found"))
        (held,) = unit_facts.listeners([server.getsockname()[1]])
    assert held["pid"] is None


# -- run_state -------------------------------------------------------------------------------------------


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


def test_a_rank_that_was_just_killed_is_told_in_the_words_of_its_attempts(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemd / "state").write_text("failed")
    (run_dir / "heartbeat-0.json").write_text(json.dumps({**beat(), "time": time.time()}))
    (run_dir / "train.log").write_text(
        "=== nanofleet-a started\nE1121 16:55:44 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7)\n"
    )
    dead = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    said = status.status_screen({"tower": dead}, "a")
    assert f"tower: {log.KILLED} in forward after step 3." in said.splitlines()
    assert "exitcode" not in said
    settled = "Killed by SIGKILL: by hand, or by the kernel because memory ran out, in forward after step 3."
    (run_dir / "outcome.json").write_text(json.dumps({"outcome": "retryable", "reason": settled}))
    dead = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    assert status.status_screen({"tower": dead}, "a").count("Killed") == 1


def test_a_rank_that_has_ended_is_told_from_one_that_lives(
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
    """Its unit went with it: be it that the ranks were killed, or told to end as it shut down."""
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


def test_when_a_host_came_up_is_told_by_its_first_process() -> None:
    elapsed = subprocess.run(["ps", "-o", "etimes=", "-p", "1"], capture_output=True, text=True, check=True)
    up_since = unit_facts.booted(time.time())
    assert up_since == pytest.approx(time.time() - int(elapsed.stdout), abs=3)


def test_a_resumed_run_is_newer_than_one_made_after_it(tmp_path):
    for moment, run_id in enumerate(("older", "newer"), 1):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "run.json").write_text("{}")
        os.utime(tmp_path / run_id / "run.json", (moment, moment))
    assert [run["run_id"] for run in run_state.known_runs(str(tmp_path), [])] == ["newer", "older"]
    (tmp_path / "older" / "heartbeat-0.json").write_text("{}")  # it goes on, now
    assert [run["run_id"] for run in run_state.known_runs(str(tmp_path), [])] == ["older", "newer"]


# -- what is installed ---------------------------------------------------------------------------------------


def test_an_environment_is_read_by_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's Python has torch and the trainer, as that of a run has."""
    installed = call(installed_environment, monkeypatch, check=True)["installed"]
    assert installed["environment"] == Path(sys.prefix).resolve().name
    assert installed["python"] == platform.python_version()
    assert installed["trainer"] == code_digest()
    assert installed["torch"] == torch.__version__


def test_an_environment_without_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    result = call(installed_environment, monkeypatch)
    assert result["failed"]
    assert "is not complete" in result["msg"]
