#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: end a run on a host and record the outcome, in one call."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_folder import make
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_reading import await_state, read_state
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import unit_of_run
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import own_scope, read_unit
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_end import UnitError, stop

KNOWN = ("rank", "step", "num_iterations", "loss", "val_bpb", "tok_per_s")
"""Fields that the outcome takes from the first run status."""


def outcome_of(state: Mapping[str, Any], kind: str, reason: str) -> dict[str, Any]:
    """The content of outcome.json for a host whose ranks were ended from outside.

    state: result of run_state. The step, loss and so on are those of its first run status. kind: the outcome,
    stopped or retryable. reason: a sentence.
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


def write(state: Mapping[str, Any], user: str, name: str, text: str, replace: bool = True) -> None:
    """Write `text` to the file `name` in the run directory, with the rights of `user`.

    state: result of run_state. replace: whether an existing file is replaced.
    """
    with acting_as(user):
        files = {name: text}
        make({"path": state["run_dir"], "files": files, "remove": [], "replace": replace}, False)


def discard_unfinished(state: Mapping[str, Any], user: str) -> None:
    """Delete the checkpoints that ranks were still writing when they were ended, with the rights of `user`.

    state: result of run_state.
    """
    with acting_as(user):
        for unfinished in Path(state["run_dir"], "checkpoints").glob(".step_*"):
            shutil.rmtree(unfinished, ignore_errors=True)


def record(state: Mapping[str, Any], p: Mapping[str, Any]) -> None:
    """Write the outcome of the run to outcome.json. state: result of run_state. p: options of the module.

    An outcome that a rank has written is kept if it is settled (no attempt follows), or if p["outcome"] is
    retryable.
    """
    text = json.dumps(outcome_of(state, p["outcome"], p["reason"]), indent=2) + "\n"
    # The outcome of a rank that systemd ended without a request, as at a shutdown, is not settled.
    replace = p["outcome"] == "stopped" and not (state.get("outcome") or {}).get("settled")
    write(state, p["user"], "outcome.json", text, replace)


def end(p: Mapping[str, Any], check: bool) -> dict[str, Any]:
    """End a run on this host and record the outcome; returns the result of the module.

    p: options of the module. check: change nothing, and return what the call would return as far as that is
    known: done is True, and state is the present one. Keys of the result, among others:
    done: whether the run is over. If False, it did not end within wait_seconds (it may still save a
    checkpoint), nothing was ended, and the call has to be repeated.
    ended: the processes that were in the unit. state: the result of run_state after the end.
    Raises UnitError if systemd does not stop the unit, or if a process or listener of it is left; OSError if
    a file cannot be written; ValueError if the run directory or the folder above it is a link; RuntimeError
    if systemctl fails.
    """
    reading = {**p, "wait_for": "none", "ports": []}
    state = read_state(reading)
    if not p["run_id"] and state["ended"]:
        return {"changed": False, "done": True, "ended": [], "run_id": "", "state": state}
    reading["run_id"] = run_id = state["run_id"]
    requested = p["request"] and state["found"]
    if requested and not check:
        write(state, p["user"], "stop", "")
    if p["wait_seconds"] and not state["ended"] and not check:
        state = await_state({**reading, "wait_for": "end", "wait_seconds": p["wait_seconds"]})
        if not (state["ended"] or state["between"]):
            return {"changed": requested, "done": False, "ended": [], "run_id": run_id, "state": state}
    scope = own_scope()
    unit = read_unit(unit_of_run(run_id), time.time(), scope)
    options = {"state": "absent", "scope": scope, "timeout": 20, "ports": p["ports"], "grace": p["grace"]}
    done = stop(options, unit, check)
    if done["changed"] and not check:
        # The ranks write their outcome while they are stopped: read it afterwards.
        state = read_state(reading)
        if state.get("found"):
            discard_unfinished(state, p["user"])
            record(state, p)
            state = read_state(reading)
    return {**done, "changed": done["changed"] or requested, "done": True, "run_id": run_id, "state": state}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "run_id": {"type": "str", "required": True},
            "ports": {"type": "list", "elements": "int", "required": True},
            "outcome": {"type": "str", "choices": ["stopped", "retryable"], "required": True},
            "reason": {"type": "str", "required": True},
            "log_lines": {"type": "int", "default": 20},
            "grace": {"type": "int", "default": -1},
            "request": {"type": "bool", "default": False},
            "wait_seconds": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    try:
        result = end(module.params, module.check_mode)
    except UnitError as error:
        module.fail_json(msg=error.args[0], **error.args[1])
    except (OSError, RuntimeError, ValueError) as error:
        module.fail_json(msg=f"The run {module.params['run_id']} could not be ended: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
