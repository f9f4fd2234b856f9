# SPDX-License-Identifier: MIT
"""Resolves names to IP addresses, and classifies addresses. Standard library only."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any


def resolved(name: str) -> list[str]:
    """The IP addresses of a name or address by this machine's resolver; [] if there is none."""
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse_ip(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text holds; None if it holds none."""
    try:
        return ipaddress.ip_address(str(text))
    except ValueError:
        return None


def is_loopback(address: Any) -> bool:
    parsed = parse_ip(address)
    return parsed is not None and parsed.is_loopback


def is_link_local(address: Any) -> bool:
    """Whether an address is IPv6 link-local: it is valid only with the name of an interface."""
    parsed = parse_ip(str(address).partition("%")[0])
    return parsed is not None and parsed.version == 6 and parsed.is_link_local
