# SPDX-License-Identifier: MIT
"""Starts a transient systemd service with systemd-run. Standard library only."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    Unit,
    is_up,
    manager,
    read_unit,
    run,
    unit_name,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_end import UnitError

NEED_ROOT = {
    "AmbientCapabilities", "CapabilityBoundingSet", "Group", "IPAddressAllow", "IPAddressDeny",
    "LogExtraFields", "PrivateDevices", "PrivateTmp", "ProtectClock", "ProtectControlGroups", "ProtectHome",
    "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc",
    "ProtectSystem", "ReadWritePaths", "User",
}  # fmt: skip
"""Properties that systemd --user refuses (exit status 216, 218) or accepts without effect."""


def assignments(properties: Mapping[str, Any]) -> list[str]:
    """NAME=VALUE texts for systemd-run's --property.

    properties: {name: value, or list of values}. Raises RuntimeError for control characters.
    """
    made = []
    for name, value in properties.items():
        for item in value if isinstance(value, list) else [value]:
            text = ("yes" if item else "no") if isinstance(item, bool) else str(item)
            if not text.isprintable():
                raise RuntimeError(f"{name} is {text!r}, which has a line break or another control character")
            made.append(f"{name}={text}")
    return made


def root_commands(params: Mapping[str, Any]) -> dict[str, str]:
    """The properties that the boot entry of a unit keeps: {name: command with the prefix +}.

    params: as for command_line. {} for a unit without a boot entry. See boot_entry.py for the reason.
    """
    given = params["properties"].items() if params["boot_condition"] else ()
    return {name: value for name, value in given if str(value).startswith("+")}


def command_line(params: Mapping[str, Any]) -> list[str]:
    """The systemd-run command line of a unit, as a list of arguments.

    params: the options name, description, scope, user, properties, setenv, argv and boot_condition of the
    module transient_unit. Each `$` in argv is doubled, because systemd would expand variables.
    """
    user = params["scope"] == "user"
    command = ["systemd-run", *manager(params["scope"]), "--quiet", "--unit", unit_name(params["name"])]
    if params["description"]:
        command.append("--description=" + params["description"])
    properties = dict(params["properties"])
    if params["user"]:
        properties["User"] = params["user"]
    kept = root_commands(params).keys() | (NEED_ROOT if user else set())
    given = {name: value for name, value in properties.items() if name not in kept}
    command += ["--property=" + item for item in assignments(given)]
    command += [f"--setenv={name}={value}" for name, value in params["setenv"].items()]
    return [*command, "--", *(word.replace("$", "$$") for word in params["argv"])]


def start(params: Mapping[str, Any], unit: Unit, check: bool) -> dict[str, Any]:
    """Start a unit unless it is active; returns fields of the result of the module transient_unit.

    params: options of that module. unit: its present state (see read_unit). check: start nothing. Keys of the
    result: changed, unit, left_out (properties that need root), and command and diff unless the unit was
    active. Raises UnitError if the unit cannot be started.
    """
    name = unit["name"]
    if not params["argv"]:
        raise UnitError(f"To start {name}, argv must hold its command.", {})
    me = getpass.getuser()
    if params["scope"] == "user" and params["user"] not in ("", me):
        message = f"Without root {me} cannot start {name} as {params['user']}: become root, or name {me}."
        raise UnitError(message, {})
    left_out = sorted(NEED_ROOT & set(params["properties"])) if params["scope"] == "user" else []
    if is_up(unit):
        return {"changed": False, "unit": unit, "left_out": left_out}
    command = command_line(params)
    diff = {
        "before": {"active_state": unit["active_state"]},
        "after": {"active_state": "active", "command": command},
    }
    if check:
        return {"changed": True, "unit": unit, "command": command, "left_out": left_out, "diff": diff}
    control = ["systemctl", *manager(params["scope"])]
    if unit["active_state"] == "failed":
        run([*control, "reset-failed", "--", unit["name"]])
    if params["boot_condition"]:
        boot_entry.write(
            name,
            command,
            params["boot_condition"],
            params["user"],
            params["scope"],
            params["leaves_at_sleep"],
            assignments(root_commands(params)),
        )
    code, _out, err = run(command)
    after = read_unit(name, time.time(), params["scope"])
    if code:
        see = " ".join([*control, "status", name])
        message = f"systemd did not start {name}: {err}. See: {see}"
        raise UnitError(message, {"unit": after, "command": command})
    return {"changed": True, "unit": after, "command": command, "left_out": left_out, "diff": diff}
