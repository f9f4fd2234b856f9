#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: start or stop the listener that the other hosts probe, on the ports of a run."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_listener import (
    Listener,
    detach,
    open_ports,
    stop,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "absent"], "default": "started"},
            "host": {"type": "str", "required": True},
            "token": {"type": "str", "required": True, "no_log": True},
            "address": {"type": "str", "default": ""},
            "store_port": {"type": "int", "default": 0},
            "ports": {"type": "list", "elements": "int", "default": []},
            "limit": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    p = module.params
    if p["state"] == "absent":
        module.exit_json(changed=False, found=stop(p["token"]))
    try:
        listener = Listener(p["host"], p["token"], p["limit"])
    except OSError as error:
        module.fail_json(msg=f"No listener could be started: {error.strerror or error}.")
    opened, held = open_ports(listener, p["address"], p["store_port"], p["ports"])
    pid = detach(listener, p["limit"])
    module.exit_json(changed=False, ports=opened, held=held, pid=pid)


if __name__ == "__main__":
    main()
