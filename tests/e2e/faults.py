"""Faults as a person's machines have them, planted on a lab host and taken away again.

Used by test_doctor_report.py; every fault names what doctor must find, and on which host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from port_range import COLON, DASHED

from .lab import Fleet

STATE = "/var/lib/nanofleet"
PYTHON_START = "/etc/python3.11/sitecustomize.py"
SHIM = r"import time\n_time = time.time\ntime.time = lambda: _time() + 90\n"
TORCH = "$(ls -d /opt/nanofleet/venv/lib/python*/site-packages/torch-*.dist-info)/METADATA"


@dataclass(frozen=True)
class Fault:
    """How it is planted and taken away, and the finding it must lead to."""

    name: str
    host: int  # which of the two hosts it is planted on
    plant: str  # a shell line there, as root; {me} and {peer} are the hosts' addresses
    fix: str
    code: str
    says: tuple[str, ...]  # words of the verdict line
    blames: int = 0  # the host the verdict names; 0: where it was planted
    severity: str = "error"
    remedy: str = ""  # words of the remedy
    outside: bool = False  # done by podman on the lab's machine, not in the host
    inventory: Mapping[str, str] = field(default_factory=dict)  # the host's variables in the inventory
    note: str = ""


FAULTS = (
    Fault(
        "Gloo's range blocked one way (iptables DROP)", 2,
        f"iptables -I INPUT -s {{peer}} -p tcp --syn --dport {COLON} -j DROP",
        f"iptables -D INPUT -s {{peer}} -p tcp --syn --dport {COLON} -j DROP",
        "NF528", ("gets no answer", DASHED, "connections from", "iptables"),
        remedy="sudo iptables -D INPUT",
    ),
    Fault(
        "Gloo's range refused one way (ufw reject)", 1,
        f"ufw delete allow from {{peer}} to any port {COLON} proto tcp"
        f" && ufw prepend reject from {{peer}} to any port {COLON} proto tcp",
        f"ufw delete reject from {{peer}} to any port {COLON} proto tcp"
        f" && ufw prepend allow from {{peer}} to any port {COLON} proto tcp comment nanofleet",
        "NF528", ("is refused", DASHED, "ufw reject"), remedy="sudo ufw delete reject",
    ),
    Fault(
        "no ufw rule lets the peer in", 2,
        f"ufw delete allow from {{peer}} to any port {COLON} proto tcp",
        f"ufw prepend allow from {{peer}} to any port {COLON} proto tcp comment nanofleet",
        "NF528", ("gets no answer", "has no rule that lets"), remedy="setup.yml",
    ),
    Fault(
        "the store's port blocked", 1,
        "iptables -I INPUT -p tcp --dport 29500 -j DROP",
        "iptables -D INPUT -p tcp --dport 29500 -j DROP",
        "NF527", ("gets no answer", "store's port 29500"), remedy="sudo iptables -D INPUT",
    ),
    Fault(
        "outgoing connections blocked", 2,
        f"iptables -I OUTPUT -d {{peer}} -p tcp --dport {COLON} -j DROP",
        f"iptables -D OUTPUT -d {{peer}} -p tcp --dport {COLON} -j DROP",
        "NF528", ("gets no answer", "OUTPUT"), remedy="sudo iptables -D OUTPUT",
    ),
    Fault(
        "ports led to another machine (DNAT)", 1,
        f"iptables -t nat -I OUTPUT -d {{peer}} -p tcp --dport {COLON} -j DNAT --to-destination {{me}}",
        f"iptables -t nat -D OUTPUT -d {{peer}} -p tcp --dport {COLON} -j DNAT --to-destination {{me}}",
        "NF522", ("reaches", "instead"), blames=2, remedy="ip -br address",
    ),
    Fault(
        "wrong interface forced (fleet_interface: docker0)", 2,
        "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0"
        " && ip link set docker0 up",
        "ip link delete docker0",
        "NF521", ("docker0", "eth0"), remedy="fleet_interface",
        inventory={"fleet_interface": "docker0"},
    ),
    Fault(
        "the host's own name resolves to loopback", 2,
        "cp /etc/hosts /tmp/hosts && sed 's/^{me}.*/127.0.1.1 '$(hostname)/ /tmp/hosts > /etc/hosts",
        "cat /tmp/hosts > /etc/hosts && rm /tmp/hosts",
        "NF505", ("127.0.1.1",), severity="warning", remedy="/etc/hosts",
        note="a warning: runs get the interface and are not affected",
    ),
    Fault(
        "the disk of the runs mounted read-only", 2,
        f"mount --bind {STATE} {STATE} && mount -o remount,bind,ro {STATE}",
        f"umount {STATE}",
        "NF513", (STATE, "read-only"), remedy=f"remount,rw {STATE}",
    ),
    Fault(
        "the store's port held by another process", 1,
        "systemd-run --quiet --unit=squatter --collect python3 -m http.server 29500"
        " && timeout 30 sh -c 'until ss -Htln | grep -q :29500; do sleep 0.2; done'",
        "systemctl stop squatter",
        "NF507", ("29500", "http.server", "squatter.service"),
        remedy="sudo systemctl stop squatter.service",
    ),
    Fault(
        "one byte of a shard altered", 2,
        f"cd {STATE}/data/shards && f=$(ls | head -1) && cp -a $f /tmp/$f"
        " && printf X | dd of=$f bs=1 seek=100 conv=notrunc status=none",
        f"cd {STATE}/data/shards && f=$(ls | head -1) && cp -a /tmp/$f $f && rm /tmp/$f",
        "NF509", ("was altered",), remedy="setup.yml",
    ),
    Fault(
        "a shard missing", 2,
        f"cd {STATE}/data/shards && mv $(ls | head -1) /tmp/",
        f"mv /tmp/shard_* {STATE}/data/shards/",
        "NF509", ("is missing",), remedy="setup.yml",
    ),
    Fault(
        "another version of torch", 2,
        f"f={TORCH} && cp -a $f /tmp/METADATA"
        " && sed 's/^Version: .*/Version: 2.11.0/' /tmp/METADATA > $f",
        f"f={TORCH} && cp -a /tmp/METADATA $f && rm /tmp/METADATA",
        "NF511", ("version of torch", "2.11.0"), remedy="setup.yml",
        note="the package's metadata are changed, as no second build is at hand",
    ),
    Fault(
        "the clock is 90 s ahead", 2,
        f"cp -a {PYTHON_START} /tmp/start.py"
        f" && printf '{SHIM}' >> {PYTHON_START}",
        f"cp -a /tmp/start.py {PYTHON_START} && rm /tmp/start.py",
        "NF503", ("s ahead of that of the controller",), remedy="timedatectl",
        note="by a shim in the host's Python: a lab host's clock is the machine's",
    ),
    Fault(
        "the disk of the runs is full", 2,
        f"mount -t tmpfs -o size=4m tmpfs {STATE}/runs"
        f" && dd if=/dev/zero of={STATE}/runs/ballast bs=1M count=4 status=none",
        f"umount {STATE}/runs",
        "NF504", ("has 0.0 GiB free", f"{STATE}/runs"), remedy="du -xh",
    ),
    Fault(
        "an MTU black hole: packets above 1300 bytes vanish", 2,
        "iptables -I INPUT -s {peer} -p tcp -m length --length 1301:65535 -j DROP",
        "iptables -D INPUT -s {peer} -p tcp -m length --length 1301:65535 -j DROP",
        "NF531", ("Packets of 1500 bytes", "those of 1300 arrive"), remedy="sudo iptables -D INPUT",
    ),
    Fault(
        "a slow link (100 Mbit/s one way)", 1,
        "tc qdisc add dev eth0 root tbf rate 100mbit burst 256kb latency 50ms",
        "tc qdisc del dev eth0 root",
        "NF541", ("Mbit/s",), severity="warning", remedy="tc qdisc",
    ),
    Fault(
        "a host asleep (link down, then paused)", 2,
        "podman exec {name} ip link set eth0 down && podman pause {name}",
        "podman unpause {name} && podman exec {name} ip link set eth0 up"
        " && podman exec {name} ip route add default via {gateway}",
        "NF101", ("cannot reach this host", "either: it is off, asleep"), remedy="ssh", outside=True,
    ),
)  # fmt: skip


class Lab:
    """The two hosts of a fleet, and what must be known to break them."""

    def __init__(self, fleet: Fleet) -> None:
        assert fleet.inventory is not None
        self.fleet = fleet
        text = fleet.inventory.read_text()
        self.names = re.findall(r"^    (\S+-\d+):$", text, re.MULTILINE)
        self.addresses = re.findall(r"ansible_host: [\"']?([0-9.]+)", text)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is there inside the block and gone after it."""
        self.run(fault, fault.plant)
        try:
            yield
        finally:
            self.run(fault, fault.fix)

    def run(self, fault: Fault, command: str) -> None:
        me, peer = fault.host - 1, 2 - fault.host
        words = {
            "me": self.addresses[me], "peer": self.addresses[peer], "name": self.names[me],
            "gateway": self.addresses[me].rsplit(".", 1)[0] + ".1",
        }  # fmt: skip
        for name, value in words.items():
            command = command.replace("{" + name + "}", value)
        if fault.outside:
            subprocess.run(["sh", "-c", command], check=True, capture_output=True)
        else:
            self.inside(self.names[me], command)

    def inside(self, name: str, command: str) -> str:
        """What a shell command says in a host; not over SSH, for a fault may lie in its own way out."""
        inside = ["podman", "exec", name, "sh", "-c", command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {command}: {done.stderr}"
        return done.stdout

    def inventory_with(self, fault: Fault, folder: Path) -> Path | None:
        """A copy of the inventory with the fault's variables at its host, if it has any."""
        if not fault.inventory or self.fleet.inventory is None:
            return None
        address = self.addresses[fault.host - 1]
        lines = "".join(f"\n      {name}: {value}" for name, value in fault.inventory.items())
        copy = folder / "hosts.yml"
        text = self.fleet.inventory.read_text()
        copy.write_text(text.replace(f"ansible_host: {address}", f"ansible_host: {address}{lines}"))
        return copy


@dataclass(frozen=True)
class DoctorOutput:
    """The output of doctor: its report, its text, and the seconds the whole command took."""

    report: dict[str, Any]
    text: str
    seconds: float
    load: float

    def findings(self, code: str) -> list[dict[str, str]]:
        return [each for each in self.report["findings"] if each["code"] == code]


def ask_doctor(fleet: Fleet, folder: Path, *, fails: bool, data: Path, **settings: Any) -> DoctorOutput:
    started = time.monotonic()
    file = folder / "report.json"
    outcome = fleet.play("doctor.yml", fails=fails, data_dir=data, doctor_report=file, **settings)
    seconds = time.monotonic() - started
    assert outcome.changed() == 0, outcome.stdout
    text = next(iter(outcome.results("Print the report").values()))["msg"]
    return DoctorOutput(json.loads(file.read_text()), text, seconds, os.getloadavg()[0])


def table(
    rows: list[tuple[Fault, DoctorOutput]], good: DoctorOutput, render: Callable[[str], str] = str
) -> str:
    """docs/doctor.md's table, of what the doctor reported."""
    lines = ["| planted | on | doctor reported | seconds |", "|---|---|---|---|"]
    for fault, printed in rows:
        found = [line for line in printed.text.splitlines() if line.startswith(("FAULT", "warning"))]
        # The machine's own load is no part of the fault.
        found = [render(line) for line in found if "NF508" not in line]
        note = f" ({fault.note})" if fault.note else ""
        cell = "<br>".join(found).replace("|", "&#124;")
        lines.append(f"| {fault.name}{note} | host {fault.host} | {cell} | {printed.seconds:.0f} |")
    lines.append(f"| nothing | - | {good.text.splitlines()[-1]} | {good.seconds:.0f} |")
    loads = [printed.load for _fault, printed in rows]
    lines.append("")
    lines.append(
        f"The machine that holds the lab has {os.cpu_count()} cores for both hosts and the controller; its "
        f"load was {min(loads):.0f} to {max(loads):.0f} meanwhile."
    )
    return "\n".join(lines)
