"""Action plugin: end a run on a host and record the outcome, in one task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ansible.plugins.action import ActionBase

KNOWN = ("rank", "step", "num_iterations", "loss", "val_bpb", "tok_per_s")
"""Fields that the outcome takes from the first run status."""


def outcome_of(state: Mapping[str, Any], kind: str, reason: str) -> dict[str, Any]:
    """The content of outcome.json for a host whose ranks were ended from outside.

    state: the result of run_state, whose first run status gives step, loss and other figures. kind: stopped
    or retryable. reason: a sentence.
    """
    status = (state.get("heartbeats") or [{}])[0]
    return {
        "run_id": state["run_id"],
        "outcome": kind,
        "reason": reason,
        "settled": kind == "stopped",
        **{name: status.get(name) for name in KNOWN},
        **dict.fromkeys(("first_loss", "sample", "seconds")),
        "checkpoint": state.get("checkpoint"),
        "time": state["time"],
    }


class FailedError(Exception):
    """Raised if a module has failed or the host does not answer; `args[0]` is the result of the module."""


class ActionModule(ActionBase):
    """The action `end_run`. It calls the modules run_state, transient_unit and run_directory on the host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)

        def module(name: str, /, **args: Any) -> dict[str, Any]:
            done: dict[str, Any] = self._execute_module(f"nanofleet.fleet.{name}", args, task_vars=task_vars)
            if done.get("failed") or done.get("unreachable"):
                raise FailedError(done)
            return done

        try:
            return {**result, **self._end(module, self._task.args)}
        except FailedError as error:
            return {**result, **error.args[0]}

    def _end(self, module: Callable[..., dict[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
        where = {name: options[name] for name in ("state_dir", "user", "run_id")}
        where["log_lines"] = options.get("log_lines", 20)
        state = module("run_state", **where)
        if not options["run_id"] and state["ended"]:
            return {"changed": False, "ended": [], "state": state}
        where["run_id"] = state["run_id"]
        unit = {"name": f"nanofleet-{state['run_id']}", "state": "absent", "timeout": 20}
        done = module("transient_unit", **unit, ports=options["ports"], grace=options.get("grace", -1))
        if done["changed"] and not self._task.check_mode:
            # The ranks write their outcome while they are stopped: read it afterwards.
            state = module("run_state", **where)
            if state.get("found"):
                self._record(module, state, options)
                state = module("run_state", **where)
        return {**done, "run_id": where["run_id"], "state": state}

    @staticmethod
    def _record(module: Callable[..., Any], state: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Write outcome.json, except over the outcome of a rank that was asked to stop or cannot continue."""
        kind = options["outcome"]
        text = json.dumps(outcome_of(state, kind, options["reason"]), indent=2) + "\n"
        # The outcome of a rank that systemd ended without a request, as at a shutdown, is not settled.
        replace = kind == "stopped" and not (state.get("outcome") or {}).get("settled")
        files = {"outcome.json": text}
        module("run_directory", path=state["run_dir"], user=options["user"], files=files, replace=replace)
