"""End the run that is up on a host at once: what is there is read and ended in one task.

Options: `state_dir`, `user` (see run_state), `run_id` (empty for the one that is up), `ports`,
`grace` (seconds until SIGKILL). One task, because a host that does not answer keeps all others waiting
between two.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Calls the modules run_state and transient_unit on the host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        where = {name: asked[name] for name in ("state_dir", "user", "run_id")}
        state = self._execute_module("run_state", where, task_vars=task_vars)
        if state.get("failed") or state.get("unreachable"):
            return {**result, **state}
        if state["ended"]:
            return {**result, "changed": False, "ended": []}
        unit = {"name": state["unit"]["name"], "state": "absent", "timeout": 20}
        unit |= {"ports": asked["ports"], "grace": asked["grace"]}
        done = self._execute_module("transient_unit", unit, task_vars=task_vars)
        return {**result, **done, "run_id": state["run_id"]}
