#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read this host's interfaces and routes from the kernel. Needs no root."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import (
    ask_ip,
    is_wireless,
    route_get,
)

LOOKUP_SECONDS = 3.0


def slow_names(lookups: Mapping[str, Callable[[], object]], limit: float) -> list[str]:
    """The names whose function still runs after `limit` seconds. lookups: {name: function}."""

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


def main() -> None:
    module = AnsibleModule(
        argument_spec={"targets": {"type": "list", "elements": "str", "required": True}},
        supports_check_mode=True,
    )
    if module.get_bin_path("ip", opt_dirs=["/usr/sbin", "/sbin"]) is None:
        module.fail_json(msg="The command ip is missing. Type on this host: sudo apt install iproute2")
    links = [link for link in ask_ip("-details", "address", "show", "up")[0] if link.get("ifname")]
    # torchrun looks up the name of this host at its start, and each rank the names of its peers.
    lookups: dict[str, Callable[[], object]] = {socket.gethostname(): socket.getfqdn}
    for target in module.params["targets"][:1]:
        lookups[target] = partial(socket.getnameinfo, (target, 0), 0)
    module.exit_json(
        changed=False,
        links=links,
        routes={target: route_get(target) for target in module.params["targets"]},
        wireless=[link["ifname"] for link in links if is_wireless(link["ifname"])],
        slow_names=slow_names(lookups, LOOKUP_SECONDS),
    )


if __name__ == "__main__":
    main()
