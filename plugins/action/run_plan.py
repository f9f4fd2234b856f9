"""Action plugin: decide whether train.yml starts or resumes a run, leaves it unchanged or refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.controller_action import ControllerAction
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_plan import plan_run
from ansible_collections.nanofleet.fleet.plugins.module_utils.runtime_environments import not_set_up, skew
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed
from ansible_collections.nanofleet.fleet.trainer.code_digest import code_digest


class ActionModule(ControllerAction):
    """The action `run_plan`: decides from the states of all hosts, and compares what they have installed."""

    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        states: Mapping[str, Any] = asked["states"]
        manifests = {host: str(digest or "") for host, digest in asked["manifests"].items()}
        hosts = list(states)
        plan = plan_run(
            asked["config"],
            asked["run_id"],
            list(states.values()),
            hosts,
            manifests[hosts[0]],
            asked["shares"],
            {host: int(ranks) for host, ranks in asked["ranks"].items()},
        )
        problem = plan["message"] if plan["action"] == "refuse" else ""
        environments = asked.get("environments") or {}
        if plan["action"] != "none" and environments and not self._task.check_mode:
            installed = {host: facts for host, facts in environments.items() if facts}
            with_data = {host: {**facts, "dataset": manifests[host]} for host, facts in installed.items()}
            problem = problem or not_set_up(environments, manifests) or skew(with_data, code_digest())
        if problem:
            return {"failed": True, "msg": as_typed(problem)}
        return {**plan, "message": as_typed(plan["message"])}
