"""Action plugin: check the settings in the extra vars and in the inventory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.utils.vars import load_extra_vars
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import (
    check,
    declared,
    known_names,
    wired,
)
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig


class ActionModule(ControllerAction):
    """The action `check_settings`: compares extra vars and inventory variables with the known settings."""

    _VALID_ARGS = frozenset({"hosts"})

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        # playbooks/group_vars/all.yml computes its values; they are not set in the inventory.
        wanted = {*known_names(), *RunConfig.field_names()} - (wired() - declared().keys())
        hostvars = variables.get("hostvars", {})
        inventory = {
            host: {name: hostvars[host][name] for name in wanted if name in hostvars[host]}
            for host in asked.get("hosts") or []
            if host in hostvars
        }
        return reported(check(dict(load_extra_vars(self._loader)), inventory))
