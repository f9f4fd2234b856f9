# SPDX-License-Identifier: MIT
"""Functions for IP addresses, and for this host's interfaces and routes. They need no root.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import Iterable
from typing import Any


def resolved(name: str) -> list[str]:
    """The IP addresses to which this machine resolves a host name; [] if there is none.

    An address resolves to itself.
    """
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse_ip(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A text such as "10.0.0.1" or "fd42::1" as an address object; None if it is no address."""
    try:
        return ipaddress.ip_address(str(text))
    except ValueError:
        return None


def is_loopback(address: Any) -> bool:
    """Whether an address, as text, is a loopback address."""
    parsed = parse_ip(address)
    return parsed is not None and parsed.is_loopback


def is_link_local(address: Any) -> bool:
    """Whether an address is IPv6 link-local: it is valid only with the name of an interface."""
    parsed = parse_ip(str(address).partition("%")[0])
    return parsed is not None and parsed.version == 6 and parsed.is_link_local


def reaches(networks: Iterable[Any], target: str) -> bool:
    """Whether the address `target` is in one of `networks`.

    networks: networks, interface addresses such as 10.0.0.1/24 (their network counts) or single addresses.
    Any other text contains no address.
    """
    for each in networks:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(target) in ipaddress.ip_interface(each).network:
                return True
    return False


def ask_ip(*words: str) -> tuple[list[dict[str, Any]], str]:
    """Run `ip -json` with these arguments, such as "address", "show". Returns (parsed output, error output).

    The parsed output is a list of dicts. It is [] if `ip` prints no JSON, is missing or takes more than 5 s;
    in the last two cases the error output is the reason.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    env = {**os.environ, "PATH": path, "LC_ALL": "C"}
    command = ["ip", "-json", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    try:
        return json.loads(done.stdout or "[]"), done.stderr.strip()
    except ValueError:
        return [], done.stderr.strip()


def route_get(address: str) -> dict[str, str]:
    """The route to an address: {"interface", "source" (own address), "error" (what `ip` printed)}."""
    found, error = ask_ip("route", "get", address)
    route = found[0] if found else {}
    return {"interface": route.get("dev", ""), "source": route.get("prefsrc", ""), "error": error}


def is_wireless(name: str, root: str = "/sys/class/net") -> bool:
    """Whether the interface `name` is WiFi. root: folder of the interfaces in sysfs."""
    return any(os.path.exists(os.path.join(root, name, entry)) for entry in ("wireless", "phy80211"))
