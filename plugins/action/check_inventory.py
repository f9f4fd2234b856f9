"""Check that the inventory is a fleet, on the controller. See the module's docs."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import inventory_findings


class ActionModule(ActionBase):
    """Takes the groups as arguments: an action reads no group by its name."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result | reported(list(inventory_findings(**self._task.args)))
