"""Action plugin: call the module doctor_peers, unless the host has no peer to probe."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action `doctor_peers`: calls the module of this name, if the option `peers` is not empty.

    The doctor measures rates in rounds, in each of which a host has at most one peer. The option `before` has
    the results of the earlier rounds; the result of this round is added to them.
    """

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        before = asked.pop("before", None) or {}
        if not asked["peers"]:
            return {**result, "changed": False, "peers": before}
        read = self._execute_module(self._task.action, asked, task_vars=task_vars)
        return {**result, **read, "peers": {**before, **(read.get("peers") or {})}}
