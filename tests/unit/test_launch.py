"""The launch role without hosts: modules against fake systemd tools, filters against made-up states."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
from role_files import load

from trainer.config import RunConfig, code_digest

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "launch"


unit_facts = load(ROLE / "module_utils" / "nanofleet_unit.py", "ansible.module_utils.nanofleet_unit")
log = load(ROLE / "module_utils" / "nanofleet_log.py", "ansible.module_utils.nanofleet_log")
run_dir_facts = load(ROLE / "module_utils" / "nanofleet_run.py", "ansible.module_utils.nanofleet_run")
transient_unit = load(ROLE / "library" / "transient_unit.py")
run_state = load(ROLE / "library" / "run_state.py")
launch = load(ROLE / "filter_plugins" / "launch.py")
installed = load(ROLE / "filter_plugins" / "launch_installed.py")
report = load(ROLE / "filter_plugins" / "launch_report.py")
status = load(ROLE / "filter_plugins" / "launch_status.py")


class LeftError(Exception):
    """What a module returned."""


def call(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, check: bool = False, **params: Any
) -> dict[str, Any]:
    """Run an Ansible module in this process; the result has `failed` set when it failed."""

    def leave(failed: bool) -> Any:
        def end(_self: Any, **result: Any) -> None:
            raise LeftError({"failed": failed, **result})

        return end

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave(False))
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", leave(True))
    with patch_module_args({**params, "_ansible_check_mode": check}), pytest.raises(LeftError) as left:
        module.main()
    result: dict[str, Any] = left.value.args[0]
    return result


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


def test_a_listener_that_ends_while_it_is_looked_for_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run between two attempts lets go of its port: that is no stranger's."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(unit_facts, "_pids", lambda: [])
        monkeypatch.setattr(unit_facts.time, "sleep", lambda _seconds: server.close())
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
        monkeypatch.setattr(unit_facts, "_pids", lambda: [])
        monkeypatch.setattr(unit_facts, "run", lambda _argv: (0, line, ""))
        (held,) = unit_facts.listeners([port])
    assert held == {
        "port": port, "pid": None, "user": "root", "command": "", "unit": "nanofleet-a.service"
    }  # fmt: skip


def test_a_listener_in_a_process_that_nobody_shows_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(unit_facts, "_pids", lambda: [])
        monkeypatch.setattr(unit_facts, "run", lambda _argv: (1, "", "ss: not found"))
        monkeypatch.setattr(unit_facts.time, "sleep", lambda _seconds: None)
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
    assert not any(log.tells_error(line) for line in stack)


def test_torchruns_own_traceback_is_left_out() -> None:
    lines = ["[rank 0] step 6/9", "E1121 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7)"]
    follow = ["Traceback (most recent call last):", '  File "run.py"', "ChildFailedError: trainer FAILED"]
    assert log.first_error([*lines, *follow], 20) == lines[1:]


def test_torchruns_word_for_a_rank_that_a_signal_ended_is_put_in_words() -> None:
    line = "E1121 16:55:44.1 7 api.py:1002] failed (exitcode: {}) local_rank: 0 (pid: 7) of binary: python"
    assert log.in_words(line.format(-9)) == log.KILLED == report.KILLED
    assert log.in_words(line.format(-11)) == "Ended by SIGSEGV"
    for kept in (line.format(-99), line.format(1), "ValueError: no rows"):
        assert log.in_words(kept) == kept


def test_a_rank_that_was_just_killed_is_told_in_the_words_of_its_attempts(
    systemd: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (systemd / "state").write_text("failed")
    (run_dir / "heartbeat-0.json").write_text(json.dumps({**beat(), "time": time.time()}))
    (run_dir / "train.log").write_text(
        "=== nanofleet-a started\nE1121 16:55:44 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7)\n"
    )
    dead = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    said = status.launch_status({"tower": dead}, "a")
    assert f"tower: {log.KILLED} in forward after step 3." in said.splitlines()
    assert "exitcode" not in said
    settled = "Killed without a word (SIGKILL, or the kernel for want of memory) in forward after step 3."
    (run_dir / "outcome.json").write_text(json.dumps({"outcome": "retryable", "reason": settled}))
    dead = call(run_state, monkeypatch, state_dir=str(systemd), run_id="a")
    assert status.launch_status({"tower": dead}, "a").count("Killed") == 1


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
    up_since = unit_facts.booted(time.time())
    assert up_since is not None
    assert 0 < up_since < time.time()


# -- what train.yml decides ------------------------------------------------------------------------------

HOSTS = ["tower", "laptop"]


def state(**changes: Any) -> dict[str, Any]:
    unit = {"name": "nanofleet-a.service", "active_state": "inactive", "result": "success"}
    return {
        **run_state.NOTHING, "found": False, "run_id": "a", "run_dir": "/runs/a", "ended": True, "unit": unit,
        "time": 100.0, "runs": [], "active_units": [], "listeners": [], **changes,
    }  # fmt: skip


def stored(**knobs: Any) -> dict[str, Any]:
    config = RunConfig.from_strings({"depth": 2, "num_iterations": 20, **knobs}).to_dict()
    return {"found": True, "run_file": {"run_id": "a", "config": config, "hosts": HOSTS}}


def beat(**changes: Any) -> dict[str, Any]:
    return {"rank": 0, "phase": "forward", "step": 3, "num_iterations": 20, "loss": 5.0, "tok_per_s": 1234.6,
            "step_seconds": 1.5, "eta_seconds": 154.0, "age": 1.0, **changes}  # fmt: skip


def plan(given: dict[str, Any], *states: dict[str, Any], run_id: str = "a") -> dict[str, Any]:
    result: dict[str, Any] = launch.launch_plan(given, run_id, list(states) or [state(), state()], HOSTS, "m")
    return result


def test_a_new_run_holds_every_field_with_its_type() -> None:
    made = plan({"depth": "4", "matrix_lr": "0.01"}, run_id="")
    assert made["action"] == "start"
    assert made["file"]["config"] == RunConfig(depth=4, matrix_lr=0.01).to_dict()
    assert made["run_id"] == RunConfig(depth=4, matrix_lr=0.01).default_run_id()
    assert (made["file"]["hosts"], made["file"]["manifest_sha256"]) == (HOSTS, "m")
    assert made["file"]["trainer_digest"] == code_digest()


@pytest.mark.parametrize(
    ("given", "run_id", "said"),
    [
        ({"depth": "deep"}, "a", "deep"),
        ({}, "tracker", "taken"),
        ({}, "../x", "run_id"),
        ({"dept": 1}, "a", "depth"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(given: dict[str, Any], run_id: str, said: str) -> None:
    made = plan(given, run_id=run_id)
    assert made["action"] == "refuse"
    assert said in made["message"]


def test_an_active_run_is_left_alone() -> None:
    up = state(**stored(), active_units=["nanofleet-a.service"], heartbeats=[beat()], ended=False)
    made = plan({}, up, up)
    assert made["action"] == "none"
    for part in ("active at step 3 of 20 on tower, laptop", "status.yml", "stop.yml -e run_id=a"):
        assert part in made["message"]
    assert made["ends"] == {}
    ending = plan(
        {}, {**up, "stepped": True}, state(**stored(), outcome={"outcome": "finished", "settled": True})
    )
    assert ending["action"] == "none", "laptop is only a little ahead"
    shut_down = {"outcome": "stopped", "settled": False, "reason": "Asked to end by SIGTERM after step 3."}
    assert plan({}, {**up, "stepped": True}, state(**stored(), outcome=shut_down))["action"] == "resume"


UNIT = "nanofleet-a.service"


def up_on(hosts: list[str], **changes: Any) -> dict[str, Any]:
    run_file = {**stored()["run_file"], "hosts": hosts}
    return state(found=True, run_file=run_file, active_units=[UNIT], ended=False, **changes)


def test_a_run_that_lacks_a_host_is_taken_over() -> None:
    """A reboot took laptop's unit: tower's waits for it until its attempts are used up."""
    waiting = up_on(
        HOSTS, between=True, checkpoint="checkpoints/step_000003", outcome={"outcome": "retryable"}
    )
    made = plan({}, waiting, state(**stored()))
    assert (made["action"], made["ends"]) == ("resume", {"tower": [UNIT]})
    assert "waits on tower for laptop, where its unit is gone" in made["message"]


def test_a_run_goes_on_with_other_hosts_once_it_does_not_train() -> None:
    stuck = up_on(["tower", "attic"], between=True, checkpoint="checkpoints/step_000003")
    made = plan({}, stuck, state())
    assert (made["action"], made["ends"], made["file"]["hosts"]) == ("resume", {"tower": [UNIT]}, HOSTS)
    training = up_on(["tower", "attic"], stepped=True, heartbeats=[beat()])
    left = plan({}, training, state())
    assert left["action"] == "none"
    assert "The inventory now lists tower, laptop" in left["message"]
    blamed = up_on(["tower", "attic"], stepped=True, heartbeats=[beat(blame="attic does not answer")])
    assert plan({}, blamed, state())["action"] == "resume"


def test_a_unit_of_a_run_that_was_stopped_while_its_host_was_away_is_ended() -> None:
    tower = state(runs=[{"run_id": "b", "active": False, "outcome": "stopped", "settled": True}])
    laptop = state(active_units=["nanofleet-b.service"], runs=[{"run_id": "b", "active": True}])
    made = plan({}, tower, laptop)
    assert (made["action"], made["ends"]) == ("start", {"laptop": ["nanofleet-b.service"]})
    assert "nanofleet-b.service on laptop is of a run that has ended elsewhere" in made["message"]
    tower["runs"][0] |= {"outcome": "retryable", "settled": False}
    assert plan({}, tower, laptop)["action"] == "refuse", "that run may come back"


def test_another_run_is_refused_by_name() -> None:
    made = plan({}, state(), state(active_units=["nanofleet-b.service"]))
    assert made["action"] == "refuse"
    assert "laptop is busy with another run, b (unit nanofleet-b.service)" in made["message"]
    assert "stop.yml -e run_id=b" in made["message"]


def test_a_held_port_is_refused_with_pid_and_owner() -> None:
    held = {"port": 29500, "pid": 7, "user": "ann", "command": "nc -l", "unit": ""}
    made = plan({}, state(listeners=[held]), state())
    assert made["action"] == "refuse"
    assert "Port 29500 on tower is held by process 7 of ann (nc -l)" in made["message"]
    assert plan({}, state(), state(listeners=[held]))["action"] == "start", (
        "only the coordinator serves the port"
    )


def test_an_unfinished_run_resumes_with_its_own_knobs() -> None:
    made = plan(
        {}, state(**stored(), outcome={"outcome": "stopped"}, checkpoint="checkpoints/step_000003"), state()
    )
    assert made["action"] == "resume"
    assert (made["file"]["config"]["depth"], made["file"]["config"]["num_iterations"]) == (2, 20)


def test_shares_are_those_asked_for_or_of_the_same_hosts_before() -> None:
    def shares(asked: str, before: object, hosts: list[str] = HOSTS) -> object:
        run = stored()
        run["run_file"] |= {"shares": before, "hosts": hosts}
        return launch.launch_plan({}, "a", [state(**run), state()], HOSTS, "", asked)["file"]["shares"]

    assert launch.launch_plan({}, "a", [state(), state()], HOSTS, "", "auto")["file"]["shares"] == "auto"
    assert shares("", [3, 1]) == [3, 1]
    assert shares("", [3, 1], ["elsewhere", *HOSTS[1:]]) == []
    assert shares("", "auto", ["elsewhere", *HOSTS[1:]]) == "auto"
    assert shares("equal", "auto") == []
    wrong = launch.launch_plan({}, "a", [state(), state()], HOSTS, "", "3")
    assert wrong["action"] == "refuse"
    assert "shares is 3: it must be 2 number(s), one for each rank on" in wrong["message"]
    four = launch.launch_plan({}, "a", [state(), state()], HOSTS, "", "2,2,1,1", 2)
    assert four["file"]["shares"] == [2, 2, 1, 1]
    refused = launch.launch_plan({}, "a", [state(), state()], HOSTS, "", "0,4")
    assert (refused["action"], refused["message"][:13]) == ("refuse", "shares is 0,4")


def test_a_finished_run_says_so_and_another_config_is_shown() -> None:
    done = state(**stored(), outcome={"outcome": "finished", "step": 20, "num_iterations": 20, "loss": 4.25})
    assert plan({}, done, state())["action"] == "none"
    assert "step 20 of 20, loss 4.2500" in plan({}, done, state())["message"]
    other = plan({"num_iterations": "30", "depth": "2"}, done, state())
    assert other["action"] == "refuse"
    assert "num_iterations is 20 there and 30 here" in other["message"]
    assert "depth is" not in other["message"]


def test_a_run_does_not_begin_anew_on_another_coordinator() -> None:
    made = plan({}, state(**stored()), state(**stored(), checkpoint="checkpoints/step_000003"))
    assert made["action"] == "refuse"
    assert "checkpoints on laptop" in made["message"]


def test_a_build_of_torch_is_no_skew_and_an_environment_is_compared_within_its_kind() -> None:
    common = {"python": "3.11.2", "machine": "x86_64", "trainer": "d"}
    cpu = {**common, "torch": "2.13.0+cpu", "environment": "a"}
    cuda = {**common, "torch": "2.13.0+cu130", "environment": "b"}
    assert installed.launch_skew({"tower": cpu, "box": cuda}, "d") == ""
    said = installed.launch_skew({"tower": cpu, "laptop": {**cpu, "environment": "c"}, "box": cuda}, "d")
    assert "environment is a on tower; c on laptop" in said
    assert "2.12.1" in installed.launch_skew({"tower": cpu, "box": {**cuda, "torch": "2.12.1+cu130"}}, "d")


def test_skew_names_the_odd_host() -> None:
    equal = {"python": "3.11.2", "torch": "2.13.0+cpu", "trainer": "d"}
    assert installed.launch_skew({"tower": equal, "laptop": equal}, "d") == ""
    said = installed.launch_skew({"tower": equal, "laptop": {**equal, "torch": "2.12.0"}}, "d")
    assert "torch is 2.13.0 on tower; 2.12.0 on laptop" in said
    assert "setup.yml" in said
    assert "another trainer" in installed.launch_skew({"tower": equal, "laptop": equal}, "e")


# -- what is shown ---------------------------------------------------------------------------------------


def test_status_of_a_live_run_with_a_lost_host() -> None:
    up = state(**stored(), ended=False, active_units=["nanofleet-a.service"], heartbeats=[beat()],
               unit={"active_state": "active"},
               checkpoint="checkpoints/step_000002", checkpoint_time=0.5)  # fmt: skip
    said = status.launch_status(
        {"tower": up, "laptop": {"unreachable": True, "msg": "x"}}, "a", "http://tower:5000"
    )
    lines = said.splitlines()
    assert lines[0] == "Run a: step 3 of 20 (15 %)"
    assert len({len(line.rstrip()) for line in lines[2:5]}) == 1, "the columns are aligned"
    for part in ("3/20", "5.0000", "1,235", "unreachable", "laptop did not answer", "2m34s", "http://tower:5000",
                 "step 2, 1m40s ago: /runs/a/checkpoints/step_000002 on tower"):  # fmt: skip
        assert part in said


def test_status_shows_pace_blame_attempts_and_who_is_frozen() -> None:
    now = {
        "tok_per_s_average": 1200.4,
        "sync_share": 0.124,
        "temperature": 91.3,
        "throttled": True,
        "entered": 99.0,
    }
    blame = "rank 1 (laptop) has been in backward of step 4 for 94 s; rank 0 (tower) waits in sync"
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    ended = [{"outcome": "retryable", "step": 2, "time": 1.0, "reason": "Lost rank 1 (laptop)"}]
    tower = state(**up, heartbeats=[beat(**now, blame=blame)], past_attempts=ended)
    laptop = state(**up, heartbeats=[beat(**now, rank=1, age=34.0, blame=blame)])
    said = status.launch_status({"tower": tower, "laptop": laptop}, "a")
    for part in ("12 %", "91 °C throttled", f"Blame:       {blame}",
                 "Frozen:      rank 1 on laptop has not beaten for 34 s", "1 ended",
                 "retryable at step 2: Lost rank 1 (laptop)"):  # fmt: skip
        assert part in said
    assert said.count(blame) == 1
    assert "rank 0 on tower has not beaten" not in said
    assert "Time left" not in said
    laptop = state(**up, heartbeats=[beat(**now, rank=1)])
    assert "1,235 tok/s, 1,200 on average" in status.launch_status({"tower": tower, "laptop": laptop}, "a")


@pytest.mark.parametrize(
    "laptop",
    [
        {"between": True, "heartbeats": [beat(rank=1)]},
        {"heartbeats": [beat(rank=1, over=True)]},
        {"heartbeats": [beat(rank=1, before=True)]},
        {"heartbeats": []},
        {"ended": True, "heartbeats": [beat(rank=1)]},
    ],
    ids=["waits", "was killed", "joins", "starts", "is over"],
)
def test_no_time_is_left_to_a_run_that_does_not_train(laptop: dict[str, Any]) -> None:
    up = {**stored(), "ended": False, "heartbeats": [beat()]}
    tower = state(**up)
    assert "Time left" in status.launch_status({"tower": tower, "laptop": tower}, "a")
    said = status.launch_status({"tower": tower, "laptop": state(**{**up, **laptop})}, "a")
    assert "Time left" not in said
    assert "tok/s" not in said


@pytest.mark.parametrize(
    ("changes", "up"),
    [
        ({"over": True}, {}),
        ({"before": True}, {}),
        ({}, {"between": True}),
        ({}, {"ended": True}),
        ({"age": 40.0}, {}),
    ],
    ids=[
        "its rank has ended",
        "its rank joins anew",
        "its unit waits",
        "the run is over",
        "its rank is frozen",
    ],
)
def test_nobody_is_blamed_by_an_attempt_that_is_over(changes: dict[str, Any], up: dict[str, Any]) -> None:
    said = beat(blame="rank 1 (laptop) is frozen", warning="No room")
    tower = state(**{**stored(), "ended": False, **up}, heartbeats=[{**said, **changes}])
    shown = status.launch_status({"tower": tower, "laptop": {"unreachable": True}}, "a")
    assert "Blame" not in shown
    assert ("Warning" in shown) == ("age" in changes)
    living = state(**stored(), ended=False, heartbeats=[said])
    assert "Blame:       rank 1 (laptop) is frozen" in status.launch_status({"tower": living}, "a")


def test_the_cause_is_said_once_and_last() -> None:
    outcome = {"outcome": "final", "rank": 0, "reason": "The loss of step 2 is nan."}
    end = "[rank 0] final: The loss of step 2 is nan."
    dead = state(**stored(), outcome=outcome, error=[end])
    said = status.launch_status({"tower": dead, "laptop": dead}, "a").splitlines()
    assert said[-1] == "Outcome:     final: The loss of step 2 is nan."
    assert not any("train.log says" in line for line in said), "it has nothing else to say"
    traced = {**dead, "error": ["Traceback", "ValueError: x"]}
    said = status.launch_status({"tower": traced, "laptop": dead}, "a").splitlines()
    assert said[-3:] == ["  ValueError: x", "", "Outcome:     final: The loss of step 2 is nan."]


def test_status_of_a_unit_between_two_attempts() -> None:
    waits = {"active_state": "activating", "sub_state": "auto-restart"}
    waiting = state(
        **stored(), ended=False, between=True, unit=waits, heartbeats=[beat(age=40.0, entered=1.0)]
    )
    said = status.launch_status({"tower": waiting}, "a")
    assert "restarting     0  ended, restarting" in said
    assert "Frozen" not in said, "it is dead, and known to be"


def test_status_of_a_rank_that_has_given_up_a_frozen_one() -> None:
    """Rank 0 has ended, its torchrun not yet; rank 1 stands still in the attempt before."""
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    lost = {"outcome": "retryable", "rank": 0, "reason": "Lost rank 1 (laptop)"}
    silent = {"age": 40.0, "entered": 1.0}
    tower = state(**up, heartbeats=[beat(**silent, over=True)], outcome=lost)
    laptop = state(**up, heartbeats=[beat(**silent, rank=1)])
    said = status.launch_status({"tower": tower, "laptop": laptop}, "a")
    assert "tower   active     0  ended, restarting" in said
    assert "Frozen:      rank 1 on laptop" in said
    assert "rank 0 on tower has not beaten" not in said
    stopped = {**tower, "outcome": {"outcome": "stopped", "rank": 0}}
    assert "ended, restarting" not in status.launch_status({"tower": stopped}, "a")


def test_status_says_what_a_host_is_at_before_its_first_heartbeat() -> None:
    up = {**stored(), "ended": False, "time": 190.0,
          "unit": {"active_state": "active", "sub_state": "running", "since": 100.0}}  # fmt: skip
    joins, imports = state(**up), state(**up, began=145.0, heartbeats=[beat(before=True, entered=1.0)])
    lines = status.launch_status({"tower": joins, "laptop": imports}, "a").splitlines()
    at, later = (time.strftime("%H:%M:%S", time.localtime(moment)) for moment in (100, 145))
    assert f"Starting:    tower: torchrun loads and joins the other hosts, since {at} (1m30s)" in lines
    assert f"Starting:    laptop: its ranks are importing torch, since {later} (45 s)" in lines
    assert any(line.startswith("tower   active     -  joining  ") for line in lines)
    assert any(line.startswith("laptop  active     0  importing torch  ") for line in lines)
    old = state(**up, began=50.0)  # it was killed, and the next one has not got so far yet
    assert "joining" in status.launch_status({"tower": old}, "a")
    for there in ({"heartbeats": [beat(phase="load")]}, {"ended": True}, {"between": True}):
        assert "Starting" not in status.launch_status({"tower": state(**{**up, **there})}, "a")


def frozen(process: str, **changes: Any) -> str:
    """The line on rank 1, whose process does as the kernel says."""
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    others = changes.pop("others", {})
    still = beat(rank=1, age=34.0, entered=1.0, process=process, **{"world_size": 2, **changes})
    states = {"tower": state(**up, heartbeats=[beat(**others)]), "laptop": state(**up, heartbeats=[still])}
    states["laptop"]["unit"]["scope"] = changes.get("scope", "system")
    said: str = status.launch_status(states, "a")
    (line,) = [line for line in said.splitlines() if line.startswith("Frozen")]
    return line.partition("rank 1 on laptop has not beaten for 34 s")[2]


def test_what_mends_a_frozen_rank_is_said_or_that_it_mends_itself() -> None:
    go_on = "on laptop: sudo systemctl kill -s CONT nanofleet-a"
    assert frozen("stopped") == f": it is stopped (SIGSTOP). Let it go on, {go_on}"
    assert "laptop: systemctl --user kill -s CONT nanofleet-a" in frozen("stopped", scope="user")
    assert "a debugger on laptop holds it" in frozen("tracing stop")
    waits = frozen("disk sleep", stall_seconds=30.0)
    assert "Nothing to type: the others give it up in about 26 s and start again; it ends and" in waits
    assert "about 2m26s and" in frozen("disk sleep", step_seconds=24.0)
    assert "any moment now" in frozen("disk sleep", stall_seconds=10.0)
    assert "the others have given it up;" in frozen("disk sleep", others={"over": True})
    assert "goes on by itself" in frozen("disk sleep", world_size=1)
    assert f"If it was stopped (SIGSTOP), {go_on}. Else the others give it up" in frozen("")


def test_a_stopped_process_is_told_from_a_sleeping_one() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeper:
        assert unit_facts.process_state(sleeper.pid) in ("sleeping", "running")
        assert not unit_facts.is_missing(sleeper.pid)
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        assert unit_facts.process_state(sleeper.pid) == "stopped"
        sleeper.kill()
    assert unit_facts.process_state(sleeper.pid) == ""
    assert unit_facts.is_missing(sleeper.pid)


def test_status_names_a_rebooted_host_and_what_puts_it_back() -> None:
    waits = {"active_state": "activating", "sub_state": "auto-restart"}
    tower = state(**stored(), ended=False, between=True, unit=waits, outcome={"outcome": "retryable"})
    laptop = state(**stored(), rebooted=1000.0)
    said = status.launch_status({"tower": tower, "laptop": laptop}, "a")
    assert "laptop  rebooted" in said
    assert "Rebooted:    laptop at " in said
    assert "Put it back: ansible-playbook train.yml -e run_id=a" in said
    tower["outcome"] = {"outcome": "stopped", "settled": True}
    assert "Put it back" not in status.launch_status({"tower": tower, "laptop": laptop}, "a")


def test_what_a_log_says_does_not_spoil_the_screen() -> None:
    noisy = state(**stored(), failed_unit=True, error=["\ta  ", "GLHF \U0001f3d6\ufe0f", "\x1b[31mFüße"])
    said = status.launch_status({"tower": noisy}, "a")
    assert said.splitlines()[-3:] == ["          a"[-9:], "  GLHF", "  [31mFüße"]


def test_status_when_nothing_ever_ran() -> None:
    assert "Nothing ever ran" in status.launch_status({"tower": state(run_id="")})
    assert "No run b here. Known runs: a" in status.launch_status(
        {"tower": state(runs=[{"run_id": "a", "time": 1}])}, "b"
    )


def test_who_asks_for_a_run_that_is_not_there_hears_the_nearest_and_ends_none() -> None:
    runs = [{"run_id": "c", "time": 2, "active": True}, {"run_id": "evening", "time": 1, "active": False}]
    there = {"tower": state(runs=runs, active_units=["nanofleet-c.service"])}
    assert status.launch_status(there, "cc") == (
        "No run cc here. Did you mean c? Known runs: c (active), evening."
    )
    assert "Did you mean evening?" in status.launch_status(there, "evning")
    assert "Did you mean" not in status.launch_status(there, "xyz")


def test_the_run_shown_is_the_active_one_else_the_newest() -> None:
    old = state(**stored(), runs=[{"run_id": "a", "time": 1}])
    new = state(**stored(), runs=[{"run_id": "b", "time": 2}]) | {"run_id": "b"}
    assert report.launch_run_shown({"tower": old, "laptop": new}) == "b"
    assert (
        report.launch_run_shown({"tower": old | {"active_units": ["nanofleet-a.service"]}, "laptop": new})
        == "a"
    )
    assert report.launch_run_shown({"tower": old, "laptop": new}, "c") == "c"


def test_status_shows_what_a_rank_warns_of() -> None:
    short = "No room for the checkpoint of step 30: it takes 1.400 GB."
    beats = [beat(warning=short)]
    up = {"tower": state(**stored(), ended=False, heartbeats=beats), "laptop": state(**stored(), ended=False)}
    assert f"Warning:     {short}" in status.launch_status(up, "a")
    over = {"tower": state(**stored(), heartbeats=beats)}
    assert short not in status.launch_status(over, "a")


def test_a_host_that_its_peers_do_not_reach_and_we_do_points_at_the_way_between() -> None:
    blame = (
        "Rank 1 (laptop) cannot be reached (its host does not answer at 10.0.0.2: down, asleep or cut off)"
    )
    up = {"tower": state(**stored(), ended=False, heartbeats=[beat(blame=blame)])}
    here = {**up, "laptop": state(**stored(), ended=False, heartbeats=[beat(rank=1)])}
    line = "Between:     laptop has answered here, and not its peers"
    assert line in status.launch_status(here, "a")
    assert "Between:" not in status.launch_status({**up, "laptop": {"unreachable": True}}, "a")
    lost = {
        "outcome": "retryable",
        "reason": "Lost rank 1 (laptop): it cannot be reached (its host does not)",
    }
    again = {name: state(**stored(), outcome=lost, ended=False) for name in ("tower", "laptop")}
    assert line in status.launch_status(again, "a")
    over = {name: state(**stored(), outcome=lost) for name in ("tower", "laptop")}
    assert "Between:" not in status.launch_status(over, "a")


def test_a_phase_that_lasts_shows_for_how_long_and_no_pace() -> None:
    for seconds, step_seconds, lasts in ((25.0, 1.5, True), (8.0, 1.5, False), (25.0, 9.0, False)):
        beats = [beat(phase="sync", entered=100.0, time=99.0 + seconds, step_seconds=step_seconds)]
        said = status.launch_status({"tower": state(**stored(), ended=False, heartbeats=beats)}, "a")
        assert ("sync for 25 s" in said) is lasts, said
        assert ("Speed:" in said) is not lasts, said
    left = beat(phase="sync", entered=100.0, time=124.0, age=9000.0)
    assert "sync for" not in status.launch_status({"tower": state(**stored(), heartbeats=[left])}, "a")


def test_a_failed_start_names_the_host_and_shows_its_error() -> None:
    dead = state(**stored(), failed_unit=True, error=["ValueError: no rows"])
    slow = state(**stored(), ended=False, heartbeats=[beat(phase="load", loss=None)])
    said = report.launch_failure({"tower": slow, "laptop": dead}, "a")
    for part in (
        "ended on laptop",
        "no step was made on tower (in phase load)",
        "ValueError: no rows",
        "train.yml -e run_id=a",
    ):
        assert part in said


def test_a_start_at_which_the_ranks_did_not_meet_says_how_to_find_out_why() -> None:
    unmet = state(**stored(), failed_unit=True, error=["torch.distributed.DistStoreError: Timed out"])
    other = state(**stored(), failed_unit=True, error=["ValueError: no rows"])
    assert "Why the hosts do not meet: ansible-playbook doctor.yml" in report.launch_failure(
        {"a": unmet}, "r"
    )
    assert "doctor.yml" not in report.launch_failure({"a": other}, "r")
    assert report.launch_unmet({"a": other, "b": unmet})
    assert not report.launch_unmet({"a": other, "b": {"unreachable": True}})


def test_a_start_that_somebody_stops_says_so() -> None:
    ended = state(**stored(), stop_requested=True)
    said = report.launch_failure({"tower": ended, "laptop": ended}, "a")
    assert said.startswith("The run a did not start: stop.yml has asked it to end; its unit ended on tower,")


def test_what_a_stop_takes_is_said_before() -> None:
    up = state(
        **stored(), ended=False, stepped=True, heartbeats=[beat()], checkpoint="checkpoints/step_000002"
    )
    said = report.launch_stop_expected({"tower": up, "laptop": up}, "a")
    assert "is at step 3 of 20 and ends after one more step (1.5 s) and one save" in said
    lost = report.launch_stop_expected({"tower": up, "laptop": {"unreachable": True}}, "a")
    assert (
        "Without laptop, which did not answer, that may fail: then the last checkpoint is that of step 2"
        in lost
    )
    for waiting in ({**up, "between": True}, {**up, "stepped": False}):
        assert "nothing to save" in report.launch_stop_expected({"tower": waiting, "laptop": up}, "a")


def test_expected_time_is_measured_where_a_like_run_exists() -> None:
    made = plan({"depth": 2, "num_iterations": 100})
    assert "rough" in report.launch_expected(made, [state()], [1, 1])
    like = {"run_id": "old", "tok_per_s": 4096.0, "hosts": HOSTS, "config": made["file"]["config"]}
    assert "1.0 s a step, 1m40s for 100 steps (measured in old)" in report.launch_expected(
        made, [state(runs=[like])], [1]
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (1.75, "1.8 s"), (45, "45 s"), (154, "2m34s"), (11100, "3h05m"), (187200, "2d04h")],
)
def test_durations_in_words(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text


# -- the wiring ------------------------------------------------------------------------------------------


def test_the_knobs_of_the_playbooks_are_the_fields_of_a_run() -> None:
    wiring = yaml.safe_load((ROOT / "playbooks" / "group_vars" / "all.yml").read_text())
    assert wiring["run_knobs"] == list(RunConfig.field_names())


def test_the_log_script_keeps_the_status_and_both_copies(tmp_path: Path) -> None:
    script = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())["__launch_log_script"]
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", script, "unit", "/bin/sh", "-c", "echo 'a b'; exit 3"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "a b"
    assert done.stdout.startswith("=== unit started 20")
    assert (tmp_path / "train.log").read_text() == done.stdout


def test_a_resumed_run_is_newer_than_one_made_after_it(tmp_path):
    for moment, run_id in enumerate(("older", "newer"), 1):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "run.json").write_text("{}")
        os.utime(tmp_path / run_id / "run.json", (moment, moment))
    assert [run["run_id"] for run in run_state.known_runs(str(tmp_path), [])] == ["newer", "older"]
    (tmp_path / "older" / "heartbeat-0.json").write_text("{}")  # it goes on, now
    assert [run["run_id"] for run in run_state.known_runs(str(tmp_path), [])] == ["older", "newer"]
