"""Action plugin: check the settings in the extra vars and in the inventory.

Options and result: plugins/modules/check_settings.yml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.utils.vars import load_extra_vars
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.settings_check import (
    check,
    known_names,
    read_yaml,
    role_names,
)
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig

COLLECTION = Path(__file__).resolve().parents[2]
ROLES = COLLECTION / "roles"
DECLARED = ROLES / "preflight" / "vars" / "declared_settings.yml"
WIRING = COLLECTION / "playbooks" / "group_vars" / "all.yml"


class ActionModule(ControllerAction):
    """Compares extra vars and the hosts' inventory variables with the names that are known."""

    _VALID_ARGS = frozenset({"hosts"})

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        known = known_names(ROLES, WIRING, DECLARED)
        internal = role_names(ROLES, WIRING).keys() - known.keys()
        # playbooks/group_vars/all.yml computes its values; they are not set in the inventory.
        wired = {*read_yaml(WIRING)} - {*read_yaml(DECLARED)["preflight_declared_settings"]}
        wanted = {*known, *RunConfig.field_names()} - wired
        hostvars = variables.get("hostvars", {})
        inventory = {
            host: {name: hostvars[host][name] for name in wanted if name in hostvars[host]}
            for host in asked.get("hosts") or []
            if host in hostvars
        }
        given = dict(load_extra_vars(self._loader))
        return reported(check(given, inventory, known, RunConfig, internal))
