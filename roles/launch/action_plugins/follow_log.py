"""Print a host's part of a run's log as it grows, until the run has ended there or Ctrl-C.

Takes the options of the module run_log, which it calls again and again on the host; every host has such a
loop of its own, so that the lines of all come as they are said.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

WAIT_SECONDS = 5
# The filters of logs.yml, for the form of a line.
LOGS = Path(__file__).resolve().parents[1] / "filter_plugins" / "launch_logs.py"
logs = SimpleNamespace(**runpy.run_path(str(LOGS)))
display = Display()


class ActionModule(ActionBase):
    """Runs on the controller, once a host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {})["inventory_hostname"]
        arguments = dict(self._task.args)
        while True:
            read = self._execute_module("run_log", arguments, task_vars=task_vars)
            if read.get("failed") or read.get("unreachable"):
                return {**result, **read}
            for line in read["lines"]:
                display.display(logs.rendered(host, line))
            if read["ended"] and not (read["lines"] and arguments.get("cursor")):
                return {**result, "changed": False, "ended": True}
            arguments.update(cursor=read["cursor"], wait_seconds=WAIT_SECONDS, since="")
