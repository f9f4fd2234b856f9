#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: compare a host with what setup.yml makes; if it is the same, start the probe listener."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils import host_state, peer_listener, secret_file
from ansible_collections.nanofleet.fleet.plugins.module_utils.interface_route import owned_by, route_to
from ansible_collections.nanofleet.fleet.plugins.module_utils.network_reading import read_network
from ansible_collections.nanofleet.fleet.plugins.module_utils.ufw_rules import TIMER

ADDED = ("ufw", "show", "added")
STATUS = ("ufw", "status")
TIMER_STATE = ("systemctl", "is-active", f"{TIMER}.timer")


def listen(p: dict[str, Any], address: str) -> dict[str, Any]:
    """Open the ports that the peers probe, and start the listener on them if there are peers.

    Returns {"ports", "held"}: the ports that were opened, and those that could not be (see `open_ports`).
    p: options of the module host_state. address: the address of this host on which it listens.
    """
    peers, asked = p["network"]["peers"], p["listener"]
    listener = peer_listener.Listener(p["host"], p["token"], asked["limit"], callers=len(peers))
    opened, held = peer_listener.open_ports(listener, address, asked["store_port"], asked["ports"])
    if peers:
        peer_listener.detach(listener, asked["limit"], p["user"])
    return {"ports": opened, "held": held}


def read(p: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Read what setup.yml makes on this host, and listen if nothing differs; returns the module's result.

    In the result, `differences` has a phrase for each difference. If the claim differs, nothing else is read.
    p: options of the module. check_mode: do not store the sha256 of the data files.
    """
    differences = list(host_state.claim_differences(p["claim"], p["host"]))
    if differences:
        return {"differences": differences}
    ufw = {"added": ADDED, "status": STATUS, "timer": TIMER_STATE}
    commands = host_state.Commands({**ufw, "filter": host_state.FILTER_TEST})
    network = read_network(list(p["network"]["peers"].values()) or [p["network"]["outside"]])
    found = owned_by(network)
    interface = route_to(p["host"], p["network"]["peers"], network, found, p["network"]["override"])
    address, user, data = interface[1], p["user"], p["data"]
    differences += host_state.account_differences(user, p["account"], p["login"])
    differences += host_state.folder_differences(p["folders"])
    differences += secret_file.differences(p["secret"], host_state.groups_of(user)[0])
    differences += host_state.data_differences(
        data["path"], user, data["mode"], data["manifest_sha256"], not check_mode, data["core_sha256"]
    )
    state: dict[str, Any] = {
        "network": {**network, "peers": p["network"]["peers"], "override": p["network"]["override"]},
        "address": address,
        "controllers": host_state.controllers(p["claim"], p["host"]),
        "ports": host_state.ports({**p["ports"], "user": user}),
        "secret": secret_file.digest(p["secret"]),
        "python": host_state.python_version(p["python"]),
        "machine": host_state.machine(),
        "environments": {
            each["name"]: host_state.environment(each["link"], each["venvs"], p["python"])
            for each in p["environments"]
        },
        "tracker": host_state.tracker(p["tracker"], address) if p["tracker"] else {},
        "firewall": host_state.firewall(commands),
        "filter": commands.answer("filter")[1].strip(),
    }
    if state["ports"]["changed"]:
        differences.append("its range of ephemeral ports is another one")
    if address and not differences:
        state["listening"] = listen(p, address)
    return {"differences": differences, **state}


def main() -> None:
    claim_spec = {
        "path": {"type": "path", "required": True},
        "fleet_id": {"type": "str", "required": True},
        "hosts": {"type": "dict", "required": True},
        "controller": {"type": "str", "default": ""},
        "controllers": {"type": "list", "elements": "str"},
        "by": {"type": "str", "default": ""},
        "at": {"type": "str", "default": ""},
    }
    network_spec = {
        "peers": {"type": "dict", "required": True},
        "outside": {"type": "str", "required": True},
        "override": {"type": "str", "default": ""},
    }
    ports_spec = {
        "low": {"type": "int", "required": True},
        "high": {"type": "int", "required": True},
        "path": {"type": "path", "required": True},
        "fleet": {"type": "str", "default": ""},
    }
    account_spec = {
        "comment": {"type": "str", "required": True},
        "home": {"type": "str", "required": True},
        "shell": {"type": "str", "required": True},
    }
    folder_spec = {
        "path": {"type": "path", "required": True},
        "owner": {"type": "str", "required": True},
        "mode": {"type": "str", "default": ""},
        "needed": {"type": "bool", "default": True},
    }
    environment_spec = {
        "name": {"type": "str", "required": True},
        "link": {"type": "path", "required": True},
        "venvs": {"type": "path", "required": True},
    }
    data_spec = {
        "path": {"type": "path", "required": True},
        "mode": {"type": "str", "required": True},
        "manifest_sha256": {"type": "str", "required": True},
        "core_sha256": {"type": "str", "default": ""},
    }
    tracker_spec = {
        "path": {"type": "path", "required": True},
        "folder": {"type": "path", "required": True},
        "unit": {"type": "str", "required": True},
        "login": {"type": "path", "required": True},
        "stamp": {"type": "path", "required": True},
        "port": {"type": "int", "required": True},
    }
    listener_spec = {
        "store_port": {"type": "int", "default": 0},
        "ports": {"type": "list", "elements": "int", "required": True},
        "limit": {"type": "int", "default": 60},
    }
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "token": {"type": "str", "required": True, "no_log": True},
            "user": {"type": "str", "required": True},
            "login": {"type": "str", "default": ""},
            "python": {"type": "path", "required": True},
            "secret": {"type": "path", "required": True, "no_log": False},
            "claim": {"type": "dict", "required": True, "options": claim_spec},
            "network": {"type": "dict", "required": True, "options": network_spec},
            "ports": {"type": "dict", "required": True, "options": ports_spec},
            "account": {"type": "dict", "required": True, "options": account_spec},
            "folders": {"type": "list", "elements": "dict", "required": True, "options": folder_spec},
            "environments": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": environment_spec,
            },
            "data": {"type": "dict", "required": True, "options": data_spec},
            "tracker": {"type": "dict", "options": tracker_spec},
            "listener": {"type": "dict", "required": True, "options": listener_spec},
        },
        supports_check_mode=True,
    )
    try:
        state = read(module.params, module.check_mode)
    except (OSError, ValueError) as error:
        # With a difference, setup.yml runs its roles, and the role concerned reports the error.
        state = {"differences": [str(error)]}
    module.exit_json(changed=False, **state)


if __name__ == "__main__":
    main()
