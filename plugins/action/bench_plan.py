"""Action plugin: select the benchmark cases that bench.yml measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import bench_plan
from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction


class ActionModule(ControllerAction):
    """The action `bench_plan`. It reads the result files of earlier measurements on the controller."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in asked.items() if name not in ("folder", "again")}
        plan, files = bench_plan.bench_plan(**options), list(Path(asked["folder"]).glob("*.json"))
        done = [] if asked["again"] else bench_plan.measured(plan, files)
        left = [case for case in plan if case["name"] not in done]
        return {"left": left, "message": bench_plan.summary(plan, left)}
