"""Action plugin: end a run on a host and record the outcome, in one task.

Options and result: plugins/modules/end_run.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import is_settled

KNOWN = ("rank", "step", "num_iterations", "loss", "val_bpb", "tok_per_s")
"""Fields that the outcome takes from the first heartbeat."""


def outcome_of(state: Mapping[str, Any], kind: str, reason: str) -> dict[str, Any]:
    """The content of outcome.json for a host whose ranks were ended from outside.

    state: result of run_state, whose first heartbeat gives the step, loss and so on. kind: stopped or
    retryable.
    """
    beat = (state.get("heartbeats") or [{}])[0]
    return {
        "run_id": state["run_id"],
        "outcome": kind,
        "reason": reason,
        "settled": kind == "stopped",
        **{name: beat.get(name) for name in KNOWN},
        "first_loss": None,
        "checkpoint": state.get("checkpoint"),
        "sample": None,
        "seconds": None,
        "time": state["time"],
    }


class ActionModule(ActionBase):
    """Calls the modules run_state, transient_unit and run_directory on the host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        asked = dict(self._task.args)
        where = {name: asked[name] for name in ("state_dir", "user", "run_id")}
        where["log_lines"] = asked.get("log_lines", 20)

        def module(name: str, /, **args: Any) -> dict[str, Any]:
            done: dict[str, Any] = self._execute_module(f"nanofleet.fleet.{name}", args, task_vars=task_vars)
            return done

        state = module("run_state", **where)
        if state.get("failed") or state.get("unreachable"):
            return {**result, **state}
        if not asked["run_id"] and state["ended"]:
            return {**result, "changed": False, "ended": [], "state": state}
        where["run_id"] = state["run_id"]
        unit = {"name": f"nanofleet-{state['run_id']}", "state": "absent", "timeout": 20}
        done = module("transient_unit", **unit, ports=asked["ports"], grace=asked.get("grace", -1))
        if done.get("failed") or done.get("unreachable"):
            return {**result, **done}
        if done["changed"] and not self._task.check_mode:
            # The ranks write their outcome while they are stopped: read it afterwards.
            state = module("run_state", **where)
            if state.get("found"):
                written = self._record(module, state, asked)
                if written.get("failed") or written.get("unreachable"):
                    return {**result, **written}
                state = module("run_state", **where)
        if state.get("failed") or state.get("unreachable"):
            return {**result, **state}
        return {**result, **done, "run_id": where["run_id"], "state": state}

    @staticmethod
    def _record(module: Any, state: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """Write outcome.json through run_directory; returns that module's result.

        The outcome of a rank is kept unless `settled` is false: then systemd ended the rank.
        """
        kind = asked["outcome"]
        text = json.dumps(outcome_of(state, kind, asked["reason"]), indent=2) + "\n"
        replace = kind == "stopped" and not is_settled(state.get("outcome") or {})
        files = {"outcome.json": text}
        done: dict[str, Any] = module(
            "run_directory", path=state["run_dir"], user=asked["user"], files=files, replace=replace
        )
        return done
