"""Calculations for the lab: a free subnet, each host's address and cores, and the rate limit of its link.

A lab is a fleet of containers on this machine.
Pure functions, used as Jinja filters by the role lab and called directly by tests/unit/test_lab.py.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from typing import Any

# Subnets for labs: the /24s of 10.89.0.0/16 to 10.98.0.0/16. podman uses 10.88.0.0/16 itself.
POOL = [ipaddress.ip_network(f"10.{b}.{c}.0/24") for b in range(89, 99) for c in range(256)]
LINK = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>kbit|mbit|gbit)")
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def lab_free_subnet(name: str, taken: Iterable[str]) -> str:
    """The first free /24 for lab `name`. taken: networks that this machine uses or has a route to.

    The search starts at a position derived from the name, so labs that start at the same time rarely choose
    the same subnet; if they do, podman's lock decides. Raises ValueError if no subnet is free.
    """
    used = []
    for text in taken:
        try:
            network = ipaddress.ip_network(str(text), strict=False)
        except ValueError:
            continue  # "default" and the like
        if (
            network.version == 4 and network.prefixlen > 8
        ):  # a VPN's route for all of 10/8 would leave no subnet
            used.append(network)
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % len(POOL)
    for subnet in POOL[start:] + POOL[:start]:
        if not any(subnet.overlaps(other) for other in used):
            return str(subnet)
    raise ValueError(
        "no free subnet is left in 10.89.0.0/16 to 10.98.0.0/16: take labs down that are not needed"
    )


def lab_plan(name: str, count: int, subnet: str, cores: int, cpus: list[int]) -> list[dict[str, str]]:
    """The hosts of a lab, as dicts with name, address, mac and cpuset (CPU numbers, separated by commas).

    name: the name of the lab. count: the number of hosts. subnet: the /24 of the lab. cores: the number of
    CPUs of a host. cpus: the CPU numbers of this machine; if there are too few, several hosts use the same
    CPU, and no host has more CPUs than the machine. The MAC address is computed from the IP address and never
    changes: podman would choose another MAC address at each start, and peers that remember the old one would
    not reach a restarted host for half a minute.
    """
    network, plan = ipaddress.ip_network(subnet), []
    for i in range(int(count)):
        address = network[11 + i]
        own = {cpus[(i * int(cores) + k) % len(cpus)] for k in range(int(cores))}
        plan.append(
            {
                "name": f"{name}-{i + 1}",
                "address": str(address),
                "mac": ":".join(f"{byte:02x}" for byte in b"\x02\x00" + address.packed),
                "cpuset": ",".join(map(str, sorted(own))),
            }
        )
    return plan


def lab_containers(containers: list[dict[str, Any]] | None, name: str) -> list[dict[str, str]]:
    """Containers of the lab `name`: [{"name", "owner"}].

    owner: state folder of the lab that made the container; "" for any other container. containers: the parsed
    output of `podman ps --format json`. A container that no lab made is included if its name looks like that
    of a host of this lab (NAME-1).
    """
    return [
        {"name": each, "owner": (container.get("Labels") or {}).get("nanofleet.state", "")}
        for container in containers or []
        for each in container["Names"]
        if (container.get("Labels") or {}).get("nanofleet.lab") == name
        or re.fullmatch(re.escape(name) + r"-\d+", each)
    ]


def lab_failures(results: list[dict[str, Any]]) -> str:
    """The messages of the failed results of an Ansible loop, each with the host that it is about.

    results: the `results` of the registered loop, dicts with failed, item, and stderr, stdout or msg.
    """
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
    """The burst of a tc token bucket that is large enough for `rate`, such as 256kb; 0 for the rate none.

    With a burst of 256 kB, a 1 gbit link carries 955 Mbit/s; with 64 kB, only 700 to 900 Mbit/s. Raises
    ValueError for an invalid rate.
    """
    if rate == "none":
        return "0"
    match = LINK.fullmatch(rate)
    if not match:
        raise ValueError(
            f"lab_link={rate} is not a rate: set it to a rate (100mbit, 1gbit, 2.5gbit, ...) or to none"
        )
    gigabits = float(match["number"]) * BITS[match["unit"]] / 10**9
    return f"{max(32, min(256, int(2560 * gigabits)), int(256 * gigabits))}kb"
