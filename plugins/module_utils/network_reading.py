# SPDX-License-Identifier: MIT
"""Reads this host's interfaces and routes from the kernel. Needs no root. Standard library only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import (
    ask_ip,
    is_wireless,
    route_get,
)

LOOKUP_SECONDS = 3.0


def slow_names(lookups: Mapping[str, Callable[[], object]], limit: float) -> list[str]:
    """The names whose lookup still runs after `limit` seconds.

    lookups: {name: function that looks up the name}. All lookups run at the same time.
    """

    def attempt(look_up: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            look_up()

    threads = {
        name: threading.Thread(target=attempt, args=[look_up], daemon=True)
        for name, look_up in lookups.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    return [name for name, thread in threads.items() if thread.is_alive()]


def read_network(targets: Sequence[str]) -> dict[str, Any]:
    """The interfaces and routes of this host, as a dict. targets: addresses to which the routes are read.

    Keys of the result:
    links: entries of `ip -json address`, of the interfaces that are enabled.
    routes: {target: result of route_get}. wireless: names of WiFi interfaces.
    slow_names: of the name of this host and the first target, those whose lookup takes longer than
    LOOKUP_SECONDS.
    """
    links = [link for link in ask_ip("-details", "address", "show", "up")[0] if link.get("ifname")]
    # torchrun looks up the name of this host at its start, and each rank the names of its peers.
    lookups: dict[str, Callable[[], object]] = {socket.gethostname(): socket.getfqdn}
    for target in targets[:1]:
        lookups[target] = partial(socket.getnameinfo, (target, 0), 0)
    return {
        "links": links,
        "routes": {target: route_get(target) for target in targets},
        "wireless": [link["ifname"] for link in links if is_wireless(link["ifname"])],
        "slow_names": slow_names(lookups, LOOKUP_SECONDS),
    }
