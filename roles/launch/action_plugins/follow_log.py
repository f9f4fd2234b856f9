"""Print a host's part of a run's log as it grows, until the run has ended there or Ctrl-C.

Takes the options of the module run_log, which it calls again and again on the host; every host has such a
loop of its own, so that the lines of all come as they are said.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

WAIT_SECONDS = 5
display = Display()


def _logs() -> Any:
    """The filters of logs.yml, for the form of a line."""
    path = Path(__file__).resolve().parents[1] / "filter_plugins" / "launch_logs.py"
    spec = importlib.util.spec_from_file_location("launch_logs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ActionModule(ActionBase):
    """Runs on the controller, once a host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        logs, host = _logs(), (task_vars or {})["inventory_hostname"]
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
