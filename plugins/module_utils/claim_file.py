# SPDX-License-Identifier: MIT
"""The claim of a host: the file that names the fleet which the host serves.

The functions read and make its text, and decide whether a fleet may change the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import parse_ip

SCHEMA = 1


def parse(text: str, path: str, host: str) -> dict[str, Any]:
    """The claim in the text of a claim file; {} if the text is empty.

    Keys: schema, fleet_id, hosts ({name: address}), by and at (who made it, and when), controllers
    (addresses). path, host: the file and its host, for messages. Raises ValueError if the text is no claim,
    or the claim of a newer release of nanofleet.
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
            f"release knows {SCHEMA}). Fix: update this release as docs/how-to/upgrade.md shows, or type the "
            "command in a checkout of the newer one."
        )
    names = {"fleet_id", "hosts", "by", "at"}
    if not isinstance(schema, int) or not names <= set(claim) or not isinstance(claim["hosts"], dict):
        raise ValueError(
            f"The file {path} on {host}, which names the fleet that {host} serves, is damaged. Fix: read it, "
            f"and remove it if it is of no use: sudo rm {path}  (on {host})"
        )
    return dict(claim)


def refusal(
    claim: dict[str, Any], fleet_id: str, hosts: dict[str, str], host: str, partial: bool = False
) -> str:
    """Why this fleet may not change a host, as a message; "" if it may.

    claim: the claim of the host (see `parse`). fleet_id: name of this fleet. hosts: {name: address} of the
    hosts of this fleet. host: name of the host to change. partial: if True, the claim also counts as
    this fleet's if its hosts are a subset of `hosts`, or `hosts` a subset of its hosts.
    """
    if not claim or claim["fleet_id"] == fleet_id or claim["hosts"] == hosts:
        return ""
    claimed, asked = claim["hosts"].items(), hosts.items()
    if partial and (claimed <= asked or asked <= claimed):
        return ""
    others = ", ".join(f"{name} ({address})" for name, address in claim["hosts"].items())
    return (
        f"{host} serves the fleet {claim['fleet_id']}: {others}; set up by {claim['by']} at {claim['at']}. "
        f"This fleet is {fleet_id}, and a host serves one fleet at a time. "
        f"Fix: if both are the same fleet, put fleet_id: {claim['fleet_id']} into group_vars/fleet.yml of "
        f"the inventory; if {host} is to leave the other fleet: "
        f"ansible-playbook reset.yml -e fleet_id={claim['fleet_id']} -e reset_confirm=true --limit {host}"
    )


def routable(address: str) -> str:
    """An IP address in canonical form; "" for a loopback or link-local address and for any other text."""
    parsed = parse_ip(address)
    return "" if parsed is None or parsed.is_loopback or parsed.is_link_local else str(parsed)


def merge(claim: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The new claim of a host: the content of the file that names its fleet (keys: see `parse`).

    claim: the old claim, {} for none; its `by` and `at` are kept. params: options of the module fleet_claim:
    fleet_id, hosts, by, at, controllers (addresses; None: those of the old claim) and controller (the address
    of this controller, which is added to them). Loopback and link-local addresses are left out.
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


def claim_text(claim: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """The text of the file with the new claim. claim, params: as for `merge`."""
    return json.dumps(merge(claim, params), indent=2) + "\n"


def refusals(
    texts: Mapping[str, str],
    fleet_id: str,
    hosts: Mapping[str, Any],
    partial: bool = False,
    path: str = "/opt/nanofleet/fleet.json",
) -> list[str]:
    """Messages about the hosts whose claim is damaged or names another fleet; [] if there are none.

    texts: {host: text of its claim file}. fleet_id, hosts, partial: as for `refusal`. path: the path of
    the claim file on the hosts.
    """
    addresses = {name: str(address) for name, address in hosts.items()}
    found = []
    for host, text in texts.items():
        try:
            found.append(refusal(parse(text, path, host), fleet_id, addresses, host, partial))
        except ValueError as error:
            found.append(str(error))
    return [each for each in found if each]
