# SPDX-License-Identifier: MIT
"""Reads the state of a run on this host from its unit and its run directory, at once or after an event.

Used by the modules run_state, launch_state and end_run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text, sha256_of
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_dir import known_runs, read_run
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_summary import PREFIX, run_of_unit
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


def read_state(params: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of a run once. Returns the result of the module run_state.

    params: options of that module: state_dir, run_id, user, log_lines, ports, claim, manifest. For the keys
    of the result see plugins/modules/run_state.yml.
    """
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
        "claim": read_text(params["claim"]) if params.get("claim") else "",
        "manifest_sha256": digest_of(params["manifest"]) if params.get("manifest") else "",
        **state,
    }


def digest_of(path: str) -> str:
    """The sha256 of a file; "" if it cannot be read."""
    try:
        return sha256_of(path)
    except OSError:
        return ""


def await_state(params: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of a run repeatedly until an event; returns the last state (see `read_state`).

    params: options of the module run_state. Its option `wait_for` is the event (none: the state is read
    once), and `wait_seconds` is the longest time to wait. The function also returns when the attempt is over.
    """
    began = time.monotonic()
    while True:
        state = read_state(params)
        awaited = state["ended"] or state["between"] or (params["wait_for"] == "step" and state["stepped"])
        waited = time.monotonic() - began
        if params["wait_for"] == "none" or awaited or waited >= params["wait_seconds"]:
            return state
        # Each reading takes CPU time from the training, so the pauses become longer.
        time.sleep(max(0.2, 0.1 * waited))
