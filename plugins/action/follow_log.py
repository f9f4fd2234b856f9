"""Action plugin: print the log of a run on one host until the run has ended there."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_logs import rendered

WAIT_SECONDS = 5
display = Display()


class ActionModule(ActionBase):
    """The action `follow_log`: calls the module run_log repeatedly, and prints its lines."""

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
