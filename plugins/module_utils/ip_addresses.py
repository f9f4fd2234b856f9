# SPDX-License-Identifier: MIT
"""IP addresses: of a name, and of which kind. Standard library only."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any


def resolved(name: str) -> list[str]:
    """The addresses of a name or address, by this machine's resolver; none where it knows none."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse_ip(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(str(text))
    except ValueError:
        return None


def is_loopback(address: Any) -> bool:
    parsed = parse_ip(address)
    return parsed is not None and parsed.is_loopback


def is_link_local(address: Any) -> bool:
    """An IPv6 address that means something only together with one host's name of an interface."""
    parsed = parse_ip(str(address).partition("%")[0])
    return parsed is not None and parsed.version == 6 and parsed.is_link_local
