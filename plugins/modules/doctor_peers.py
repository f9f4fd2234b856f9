#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: probe the paths from this host to its peers, or measure the rates to and from each peer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.peer_prober import PeerPath, end, probe


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
            "done_as": {"type": "str", "default": ""},
            "before": {"type": "dict", "default": {}},
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
    if p["done_as"]:
        for peer in p["peers"]:
            end(PeerPath(peer["host"], peer["address"], p["token"]), peer["ports"], p["done_as"])
    names = [peer["host"] for peer in p["peers"]]
    module.exit_json(changed=False, peers=dict(zip(names, results, strict=True)))


if __name__ == "__main__":
    main()
