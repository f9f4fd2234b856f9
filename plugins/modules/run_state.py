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
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import run_of_unit
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    between_attempts,
    find_unit,
    is_up,
    known_units,
    listeners,
)

SERVERS = (PREFIX + "tracker.service", PREFIX + "serve.service")
"""Units of the fleet that are no runs."""


def read_state(params: dict[str, Any]) -> dict[str, Any]:
    """The result of the module for one reading of unit and run directory. params: its options."""
    runs_dir = os.path.join(params["state_dir"], "runs")
    now = time.time()
    units = known_units(PREFIX + "*.service")
    for server in SERVERS:
        units.pop(server, None)
    at_boot = boot_entry.entries()
    active = sorted(name for name, state in units.items() if state not in ("inactive", "failed"))
    with acting_as(params["user"]):
        runs = known_runs(runs_dir, active)
    # If none is named, an active run, else the newest.
    names = [params["run_id"], *map(run_of_unit, active), *(run["run_id"] for run in runs)]
    run_id = next(filter(None, names), "")
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
