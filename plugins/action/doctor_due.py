"""Action plugin: decide whether the doctor checks the fleet before a run.

Options and result: plugins/modules/doctor_due.py.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import (
    due,
    fleet_state,
    kept_file,
    measured,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed


class ActionModule(ActionBase):
    """Compares the measurements with the fleet's last good report; connects to no host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked, hostvars = self._task.args, (task_vars or {})["hostvars"]
        hosts, kept = asked["hosts"], kept_file(asked["kept"], asked["hosts"])
        state = fleet_state(measured(hosts, hostvars), asked["limits"], hostvars)
        before = kept.read_text(encoding="utf-8") if kept.is_file() else ""
        return {**result, "changed": False, "reason": as_typed(due(state, before, asked["when"]))}
