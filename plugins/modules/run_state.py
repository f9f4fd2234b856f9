#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the state of a run on this host from its unit and its run directory."""

from __future__ import annotations

import os
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_dir import (
    PREFIX,
    known_runs,
    read_run,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    between_attempts,
    find_unit,
    is_up,
    known_units,
    listeners,
)

DOCUMENTATION = r"""
module: run_state
short_description: Read the state of a run on this host
description:
  - Reads the unit, heartbeats, metrics, outcome and log of a run.
  - Changes nothing. Does not fail if the run does not exist.
  - Without root it reads the user's own systemd besides the system's.
options:
  state_dir:
    description: Folder that holds C(runs/RUN_ID).
    type: path
    required: true
  run_id:
    description: Name of the run; empty for the active one, else the newest.
    type: str
    default: ""
  user:
    description: User whose rights the module uses to read files if it runs as root; empty for root's own.
    type: str
    default: ""
  log_lines:
    description: How many lines of an error to return at most.
    type: int
    default: 20
  wait_for:
    description: >-
      V(step) returns when a rank on this host has made a step or the attempt is over, V(end) when the attempt
      is over; both return after O(wait_seconds) at the latest.
    type: str
    choices: [none, step, end]
    default: none
  wait_seconds:
    description: Seconds to wait for O(wait_for) at most.
    type: int
    default: 0
  ports:
    description: TCP ports whose listeners are returned.
    type: list
    elements: int
    default: []
attributes:
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Read the newest run
  nanofleet.fleet.run_state:
    state_dir: /var/lib/nanofleet
  register: __launch_state
"""

RETURN = r"""
found:
  description: Whether this host has the run; if not, the values about the run are empty.
  type: bool
  returned: always
run_id: {description: Name of the run, type: str, returned: always}
run_dir: {description: Run directory, type: str, returned: always}
ended: {description: Whether the unit is neither active nor about to start, type: bool, returned: always}
between:
  description: Whether an attempt is over and the unit waits for the next one.
  type: bool
  returned: always
failed_unit:
  description: Whether the unit failed, or no longer exists and its last attempt wrote no outcome.
  type: bool
  returned: always
rebooted:
  description: Unix time of the boot, if it ended the unit of an attempt that nobody had stopped; else null.
  type: float
  returned: always
at_boot: {description: Whether this host restarts the run when it boots, type: bool, returned: always}
stepped: {description: Whether a rank here has made a step in this attempt, type: bool, returned: always}
unit:
  description: >-
    name, load_state, active_state, sub_state, result, main_pid, exit_status, restarts, since (Unix time or
    null), scope (system or user, whose systemd has the unit).
  type: dict
  returned: always
heartbeats:
  description: >-
    Every heartbeat-RANK.json in rank order, each also with C(age), the seconds since its time; C(before),
    whether it is of an earlier attempt; C(over), whether the rank has ended; C(process), the state of the
    process in the kernel.
  type: list
  elements: dict
  returned: always
metrics: {description: The last line of metrics.jsonl with a loss, type: dict, returned: always}
evaluation: {description: The last line of metrics.jsonl with a val_bpb, type: dict, returned: always}
outcome: {description: outcome.json, type: dict, returned: always}
stop_requested: {description: Whether the file C(stop) is there, type: bool, returned: always}
error: {description: The first error of the last attempt, type: list, elements: str, returned: always}
run_file: {description: run.json, type: dict, returned: always}
prediction: {description: "Text of prediction.txt, or empty", type: str, returned: always}
leftovers:
  description: Names of the files of one attempt - outcomes, heartbeats, a request to stop and others.
  type: list
  elements: str
  returned: always
links:
  description: Symbolic links in the run directory, path to target. A run makes no links.
  type: dict
  returned: always
checkpoint: {description: The newest complete checkpoint in the run directory, type: str, returned: always}
checkpoint_time: {description: Unix time at which it was written, type: float, returned: always}
past_attempts:
  description: The last 20 lines of attempts.jsonl - time, outcome, step and reason of each attempt.
  type: list
  elements: dict
  returned: always
began:
  description: Unix time at which the trainer began the present attempt, after torchrun's rendezvous.
  type: float
  returned: always
time: {description: Unix time on this host, type: float, returned: always}
runs:
  description: >-
    The newest 20 runs - run_id, time, active, outcome, reason, settled, step, num_iterations, tok_per_s,
    hosts, config.
  type: list
  elements: dict
  returned: always
active_units: {description: Names of the active units of runs, type: list, elements: str, returned: always}
known_units:
  description: Names of active and failed units of runs, and of those that restart after a boot.
  type: list
  elements: str
  returned: always
listeners:
  description: Processes that listen on O(ports) - port, pid, user, command, unit.
  type: list
  elements: dict
  returned: always
"""

TRACKER_UNIT = PREFIX + "tracker.service"


def choose(runs: list[dict[str, Any]], active: list[str]) -> str:
    """The run to read if none is named: an active one, else the newest; "" without any."""
    if active:
        return active[0][len(PREFIX) : -len(".service")]
    return runs[0]["run_id"] if runs else ""


def read_state(params: dict[str, Any]) -> dict[str, Any]:
    """The result of the module for one reading."""
    runs_dir = os.path.join(params["state_dir"], "runs")
    now = time.time()
    units = known_units(PREFIX + "*.service")
    units.pop(TRACKER_UNIT, None)
    at_boot = boot_entry.entries()
    active = sorted(name for name, state in units.items() if state not in ("inactive", "failed"))
    with acting_as(params["user"]):
        runs = known_runs(runs_dir, active)
    run_id = params["run_id"] or choose(runs, active)
    run_dir = os.path.join(runs_dir, run_id)
    unit = find_unit(PREFIX + (run_id or "none"), now)
    with acting_as(params["user"]):
        state = read_run(run_dir if run_id else os.devnull, unit, now, params["log_lines"])
    return {
        "run_id": run_id,
        "run_dir": run_dir,
        "ended": not is_up(unit),
        "between": between_attempts(unit),
        "unit": unit,
        "time": now,
        "runs": runs,
        "active_units": active,
        "known_units": sorted({*units, *at_boot}),
        "at_boot": unit["name"] in at_boot,
        "listeners": listeners(params["ports"]),
        **state,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "default": ""},
            "user": {"type": "str", "default": ""},
            "log_lines": {"type": "int", "default": 20},
            "wait_for": {"type": "str", "choices": ["none", "step", "end"], "default": "none"},
            "wait_seconds": {"type": "int", "default": 0},
            "ports": {"type": "list", "elements": "int", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    began = time.monotonic()
    while True:
        try:
            state = read_state(params)
        except (OSError, RuntimeError) as error:
            module.fail_json(msg=f"The state of the runs in {params['state_dir']} cannot be read: {error}")
        awaited = state["ended"] or state["between"] or (params["wait_for"] == "step" and state["stepped"])
        waited = time.monotonic() - began
        if params["wait_for"] == "none" or awaited or waited >= params["wait_seconds"]:
            module.exit_json(changed=False, **state)
        # Each reading takes CPU time from the training, so the pauses become longer.
        time.sleep(max(0.5, 0.1 * waited))


if __name__ == "__main__":
    main()
