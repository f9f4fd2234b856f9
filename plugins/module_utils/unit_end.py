# SPDX-License-Identifier: MIT
"""Stops a transient systemd service and verifies that nothing of it is left. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    Unit,
    describe,
    is_up,
    listeners,
    manager,
    processes_of,
    read_unit,
    run,
)


class UnitError(Exception):
    """Raised if a unit cannot be started or stopped. args: (message, {fields of the module's result})."""


def stop(params: Mapping[str, Any], unit: Unit, check: bool) -> dict[str, Any]:
    """Stop a unit and remove its boot entry, which starts it again after a boot (see boot_entry.py).

    Returns {"changed", "unit", "ended", "diff"}.
    params: the options state, scope, grace, ports and timeout of the module transient_unit. unit: its present
    state (see read_unit). check: stop nothing, only return what would change. In the result, unit is the
    state afterwards, and ended has the processes that were in the unit (see describe). Raises UnitError if
    systemd does not stop the unit, or if a process or listener of it is left.
    """
    name = unit["name"]
    scope, control = params["scope"], ["systemctl", *manager(params["scope"])]
    reset = params["state"] == "absent" and unit["active_state"] == "failed"
    pids = processes_of(name, scope)
    running = is_up(unit) or bool(pids)
    ended = [found for found in map(describe, pids) if found]
    has_entry = name in boot_entry.entries(scope)
    changed = running or reset or has_entry
    after = "inactive" if is_up(unit) or reset else unit["active_state"]
    diff = {
        "before": {"active_state": unit["active_state"], "processes": pids},
        "after": {"active_state": after, "processes": []},
    }
    if not changed or check:
        return {"changed": changed, "unit": unit, "ended": ended, "diff": diff}
    if has_entry:
        boot_entry.remove(name, scope)
    if running:
        if params["grace"] >= 0:
            kill_after(params["grace"], name, scope, control)
        code, _out, err = run([*control, "stop", "--", name])
        stopped = read_unit(name, time.time(), scope)
        if code and is_up(stopped):
            why = f"To see why: {' '.join(control)} status {name} (on this host)"
            raise UnitError(f"systemd did not stop {name}: {err.rstrip('.')}. {why}", {"unit": stopped})
    # systemd may record a unit that was stopped on request as failed.
    if (running or reset) and read_unit(name, time.time(), scope)["active_state"] == "failed":
        run([*control, "reset-failed", "--", name])
    left = remains(name, pids, params["ports"], params["timeout"], scope)
    unit = read_unit(name, time.time(), scope)
    if left:
        kill = f"{'' if scope == 'user' else 'sudo '}kill -9 PID (on this host)"
        message = f"{name} was stopped, but this is left: {'; '.join(left)}. End it: {kill}"
        raise UnitError(message, {"unit": unit, "ended": ended})
    return {"changed": True, "unit": unit, "ended": ended, "diff": diff}


def kill_after(seconds: float, name: str, scope: str, control: list[str]) -> None:
    """Stop a unit, and send SIGKILL to the processes that are left after `seconds` seconds.

    name, scope: of the unit. control: the command systemctl with the option for `scope`, as a list.
    """
    run([*control, "stop", "--no-block", "--", name])
    deadline = time.monotonic() + seconds
    while processes_of(name, scope):
        if time.monotonic() >= deadline:
            run([*control, "kill", "--signal=KILL", "--", name])
            return
        time.sleep(0.2)


def remains(name: str, pids: list[int], ports: list[int], timeout: float, scope: str) -> list[str]:
    """Texts about processes of the unit and listeners on `ports` that are left after `timeout` seconds.

    name, scope: of the unit. pids: processes of the unit before the stop; their listeners count too.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = [found for found in map(describe, processes_of(name, scope)) if found]
        held = [found for found in listeners(ports) if found["pid"] in pids or found["unit"] == name]
        if not (left or held) or time.monotonic() >= deadline:
            return [
                *("process {pid} of {user} ({command})".format(**found) for found in left),
                *("port {port} held by process {pid} ({command})".format(**found) for found in held),
            ]
        time.sleep(0.2)
