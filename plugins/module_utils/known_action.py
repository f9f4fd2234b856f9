"""The base class of actions that read facts of a host, unless launch_state has read the same facts before."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class KnownAction(ActionBase):
    """The base class of an action that calls the module of the same name, which changes nothing.

    The option `known` is a part of the result of launch_state. If it is given and not empty, the action
    returns it and does not call the module.
    """

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        known = asked.pop("known", None)
        read = known or self._execute_module(self._task.action, asked, task_vars=task_vars)
        return {"changed": False, **result, **read}
