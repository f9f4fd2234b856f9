#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: probe the paths from this host to its peers, or measure the rates to one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_prober import PeerPath, probe

DOCUMENTATION = r"""
module: doctor_peers
short_description: Probe the listeners of the other hosts
description:
  - With O(measure=paths) probes all peers at once - route, each port, round-trip time, path MTU.
  - With O(measure=rates) sends a stream to each peer and receives one from it, one peer after the other.
options:
  token: {description: "Secret of this check, the same on all hosts.", type: str, required: true}
  measure: {description: What to measure., type: str, choices: [paths, rates], default: paths}
  seconds: {description: Seconds to stream in each direction., type: float, default: 0.8}
  peers:
    description: The peers to probe.
    type: list
    elements: dict
    required: true
    suboptions:
      host: {description: Name of the peer., type: str, required: true}
      address: {description: Address at which it listens., type: str, required: true}
      ports:
        description: Its listeners, C(ports) of the result of doctor_listener.
        type: list
        elements: dict
        required: true
      ssh_port: {description: "Its SSH port, tried if no other port is open.", type: int, default: 22}
attributes:
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Probe the paths to the peers
  nanofleet.fleet.doctor_peers:
    token: 6f1c0c3d
    peers:
      - {host: laptop, address: 192.168.1.11, ports: [{port: 20311, role: gloo}]}
"""

RETURN = r"""
peers:
  description: >-
    By name of the peer. With paths - route (interface, source), ports (port, role, state, detail, seen, ms),
    rtt_ms (min, median), mtu (sent, passes, swallowed), up. With rates - sent_mbit, received_mbit, or error.
  type: dict
  returned: always
"""


def main() -> None:
    peer_spec = {
        "host": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
        "ports": {"type": "list", "elements": "dict", "required": True},
        "ssh_port": {"type": "int", "default": 22},
    }
    module = AnsibleModule(
        argument_spec={
            "token": {"type": "str", "required": True, "no_log": True},
            "measure": {"type": "str", "choices": ["paths", "rates"], "default": "paths"},
            "seconds": {"type": "float", "default": 0.8},
            "peers": {"type": "list", "elements": "dict", "required": True, "options": peer_spec},
        },
        supports_check_mode=True,
    )
    p = module.params

    def measure(peer: dict[str, Any]) -> dict[str, Any]:
        path = PeerPath(peer["host"], peer["address"], p["token"])
        if p["measure"] == "paths":
            return probe(path, peer["ports"], peer["ssh_port"])
        try:
            return path.stream(peer["ports"][0]["port"], p["seconds"])
        except (OSError, ValueError, KeyError) as error:
            return {"error": str(error)}

    with ThreadPoolExecutor(max(1, len(p["peers"])) if p["measure"] == "paths" else 1) as pool:
        results = list(pool.map(measure, p["peers"]))
    names = [peer["host"] for peer in p["peers"]]
    module.exit_json(changed=False, peers=dict(zip(names, results, strict=True)))


if __name__ == "__main__":
    main()
