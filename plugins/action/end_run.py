"""End a run on a host and record who ended it, in one task. See the module's docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase

KNOWN = ("rank", "step", "num_iterations", "loss", "val_bpb", "tok_per_s")
"""What the first heartbeat knows of the run."""


def outcome_of(state: Mapping[str, Any], kind: str, reason: str) -> dict[str, Any]:
    """An outcome for a host whose ranks were ended from outside, with what its first heartbeat knew."""
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
            # What the ranks record of their own end comes after the stop.
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
        """Write the outcome. That of a rank is kept, unless it only knows that systemd ended it."""
        kind = asked["outcome"]
        text = json.dumps(outcome_of(state, kind, asked["reason"]), indent=2) + "\n"
        # Settled: nobody wants another attempt. A host that shuts down ends its ranks unasked.
        replace = kind == "stopped" and not (state.get("outcome") or {}).get("settled")
        files = {"outcome.json": text}
        done: dict[str, Any] = module(
            "run_directory", path=state["run_dir"], user=asked["user"], files=files, replace=replace
        )
        return done
