"""Action plugin: check that the inventory describes a fleet.

Options and result: plugins/modules/check_inventory.py.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import reported
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import inventory_findings


class ActionModule(ActionBase):
    """Gets the groups as arguments, so that it reads no group by its name."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result | reported(list(inventory_findings(**self._task.args)))
