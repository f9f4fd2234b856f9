"""Finds the coordinator of an inventory with ansible-inventory, and the address of its tracker."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet import ROOT, FleetError
from fleet.playbooks import environment

TRACKER_PORT = 5000


@dataclass(frozen=True)
class Coordinator:
    """The host of rank 0, as this machine reaches it.

    address: name or IP address. user: the SSH user; "" for the default. tracker_port: port of the MLflow
    server.
    """

    address: str
    user: str = ""
    tracker_port: int = TRACKER_PORT


def usual() -> list[str]:
    """The inventories that Ansible reads without -i: those of ANSIBLE_INVENTORY, else inventory/lab."""
    given = os.environ.get("ANSIBLE_INVENTORY", "")
    return given.split(",") if given else [str(ROOT / "inventory" / "lab")]


def _shown(inventory: str | None) -> str:
    """The inventory for a message, as a person types it."""
    return inventory or os.environ.get("ANSIBLE_INVENTORY") or "inventory/lab"


def read(inventory: str | None, extra: Sequence[str] = ()) -> Coordinator:
    """Read an inventory with ansible-inventory; returns its coordinator.

    inventory: path of the inventory; None: that of `usual`. extra: `-e` options, which override
    variables of the inventory. Raises FleetError if Ansible cannot read the inventory, or if it does not have
    exactly one coordinator.
    """
    if inventory and "," not in inventory and not Path(inventory).exists():
        raise FleetError(
            f"There is no inventory at {inventory}. Copy inventory/sample and list your hosts in it."
        )
    where = (
        ["-i", str(Path(inventory).absolute()) if "," not in inventory else inventory] if inventory else []
    )
    command = ["ansible-inventory", *where, *extra, "--list"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise FleetError(
            f"Ansible cannot read the inventory {_shown(inventory)}:\n{done.stderr.strip()}\n"
            f"Check it: ansible-inventory {f'-i {inventory} ' if inventory else ''}--list"
        )
    return from_listing(json.loads(done.stdout), inventory)


def from_listing(listing: dict[str, Any], inventory: str | None) -> Coordinator:
    """The coordinator in `listing`, the parsed output of ``ansible-inventory --list``.

    inventory: path of the inventory, for the message; None: that of `usual`. Raises FleetError if the
    inventory does not have exactly one coordinator.
    """
    name = _shown(inventory)
    coordinators = _members(listing, "coordinator")
    if not coordinators:
        raise FleetError(
            f"The inventory {name} has no host in the group 'coordinator'. Name yours with "
            "-i (see inventory/sample), or create a lab: ansible-playbook lab.yml"
        )
    if len(coordinators) > 1:
        raise FleetError(
            f"The inventory {name} has {len(coordinators)} coordinators ({', '.join(coordinators)}); "
            "keep one, and move the others to the group 'workers'."
        )
    [host] = coordinators
    own = listing.get("_meta", {}).get("hostvars", {}).get(host, {})
    address = str(own.get("fleet_address") or own.get("ansible_host") or host)
    port = str(own.get("tracker_port", TRACKER_PORT))
    user = str(own.get("ansible_user") or "")
    return Coordinator(address, user, int(port) if port.isdecimal() else TRACKER_PORT)


def _members(listing: dict[str, Any], group: str) -> list[str]:
    found = list(listing.get(group, {}).get("hosts", []))
    for child in listing.get(group, {}).get("children", []):
        found += [host for host in _members(listing, child) if host not in found]
    return found


def tracker(coordinator: Coordinator) -> str:
    """The address of the MLflow page, as text.

    If this machine cannot reach the page, the text also has the ssh command for a tunnel.
    """
    address, port = coordinator.address, coordinator.tracker_port
    url = f"http://{address}:{port}"
    try:
        # Without a proxy: the addresses of a lab exist on this machine only.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/health", timeout=4):
            return f"{url} (answers from this machine)"
    except (urllib.error.URLError, OSError):
        login = f"{coordinator.user}@{address}" if coordinator.user else address
        return (
            f"{url} (not open to this machine; type: ssh -N -L {port}:{address}:{port} {login}"
            f" and open http://localhost:{port})"
        )
