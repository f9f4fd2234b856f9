"""The base of actions in front of modules that only read: what is known already is not read again."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class KnownAction(ActionBase):
    """Returns the option `known` of the module, a result of launch_state; without it calls the module."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        known = asked.pop("known", None)
        read = known or self._execute_module(self._task.action, asked, task_vars=task_vars)
        return {"changed": False, **result, **read}
