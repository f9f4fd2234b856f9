#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: start or stop the listener that the other hosts probe, on the ports of a run."""

from __future__ import annotations

import errno

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_listener import Listener, detach, stop

DOCUMENTATION = r"""
module: doctor_listener
short_description: Start or stop the listener that other hosts probe
description:
  - Starts a process of the login user that listens as a run would - on the rendezvous store's port of all
    addresses, and on ports of Gloo's range of the chosen interface, one of which the kernel chooses.
  - The process writes no file, answers only callers with the token, and ends after 30 s without a caller.
  - A port that another process holds is only reported.
options:
  state:
    description: V(started) starts the listener, V(absent) stops it.
    type: str
    choices: [started, absent]
    default: started
  host: {description: Name of this host in the listener's answers., type: str, required: true}
  token: {description: "Secret of this examination, the same on all hosts.", type: str, required: true}
  address: {description: Address of the chosen interface., type: str, default: ""}
  store_port: {description: The rendezvous store's port; 0 for none., type: int, default: 0}
  ports: {description: Further ports of Gloo's range to listen on., type: list, elements: int, default: []}
  limit: {description: Seconds after which the listener ends in any case., type: int, default: 120}
attributes:
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Answer the other hosts
  nanofleet.fleet.doctor_listener:
    host: tower
    token: 6f1c0c3d
    address: 192.168.1.10
    store_port: 29500
    ports: [20000, 20500, 20999]
"""

RETURN = r"""
ports:
  description: Ports that it listens on - port, role (store or gloo), picked (chosen by the kernel).
  type: list
  elements: dict
  returned: when started
held:
  description: Ports that could not be opened - port, role, reason (held, or the kernel's message).
  type: list
  elements: dict
  returned: when started
pid: {description: Process id of the listener., type: int, returned: when started}
found: {description: Whether a listener was stopped., type: bool, returned: when absent}
"""


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
    wanted = [(0, "gloo", p["address"]), *((port, "gloo", p["address"]) for port in p["ports"])]
    if p["store_port"]:
        # torch's store listens on all addresses.
        wanted.insert(0, (p["store_port"], "store", ""))
    opened, held = [], []
    for port, role, address in wanted:
        try:
            opened.append({"port": listener.open(address, port), "role": role, "picked": port == 0})
        except OSError as error:
            reason = "held" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            held.append({"port": port, "role": role, "reason": reason})
    pid = detach(listener, p["limit"])
    module.exit_json(changed=False, ports=opened, held=held, pid=pid)


if __name__ == "__main__":
    main()
