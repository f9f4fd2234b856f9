#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: everything a host knows about a run, read from its unit and its run directory."""

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
  - Changes nothing, and a run that is missing is no failure.
  - Without root the user's own systemd is checked besides the system's.
options:
  state_dir:
    description: Folder that holds C(runs/RUN_ID).
    type: path
    required: true
  run_id:
    description: The run. Empty for the one that is active, else the newest.
    type: str
    default: ""
  user:
    description: Whose rights the run directories are read with, if the module runs as root; empty for root's.
    type: str
    default: ""
  log_lines:
    description: How many lines of an error to return at most.
    type: int
    default: 20
  wait_for:
    description: Return once a rank here has made a step, the attempt is over, or O(wait_seconds) are over.
    type: str
    choices: [none, step, end]
    default: none
  wait_seconds:
    description: How long to wait at most.
    type: int
    default: 0
  ports:
    description: TCP ports whose listeners are reported.
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
  description: Whether there is such a run on this host; if not, the fields of a run are empty.
  type: bool
  returned: always
run_id: {description: The run, type: str, returned: always}
run_dir: {description: Its directory, type: str, returned: always}
ended: {description: Whether the unit is neither up nor about to be, type: bool, returned: always}
between:
  description: Whether an attempt is over and the unit waits for the next one.
  type: bool
  returned: always
failed_unit:
  description: Whether the unit failed, or is gone and left no outcome of its last attempt.
  type: bool
  returned: always
rebooted:
  description: When this host came up, if that took an attempt's unit away that nobody had ended; else null.
  type: float
  returned: always
at_boot: {description: Whether this host starts the run again when it boots, type: bool, returned: always}
stepped: {description: Whether a rank here has made a step in this attempt, type: bool, returned: always}
unit:
  description: >-
    name, load_state, active_state, sub_state, result, main_pid, exit_status, restarts, since (epoch or null),
    scope (system or user: whose systemd has it).
  type: dict
  returned: always
heartbeats:
  description: >-
    Every heartbeat-RANK.json by rank, each with C(age), the seconds since its time, C(before), whether it is
    of an earlier attempt than the one under way, C(over), whether the rank has ended since, and C(process),
    the kernel's word for what its process does.
  type: list
  elements: dict
  returned: always
metrics: {description: The last line of metrics.jsonl with a loss, type: dict, returned: always}
evaluation: {description: The last line of metrics.jsonl with a val_bpb, type: dict, returned: always}
outcome: {description: outcome.json, type: dict, returned: always}
stop_requested: {description: Whether the file C(stop) is there, type: bool, returned: always}
error: {description: The first error of the last attempt, type: list, elements: str, returned: always}
run_file: {description: run.json, type: dict, returned: always}
prediction: {description: "What the ranks have predicted, or empty", type: str, returned: always}
leftovers:
  description: Files that belong to one attempt alone, by name - outcomes, heartbeats, a request to stop, ...
  type: list
  elements: str
  returned: always
links:
  description: Links in the run directory, which a run does not make, and where they lead.
  type: dict
  returned: always
checkpoint: {description: The newest whole checkpoint in the run directory, type: str, returned: always}
checkpoint_time: {description: When it was written, type: float, returned: always}
past_attempts:
  description: The last lines of attempts.jsonl - when each attempt ended, how, at which step and why.
  type: list
  elements: dict
  returned: always
began:
  description: When the trainer took up the attempt under way; torchrun and the rendezvous come before.
  type: float
  returned: always
time: {description: This host's clock, type: float, returned: always}
runs:
  description: >-
    The newest 20 - run_id, time, active, outcome, reason, settled, step, num_iterations, tok_per_s, hosts,
    config.
  type: list
  elements: dict
  returned: always
active_units: {description: Units of runs that are up, type: list, elements: str, returned: always}
known_units:
  description: Those, failed ones, and those that start again when the host boots.
  type: list
  elements: str
  returned: always
listeners:
  description: Who listens on O(ports) - port, pid, user, command, unit.
  type: list
  elements: dict
  returned: always
"""

NOT_A_RUN = (PREFIX + "tracker.service",)


def choose(runs: list[dict[str, Any]], active: list[str]) -> str:
    """The run meant when none is named: an active one, else the newest."""
    if active:
        return active[0][len(PREFIX) : -len(".service")]
    return runs[0]["run_id"] if runs else ""


def read_state(params: dict[str, Any]) -> dict[str, Any]:
    """All that this host knows, once."""
    runs_dir = os.path.join(params["state_dir"], "runs")
    now = time.time()
    units = {name: up for name, up in known_units(PREFIX + "*.service").items() if name not in NOT_A_RUN}
    returning = boot_entry.entries()
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
        "known_units": sorted({*units, *returning}),
        "at_boot": unit["name"] in returning,
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
        # The longer it takes the less often: looking takes time from the core that trains.
        time.sleep(max(0.5, 0.1 * waited))


if __name__ == "__main__":
    main()
