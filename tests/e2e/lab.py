"""A lab for a session of tests, and playbooks run in it through ansible-runner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible_runner
import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = os.environ.get("NANOFLEET_TEST_LAB", "t") + "-e2e"
ENVIRONMENT = {
    "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
    "ANSIBLE_NOCOLOR": "1",
    # ansible-runner turns it off otherwise, and that goes before the inventory's own options.
    "ANSIBLE_HOST_KEY_CHECKING": "True",
}


def recap(stdout: str) -> dict[str, dict[str, int]]:
    """What ansible-playbook counted, by host; localhost is among them where it did something."""
    lines = stdout.split("PLAY RECAP", 1)[1].splitlines()[1:]
    return {
        host.strip(): {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", counts)}
        for host, mark, counts in (line.partition(" : ") for line in lines)
        if mark
    }


@dataclass(frozen=True)
class Outcome:
    """What a playbook did: its exit status, its events and the text a person would have read."""

    rc: int
    events: list[dict[str, Any]]
    stdout: str
    stats: dict[str, dict[str, int]]

    def changed(self) -> int:
        return sum(self.stats["changed"].values())

    def changes(self) -> list[str]:
        """The tasks that changed something, each with its host."""
        return [
            f"{event['event_data']['task']} on {event['event_data']['host']}"
            for event in self.events
            if event["event"] == "runner_on_ok" and event["event_data"]["res"].get("changed")
        ]

    def results(self, task: str) -> dict[str, dict[str, Any]]:
        """The result of the named task, by host; the last one where it ran more than once."""
        return {
            event["event_data"]["host"]: event["event_data"]["res"]
            for event in self.events
            if event["event"] in {"runner_on_ok", "runner_on_failed"}
            and event["event_data"].get("task") == task
        }


class Fleet:
    """Runs the root playbooks against one inventory, the way a person does, and keeps their output."""

    def __init__(self, workdir: Path, inventory: Path | None) -> None:
        self.workdir = workdir
        self.inventory = inventory

    def play(self, playbook: str, *, fails: bool = False, **extravars: Any) -> Outcome:
        # ansible-runner would give a later playbook those of the first one as well.
        (self.workdir / "env" / "extravars").unlink(missing_ok=True)
        run = ansible_runner.run(
            private_data_dir=str(self.workdir),
            project_dir=str(ROOT),
            playbook=playbook,
            inventory=str(self.inventory) if self.inventory else None,
            extravars={name: str(value) for name, value in extravars.items()},
            envvars=ENVIRONMENT,
            quiet=True,
        )
        stdout = run.stdout.read()
        outcome = Outcome(run.rc, list(run.events), stdout, run.stats or {})
        assert (outcome.rc != 0) is fails, f"{playbook} ended with {outcome.rc}:\n{stdout}"
        return outcome

    def on(self, host: str, command: str) -> str:
        """Standard output of a shell command run on a host as root, over the same SSH as the playbooks."""
        where = [host, "-i", str(self.inventory), "--become"]
        done = subprocess.run(
            ["ansible", *where, "-m", "ansible.builtin.shell", "-a", command],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split(">>\n", 1)[-1].strip()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of the standard library's own text, sharded and with a tokenizer."""
    out = tmp_path_factory.mktemp("data")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    command = [sys.executable, "-m", "trainer", "prepare", "--out", str(out), "--vocab-size", "512"]
    for package in ("json", "email", "http", "logging"):
        command += ["--source", str(stdlib / package)]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two systemd hosts with sshd and ufw, brought up for this session and taken away after it."""
    workdir = tmp_path_factory.mktemp("runner")
    lab = Fleet(workdir, None)
    try:
        lab.play("lab.yml", lab_state="up", lab_name=LAB)
        yield Fleet(workdir, ROOT / ".lab" / LAB / "inventory" / "hosts.yml")
    finally:
        lab.play("lab.yml", lab_state="down", lab_name=LAB)
