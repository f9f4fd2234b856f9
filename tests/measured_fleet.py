"""Doctor's plugins, and a made-up fleet with which nothing is wrong, as doctor measures one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_hosts as hosts
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_links as links
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_paths as paths
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import make_rule
from port_range import COLON, HIGH, LOW

from trainer.config import SYNC_MODES

ROLE = Path(__file__).resolve().parents[1] / "roles" / "doctor"


OPTIONS = {
    "port_low": LOW, "port_high": HIGH, "store_port": 29500, "slow_mbit": 300.0, "slow_rtt_ms": 10.0,
    "min_free_gib": 1.0, "max_skew_s": 5.0, "trainer": "d1",
}  # fmt: skip
ADDRESSES = {"tower": "10.0.0.1", "laptop": "10.0.0.2", "attic": "10.0.0.3"}
DROP = make_rule(
    "iptables", "INPUT", "drop", f"iptables -A INPUT -s 10.0.0.1/32 -p tcp --dport {COLON} -j DROP",
    remedy=f"sudo iptables -D INPUT -s 10.0.0.1/32 -p tcp --dport {COLON} -j DROP",
    protocol="tcp", source="10.0.0.1/32", ports=COLON,
)  # fmt: skip
UFW = make_rule("ufw", "INPUT", "policy", "ufw")
Measured = dict[str, dict[str, Any]]


def a_port(port: int, role: str, state: str = "open", **more: Any) -> dict[str, Any]:
    return {"port": port, "role": role, "state": state, "detail": "", "seen": "", "ms": 0.2, **more}


def a_link(**more: Any) -> dict[str, Any]:
    return {
        "addresses": [], "mtu": 1500, "speed_mbit": 1000, "duplex": "full", "wireless": False,
        "physical": True, "carrier": True, "made_as": "", **more,
    }  # fmt: skip


def fleet(*names: str) -> Measured:
    """Hosts with which nothing is wrong; the first serves the store."""
    found: Measured = {}
    disk = {"mount": "/", "free_gib": 50.0, "inodes_free": 10**6, "writable": True}
    for name in names:
        listens = [{"port": LOW + 311, "role": "gloo", "picked": True}]
        listens += [{"port": port, "role": "gloo", "picked": False} for port in (LOW, HIGH)]
        if name == names[0]:
            listens.insert(0, {"port": 29500, "role": "store", "picked": False})
        found[name] = {
            "reachable": True, "why": "", "problem": "", "address": ADDRESSES[name], "interface": "eth0",
            "facts": {
                "skew_s": 0.0, "hostname": name, "resolves_to": [ADDRESSES[name]],
                "port_range": [LOW, HIGH], "machine": "x86_64", "cores": 4, "machine_cores": 4,
                "load": 0.1, "copy_gb_s": 12.5,
                "links": {"eth0": a_link(addresses=[f"{ADDRESSES[name]}/24"])},
                "disks": {"/opt/nanofleet": dict(disk), "/var/lib/nanofleet": dict(disk)},
            },
            "marks": {"/etc/hosts": f"{name} 1", "boot": f"b-{name}"},
            "ports": listens, "held": [], "active": [],
            "firewall": None, "paths": {}, "rates": {}, "data": {"findings": [], "manifest_sha256": "m"},
            "installed": {"torch": "2.13.0+cpu", "trainer": "d1", "environment": "e1", "python": "3.11.2"},
            "rehearsal": {
                "hosts": list(names), "error": "", "gemm_gflops": {"float32": 200.0, "bfloat16": 900.0},
                "allreduce_mbit": 800.0, "pairs": {},
            },
        }  # fmt: skip
    for host, peer in itertools.permutations(names, 2):
        found[host]["paths"][peer] = {
            "route": {"interface": "eth0", "source": ADDRESSES[host]}, "up": True,
            "ports": [{**a_port(**{k: each[k] for k in ("port", "role")}), **each, "seen": ADDRESSES[host]}
                      for each in found[peer]["ports"]],
            "rtt_ms": {"min": 0.1, "median": 0.2},
            "mtu": {"sent": 1500, "passes": 1500, "swallowed": False},
        }  # fmt: skip
    for a, b in itertools.combinations(names, 2):
        found[a]["rates"][b] = {"sent_mbit": 940.0, "received_mbit": 930.0}
        i, j = names.index(a), names.index(b)
        for name in (a, b):
            found[name]["rehearsal"]["pairs"][f"{i}-{j}"] = 700.0 + i + j
    return found


def predict(measured: Measured, advice: tuple[str, ...] = ("sync=exact", "sync=local")) -> None:
    """Let the rehearsal have predicted a step over a slow link."""
    seconds = dict.fromkeys(SYNC_MODES, (20.0, 25.0))
    seconds |= {"dense": (42.4, 50.1), "exact": (14.9, 20.3), "fast": (7.5, 13.0), "local": (0.24, 8.0)}
    first = next(iter(measured))
    measured[first]["rehearsal"]["predicted"] = {
        "depth": 8, "total_batch_size": 4096, "sync": "dense", "advice": list(advice),
        "modes": {mode: {"network_s": network, "step_s": step} for mode, (network, step) in seconds.items()},
        "alone": {"host": first, "step_s": 15.2},
    }  # fmt: skip


def close_ports(
    measured: Measured, host: str, peer: str, state: str, role: str = "gloo", **more: Any
) -> None:
    for port in measured[host]["paths"][peer]["ports"]:
        if port["role"] == role:
            port.update(state=state, seen="", **more)


def all_findings(measured: Measured, hostvars: dict[str, Any] | None = None) -> list[dict[str, str]]:
    variables = hostvars or {name: {} for name in measured}
    return [
        *hosts.host_findings(measured, variables, OPTIONS),
        *paths.path_findings(measured, OPTIONS),
        *links.link_findings(measured, OPTIONS),
    ]


def only(measured: Measured, hostvars: dict[str, Any] | None = None) -> dict[str, str]:
    found = all_findings(measured, hostvars)
    assert len(found) == 1, found
    assert set(found[0]) == {"code", "host", "peer", "severity", "problem", "remedy"}
    return found[0]
