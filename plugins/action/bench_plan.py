"""Action plugin: select the benchmark cases that bench.yml measures.

Options and result: plugins/modules/bench_plan.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils import bench_plan


class ActionModule(ActionBase):
    """Reads the results of earlier measurements on the controller; connects to no host."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        folder, again = Path(asked.pop("folder")), asked.pop("again")
        plan = bench_plan.bench_plan(**asked)
        done = [] if again else bench_plan.bench_measured(plan, list(folder.glob("*.json")))
        left = [stage for stage in plan if stage["name"] not in done]
        return {**result, "changed": False, "left": left, "message": bench_plan.bench_says(plan, left)}
