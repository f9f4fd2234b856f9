"""End the active run of a host at once, in one task. See the module's docs."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Calls the modules run_state and transient_unit on the host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        where = {name: asked[name] for name in ("state_dir", "user", "run_id")}
        state = self._execute_module("nanofleet.fleet.run_state", where, task_vars=task_vars)
        if state.get("failed") or state.get("unreachable"):
            return {**result, **state}
        if state["ended"]:
            return {**result, "changed": False, "ended": []}
        unit = {"name": state["unit"]["name"], "state": "absent", "timeout": 20}
        unit |= {"ports": asked["ports"], "grace": asked["grace"]}
        done = self._execute_module("nanofleet.fleet.transient_unit", unit, task_vars=task_vars)
        return {**result, **done, "run_id": state["run_id"]}
