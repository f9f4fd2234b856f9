"""The base of actions that call a module which only reads, unless launch_state has read the same before."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class KnownAction(ActionBase):
    """The base class of these actions. An action has the name of its module.

    If the option `known`, a part of the result of launch_state, is given, it is the result. Else the module
    is called on the host.
    """

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        known = asked.pop("known", None)
        read = known or self._execute_module(self._task.action, asked, task_vars=task_vars)
        return {"changed": False, **result, **read}
