"""Action plugin: call the module doctor_peers, unless the host has no peer to probe."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action `doctor_peers`: calls the module of this name for the hosts in the option `peers`.

    The value `peers` of the result has the measurements of this call, and those in the option `before`, the
    value `peers` of an earlier call. If the option `peers` is empty, nothing is measured. The doctor measures
    rates in rounds, in each of which a host has one peer or none.
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
