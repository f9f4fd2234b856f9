#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: the claim, a file on a host that names the fleet which the host serves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import parse_ip

SCHEMA = 1


def parse(text: str, path: str, host: str) -> dict[str, Any]:
    """The claim in the text of a claim file as a dict; {} if the text is empty. Raises ValueError.

    path, host: of the file, for messages.
    """
    if not text:
        return {}
    try:
        claim = json.loads(text)
    except ValueError:
        claim = None
    schema = claim.get("schema") if isinstance(claim, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise ValueError(
            f"{host} was set up by a newer release of nanofleet ({path} has schema {schema}, this "
            f"release knows {SCHEMA}). Use that release."
        )
    names = {"fleet_id", "hosts", "by", "at"}
    if not isinstance(schema, int) or not names <= set(claim) or not isinstance(claim["hosts"], dict):
        raise ValueError(
            f"{path} on {host} names no fleet: it is damaged. Read it, and remove it if it is of no use: "
            f"sudo rm {path}  (on {host})"
        )
    return dict(claim)


def refusal(
    claim: dict[str, Any], fleet_id: str, hosts: dict[str, str], host: str, partial: bool = False
) -> str:
    """Why this fleet must not change a host that has this claim, as a message; "" if it may.

    claim: the content of the file on the host. fleet_id: the name of this fleet. hosts: {name: address} of
    its hosts. partial: whether a claim with more or fewer of these hosts is of the same fleet.
    """
    if not claim or claim["fleet_id"] == fleet_id or claim["hosts"] == hosts:
        return ""
    claimed, asked = claim["hosts"].items(), hosts.items()
    if partial and (claimed <= asked or asked <= claimed):
        return ""
    others = ", ".join(f"{name} ({address})" for name, address in claim["hosts"].items())
    return (
        f"{host} serves the fleet {claim['fleet_id']}: {others}; set up by {claim['by']} at {claim['at']}. "
        f"This fleet is {fleet_id}, and a host serves one fleet at a time. If both are the same fleet, put "
        f"fleet_id: {claim['fleet_id']} into group_vars/fleet.yml of the inventory. If {host} is to leave "
        f"the other fleet: ansible-playbook reset.yml -e fleet_id={claim['fleet_id']} -e reset_confirm=true "
        f"--limit {host}"
    )


def routable(address: str) -> str:
    """An address in its usual form; empty for loopback and for link-local ones."""
    parsed = parse_ip(address)
    return "" if parsed is None or parsed.is_loopback or parsed.is_link_local else str(parsed)


def merge(claim: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The new claim. `by` and `at` of the old claim are kept.

    The controller's address is added to the old controllers, or to those that params["controllers"] gives.
    """
    known = params["controllers"] if params["controllers"] is not None else claim.get("controllers", [])
    found = [routable(address) for address in [*known, params["controller"]]]
    return {
        "schema": SCHEMA,
        "fleet_id": params["fleet_id"],
        "hosts": {name: str(address) for name, address in params["hosts"].items()},
        "by": claim.get("by") or params["by"],
        "at": claim.get("at") or params["at"],
        "controllers": list(dict.fromkeys(filter(None, found))),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["claimed", "checked", "absent"], "default": "checked"},
            "fleet_id": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "hosts": {"type": "dict", "default": {}},
            "partial": {"type": "bool", "default": False},
            "by": {"type": "str", "default": ""},
            "at": {"type": "str", "default": ""},
            "controller": {"type": "str", "default": ""},
            "controllers": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    params = module.params
    path, state = params["path"], params["state"]
    try:
        before = Path(path).read_text(encoding="utf-8") if os.path.exists(path) else ""
        claim = parse(before, path, params["host"])
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    wanted = merge(claim, params)
    refused = refusal(claim, params["fleet_id"], wanted["hosts"], params["host"], params["partial"])
    after = {"claimed": json.dumps(wanted, indent=2) + "\n", "checked": before, "absent": ""}[state]
    after = before if refused else after
    if after != before and not module.check_mode:
        try:
            write_whole(path, after) if after else os.unlink(path)
            if not after and not os.listdir(os.path.dirname(path)):
                os.rmdir(os.path.dirname(path))
        except OSError as error:
            module.fail_json(msg=f"The claim {path} on {params['host']} could not be changed: {error}")
    old = claim.get("fleet_id", "")
    module.exit_json(
        changed=after != before,
        refusal=refused,
        renamed=old if old != params["fleet_id"] and not refused else "",
        controllers=wanted["controllers"],
        removed=[path] if before and not after else [],
        diff={"before": before, "after": after, "before_header": path, "after_header": path},
    )


if __name__ == "__main__":
    main()
