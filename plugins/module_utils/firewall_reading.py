# SPDX-License-Identifier: MIT
"""Reads the rules of this host's firewalls that drop or admit connections. Standard library only."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import FIREWALLS


def read_firewalls(interface: str) -> dict[str, Any]:
    """The firewalls of this host, as {"rules", "active"}.

    rules: the rules that drop or accept packets, and the policies, of all firewalls, as dicts (see the top of
    firewall_listings.py); without root the listings are empty. active: names of the active firewalls that
    are recognised without root: ufw, firewalld and nft. interface: the network interface to the peers; it
    selects the zone of firewalld.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    locale = {**os.environ, "LC_ALL": "C", "LANG": "C"}

    @functools.cache
    def printed(line: str) -> str | None:
        """What a command prints; None if it fails or is not installed."""
        words = shlex.split(line)
        program = shutil.which(words[0], path=path)
        if program is None:
            return None
        command = [program, *words[1:]]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=locale
        )
        return None if done.returncode else done.stdout

    def run(line: str) -> str:
        return printed(line) or ""

    return {
        "rules": [rule for each in FIREWALLS.values() for rule in each.rules(run, interface)],
        "active": [name for name, each in FIREWALLS.items() if each.sign and printed(each.sign) is not None],
    }
