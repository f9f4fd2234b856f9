"""Action plugin: call the module doctor_peers, except in a round in which the host has no partner."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Calls the module doctor_peers, if there is a peer, and adds its result to that of earlier rounds."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        before = asked.pop("before", None) or {}
        if not asked["peers"]:
            return {**result, "changed": False, "peers": before}
        read = self._execute_module(self._task.action, asked, task_vars=task_vars)
        return {**result, **read, "peers": {**before, **(read.get("peers") or {})}}
