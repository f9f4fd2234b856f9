"""Print a host's part of a run's log as it grows. See the module's docs."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_logs import rendered

WAIT_SECONDS = 5
display = Display()


class ActionModule(ActionBase):
    """Runs on the controller, once a host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {})["inventory_hostname"]
        arguments = dict(self._task.args)
        while True:
            read = self._execute_module("nanofleet.fleet.run_log", arguments, task_vars=task_vars)
            if read.get("failed") or read.get("unreachable"):
                return {**result, **read}
            for line in read["lines"]:
                display.display(rendered(host, line))
            if read["ended"] and not (read["lines"] and arguments.get("cursor")):
                return {**result, "changed": False, "ended": True}
            arguments.update(cursor=read["cursor"], wait_seconds=WAIT_SECONDS, since="")
