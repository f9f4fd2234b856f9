"""Settings of a run's unit: the addresses that it exchanges packets with, and how many processors it has."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit


def resolve(name: str) -> list[str]:
    """IP addresses of a name or address, by the controller's resolver; none where it knows none."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def allowed(addresses: Iterable[Any], tracker_uri: str = "") -> list[str]:
    """systemd's words for loopback, these addresses (names are resolved), and the tracker's server."""
    tracker = urlsplit(tracker_uri).hostname if tracker_uri.startswith(("http://", "https://")) else None
    found = [
        ip
        for name in [*filter(None, addresses), *([tracker] if tracker else [])]
        for ip in resolve(str(name))
    ]
    others = [ip for ip in found if not ipaddress.ip_address(ip).is_loopback]
    return ["localhost", *dict.fromkeys(others)]


def count_cpus(cpus: str) -> int:
    """How many processors a list such as 0-3,6 names; 0 for an empty one."""
    named: set[int] = set()
    for part in filter(None, str(cpus).split(",")):
        first, _, last = part.partition("-")
        named.update(range(int(first), int(last or first) + 1))
    return len(named)
