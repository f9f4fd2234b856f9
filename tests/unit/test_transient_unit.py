"""The module transient_unit, over fake systemctl and systemd-run, and who listens at a port."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry, unit_end, unit_start
from ansible_collections.nanofleet.fleet.plugins.module_utils import systemd_unit as unit_facts
from ansible_collections.nanofleet.fleet.plugins.modules import (
    allow_addresses,
    run_state,
    transient_unit,
)
from fake_systemd import called
from role_files import call


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
        "properties": {"ExecStartPost": '+-/bin/sh "/50% here/hold"', "ExecCondition": "/bin/true"},
    }  # fmt: skip
    (systemd / "units").mkdir()
    started = call(transient_unit, monkeypatch, **wanted)
    script, template = systemd / "etc" / "a.sh", systemd / "units" / "nanofleet@.service"
    assert script.stat().st_mode & 0o777 == 0o700, "root executes it"
    assert f"ExecStart=/bin/sh {systemd}/etc/%i.sh" in template.read_text()
    assert called(systemd, "systemctl enable") == ["systemctl enable nanofleet@a.service"]
    assert 'runuser -u nanofleet -- /venv/python -m trainer again "$event"\n' in script.read_text()
    drop_in = systemd / "units" / "nanofleet-a.service.d" / "boot_entry.conf"
    assert drop_in.read_text().splitlines()[1:] == [
        "[Service]", 'ExecStartPost=+-/bin/sh "/50%% here/hold"', f"ExecStopPost=+-/bin/sh {script} end"
    ]  # fmt: skip
    typed = " ".join(started["command"])
    assert "=+" not in typed, "systemd 252 forgets it at the next daemon-reload"
    assert "--property=ExecCondition=/bin/true" in typed
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
    for status in ("KILL", "137", "1"):
        environment = {**os.environ, "EXIT_STATUS": status}
        subprocess.run(["/bin/sh", str(script), "end"], check=True, env=environment)
    asked = (systemd / "asked").read_text().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in asked] == ["boot", "end", "killed", "killed", "end"]
    (systemd / "condition").write_text("75")
    assert subprocess.run(["/bin/sh", str(script)], check=False).returncode == 1
    assert script.exists(), "the condition could not be asked: it is, when the host boots again"
    (systemd / "condition").write_text("1")
    subprocess.run(["/bin/sh", str(script), "end"], check=True)
    assert called(systemd, "systemctl disable")[0] == "systemctl disable nanofleet@a.service"
    assert not script.parent.exists()
    assert not template.exists()
    assert not drop_in.parent.exists()


def test_a_host_leaves_an_elastic_run_while_it_sleeps(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "units").mkdir()
    wanted: dict[str, Any] = {
        "name": "nanofleet-a", "argv": ["x"], "user": "nanofleet", "boot_condition": ["true"],
        "leaves_at_sleep": True,
    }  # fmt: skip
    started = call(transient_unit, monkeypatch, **wanted)
    script, template = systemd / "etc" / "a.sh", systemd / "units" / "nanofleet.sleep@.service"
    (enabled,) = called(systemd, "systemctl enable")
    assert enabled == "systemctl enable nanofleet@a.service nanofleet.sleep@a.service"
    assert "Before=sleep.target" in template.read_text()
    slept = systemd / "slept"
    script.write_text(script.read_text().replace("/run/nanofleet.sleep.a", str(slept)))
    (systemd / "bin" / "runuser").write_text("#!/bin/sh\nexit 0\n")
    (systemd / "bin" / "runuser").chmod(0o755)
    (systemd / "calls").write_text("")
    subprocess.run(["/bin/sh", str(script), "wake"], check=True)
    assert not called(systemd, "systemd-run "), "it did not train before it slept"
    subprocess.run(["/bin/sh", str(script), "sleep"], check=True)
    assert called(systemd, "systemctl stop") == ["systemctl stop nanofleet-a.service"]
    assert slept.exists()
    subprocess.run(["/bin/sh", str(script), "wake"], check=True)
    (line,) = called(systemd, "systemd-run ")
    assert line == " ".join(["systemd-run", "--no-block", *started["command"][1:]])
    assert not slept.exists()
    call(transient_unit, monkeypatch, name="nanofleet-a", state="absent")
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
    assert not list((systemd / "units").iterdir())


def test_an_active_unit_meets_a_new_host_now_and_after_a_boot(
    systemd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wanted = "nanofleet-a.service", ["localhost", "10.0.0.1", "10.0.0.3"]
    known = [f"--property=IPAddressAllow={address}" for address in ("localhost", "10.0.0.1")]
    start = ["systemd-run", "--property=IPAddressDeny=any", *known, "--", "x"]
    (systemd / "units").mkdir()
    boot_entry.write(name, start, ["true"], "", "system")
    allowed = "127.0.0.0/8 ::1/128 10.0.0.1/32"
    monkeypatch.setattr(allow_addresses, "run", answered := Answers(allowed))
    given = {"name": "nanofleet-a", "addresses": wanted}
    assert call(allow_addresses, monkeypatch, check=True, **given)["allowed"] == ["10.0.0.3"]
    assert len(answered.asked) == 1, "a dry run only reads"
    assert call(allow_addresses, monkeypatch, **given)["changed"]
    assert answered.asked[-1] == f"systemctl set-property --runtime -- {name} IPAddressAllow=10.0.0.3"
    script = (systemd / "etc" / "a.sh").read_text()
    assert " ".join(["--property=IPAddressAllow=10.0.0.3", *known, "-- x"]) in script
    monkeypatch.setattr(allow_addresses, "run", Answers(f"{allowed} 10.0.0.3/32"))
    assert not call(allow_addresses, monkeypatch, **given)["changed"]
    monkeypatch.setattr(allow_addresses, "run", Answers(""))
    assert not call(allow_addresses, monkeypatch, **given)["changed"], "it is not active"
    given["addresses"] = [*wanted, "10.0.0.33"]
    assert call(allow_addresses, monkeypatch, **given)["allowed"] == ["10.0.0.33"], "in its boot entry"
    boot_entry.write(name, ["systemd-run", "--", "x"], ["true"], "", "system")
    assert not call(allow_addresses, monkeypatch, **given)["changed"], "it is not restricted to addresses"


class Answers:
    """Stands for systemctl: prints `shown`, and keeps the command lines."""

    def __init__(self, shown: str) -> None:
        self.shown, self.asked = shown, list[str]()

    def __call__(self, words: list[str]) -> tuple[int, str, str]:
        self.asked.append(" ".join(words))
        return 0, self.shown, ""


def test_without_root_a_unit_is_the_users_own(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(unit_start.getpass, "getuser", lambda: "anna")
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
    monkeypatch.setattr(unit_start.getpass, "getuser", lambda: "anna")
    result = call(transient_unit, monkeypatch, name="nanofleet-a", argv=["x"], user="nanofleet")
    assert result["failed"]
    assert "anna cannot start nanofleet-a.service as nanofleet" in result["msg"]
    assert not called(systemd, "systemd-run ")


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


def test_a_start_that_systemd_refuses_is_reported(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(unit_end, "processes_of", processes)
    result = call(transient_unit, monkeypatch, name="nanofleet-a", state="absent", grace=0)
    assert not result["failed"]
    verbs = [line.split()[1:3] for line in called(systemd, "systemctl ") if " show " not in line]
    assert verbs == [["stop", "--no-block"], ["kill", "--signal=KILL"], ["stop", "--"]]


def test_what_outlives_a_stop_is_named(systemd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemd / "state").write_text("active")
    monkeypatch.setattr(unit_end, "processes_of", lambda _name, _scope: [os.getpid()])
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
