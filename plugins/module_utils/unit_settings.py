"""Settings of a run's unit: the addresses that it may exchange packets with, and its number of CPUs."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit


def resolve(name: str) -> list[str]:
    """The IP addresses of a name or address, from the controller's resolver; [] if it knows none."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def allowed(addresses: Iterable[Any], tracker_uri: str = "") -> list[str]:
    """Values of systemd's IPAddressAllow=: localhost, the given hosts, and the host of the tracker.

    addresses: IP addresses or names, which are resolved.
    """
    tracker = urlsplit(tracker_uri).hostname if tracker_uri.startswith(("http://", "https://")) else None
    found = [
        ip
        for name in [*filter(None, addresses), *([tracker] if tracker else [])]
        for ip in resolve(str(name))
    ]
    others = [ip for ip in found if not ipaddress.ip_address(ip).is_loopback]
    return ["localhost", *dict.fromkeys(others)]


def count_cpus(cpus: str) -> int:
    """The number of CPUs in a list such as 0-3,6; 0 for an empty list."""
    named: set[int] = set()
    for part in filter(None, str(cpus).split(",")):
        first, _, last = part.partition("-")
        named.update(range(int(first), int(last or first) + 1))
    return len(named)
