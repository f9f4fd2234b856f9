"""A lab of three hosts, of which two are a fleet.

NANOFLEET_THREE_LAB=NAME takes one that is up (lab.yml -e lab_name=NAME -e lab_hosts=3), and leaves it so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from port_range import DASHED

from .lab import LAB, ROOT, Fleet

GIVEN = os.environ.get("NANOFLEET_THREE_LAB", "")
NAME = GIVEN or f"{LAB}-open"
SCANNED = f"22 5000 29500 {DASHED}"
TINY = {
    "depth": 1, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "total_batch_size": 1024,
    "device_batch_size": 4, "warmup_steps": 1, "eval_tokens": 1024, "eval_every": 0, "sample_every": 0,
    "save_minutes": 0, "steps": 1_000_000, "doctor": "never", "launch_first_step_timeout": 900,
}  # fmt: skip


@dataclass
class Three:
    """Two hosts of a fleet and one beside it."""

    all: Fleet
    home: Fleet
    addresses: list[str]

    def name(self, host: int) -> str:
        return f"{NAME}-{host}"

    def inside(self, host: int, command: str) -> str:
        argv = ["podman", "exec", self.name(host), "sh", "-c", command]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def listeners(self, host: int) -> list[int]:
        """TCP ports that something on the host listens on, loopback left out."""
        lines = self.inside(host, "ss -Hltn").splitlines()
        local = [line.split()[3] for line in lines]
        return sorted({int(a.rpartition(":")[2]) for a in local if not a.startswith(("127.", "[::1]"))})

    def scan(self, source: int, address: str, *ports: int) -> dict[int, str]:
        """What the ports of an address answer to a host: all that a run uses, or these and patiently."""
        script = (ROOT / "tests" / "e2e" / "scan.py").read_text()
        argv = ["podman", "exec", "-i", f"{NAME}-{source}", "python3", "-", address]
        argv += ["--seconds=20", *map(str, ports)] if ports else SCANNED.split()
        done = subprocess.run(argv, input=script, capture_output=True, text=True, check=True)
        return {int(port): printed for port, printed in json.loads(done.stdout).items()}


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """A lab of three hosts with an IPv6 address each; the inventory `home` leaves the third out."""
    workdir = tmp_path_factory.mktemp("runner")
    lab = Fleet(workdir, None)
    try:
        if not GIVEN:
            lab.play("lab.yml", lab_state="up", lab_name=NAME, lab_hosts=3)
        listed = ROOT / ".lab" / NAME / "inventory" / "hosts.yml"
        text = listed.read_text()
        addresses = re.findall(r"ansible_host: [\"']?([0-9.]+)", text)
        home = tmp_path_factory.mktemp("inventories") / "home" / "hosts.yml"
        home.parent.mkdir()
        home.write_text(re.sub(rf" +{NAME}-3:\n +ansible_host: \S+\n", "", text))
        found = Three(Fleet(workdir, listed), Fleet(workdir, home), addresses)
        for number in (1, 2, 3):
            found.inside(number, f"ip -6 address replace fd42::1{number}/64 dev eth0 nodad")
        yield found
    finally:
        if not GIVEN:
            lab.play("lab.yml", lab_state="down", lab_name=NAME)
