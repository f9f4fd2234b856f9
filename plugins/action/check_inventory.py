"""Action plugin: check that the inventory describes a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import inventory_findings


class ActionModule(ControllerAction):
    """The action `check_inventory`. The task passes the hosts of each group as arguments."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        given = {host: variables["hostvars"][host].get("ansible_become", False) for host in asked["members"]}
        as_root = [host for host, value in given.items() if boolean(value, strict=False)]
        return reported(list(inventory_findings(**asked, as_root=as_root)))
