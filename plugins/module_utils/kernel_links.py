# SPDX-License-Identifier: MIT
"""This host's interfaces and routes, read from the kernel. Needs no root. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any


def ask_ip(*words: str) -> tuple[list[dict[str, Any]], str]:
    """(parsed output of `ip -json WORDS`, [] if it prints no JSON; its error output)."""
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
    """The route to an address: dev (interface), prefsrc (own address) and error (what `ip` printed)."""
    found, error = ask_ip("route", "get", address)
    route = found[0] if found else {}
    return {"dev": route.get("dev", ""), "prefsrc": route.get("prefsrc", ""), "error": error}


def is_wireless(name: str, root: str = "/sys/class/net") -> bool:
    """Whether the interface `name` is WiFi. root: folder of the interfaces in sysfs."""
    return any(os.path.exists(os.path.join(root, name, entry)) for entry in ("wireless", "phy80211"))
