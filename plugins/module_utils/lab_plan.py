"""What the lab decides: a free subnet, each host's address and cores, and how to shape its link.

Pure functions, used as Jinja filters by this role and called directly by tests/unit/test_lab.py.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from typing import Any

# Where labs look for room: 10.89.0.0/16 to 10.98.0.0/16, in /24s. 10.88 is podman's own.
POOL = [ipaddress.ip_network(f"10.{b}.{c}.0/24") for b in range(89, 99) for c in range(256)]
LINK = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>kbit|mbit|gbit)")
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SYS_RESOURCE = 24
OWN_MIRRORS = ("http://deb.debian.org/debian", "http://archive.ubuntu.com/ubuntu")


class LabError(ValueError):
    """A sentence for the person who asked for the lab."""


def lab_free_subnet(name: str, taken: Iterable[str]) -> str:
    """The first free /24 for lab `name`, given the networks already routed or configured here.

    The search starts at a place that depends on the name, so labs brought up at the same moment
    rarely want the same one; podman's lock settles it when they do.
    """
    used = []
    for text in taken:
        try:
            network = ipaddress.ip_network(str(text), strict=False)
        except ValueError:
            continue  # "default" and the like
        if network.version == 4 and network.prefixlen > 8:  # a VPN's route for all of 10/8 leaves no choice
            used.append(network)
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % len(POOL)
    for subnet in POOL[start:] + POOL[:start]:
        if not any(subnet.overlaps(other) for other in used):
            return str(subnet)
    raise LabError(
        "no free subnet is left in 10.89.0.0/16 to 10.98.0.0/16: take labs down that are not needed"
    )


def lab_plan(name: str, count: int, subnet: str, cores: int, cpus: list[int]) -> list[dict[str, str]]:
    """Every host's name, addresses and cores: `cores` of its own each, shared in turn if too few.

    Its MAC address is its own as a network card's is: podman's, which changes with every start, would leave
    a host that was started again out of reach until its peers forget the old one (half a minute).
    """
    network = ipaddress.ip_network(subnet)
    plan = []
    for i in range(int(count)):
        own = sorted({cpus[(i * int(cores) + k) % len(cpus)] for k in range(int(cores))})
        address = network[11 + i]
        plan.append(
            {
                "name": f"{name}-{i + 1}",
                "address": str(address),
                "mac": ":".join(f"{byte:02x}" for byte in b"\x02\x00" + address.packed),
                "cpuset": ",".join(str(cpu) for cpu in own),
            }
        )
    return plan


def lab_containers(containers: list[dict[str, Any]] | None, name: str) -> list[dict[str, str]]:
    """Lab `name`'s containers in the output of `podman ps --format json`, each with its owner's state folder.

    A container that only has the name of one of its hosts is in the list too, with no owner.
    """
    found = []
    for container in containers or []:
        labels = container.get("Labels") or {}
        for called in container["Names"]:
            if labels.get("nanofleet.lab") == name or re.fullmatch(re.escape(name) + r"-\d+", called):
                found.append({"name": called, "owner": labels.get("nanofleet.state", "")})
    return found


def lab_failures(results: list[dict[str, Any]]) -> str:
    """The messages of the failed results of a loop, by host."""
    messages = []
    for result in results:
        if result.get("failed"):
            item = result.get(result.get("ansible_loop_var", "item"))
            host = item.get("name", "") if isinstance(item, dict) else ""
            text = str(result.get("stderr") or result.get("stdout") or result.get("msg") or "nothing").strip()
            text = "\n".join(text.splitlines()[-8:])
            messages.append(f"{host}: {text}" if host else text)
    return "; ".join(messages)


def lab_burst(rate: str) -> str:
    """A token bucket large enough for `rate`: 256 kB carry 955 Mbit/s of 1 gbit, 64 kB only 700-900."""
    if rate == "none":
        return "0"
    match = LINK.fullmatch(rate)
    if not match:
        raise LabError(f"lab_link={rate} is not a rate: say none, 100mbit, 1gbit, 2.5gbit ...")
    gigabits = float(match["number"]) * BITS[match["unit"]] / 10**9
    return f"{max(32, min(256, int(2560 * gigabits)), int(256 * gigabits))}kb"


def lab_can_raise_limits(status: str) -> bool:
    """Whether root on this machine may raise resource limits (CAP_SYS_RESOURCE), by /proc/self/status."""
    match = re.search(r"^CapBnd:\s*([0-9a-f]+)", status, re.MULTILINE)
    return not match or bool(int(match[1], 16) >> SYS_RESOURCE & 1)


def lab_mirror_of(targets: str, family: str) -> str:
    """The mirror of `family` (debian or ubuntu) that this machine uses, by `apt-get indextargets`.

    "" for the distribution's own, which mmdebstrap takes unasked, with its security updates.
    """
    for line in targets.splitlines():
        uri = line.strip().rstrip("/")
        if uri.endswith("/" + family) and uri not in OWN_MIRRORS:
            return uri
    return ""
