#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: start a transient systemd service with systemd-run, or stop it and verify its end."""

from __future__ import annotations

import getpass
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils import boot_entry
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    Unit,
    is_up,
    manager,
    own_scope,
    read_unit,
    run,
    unit_name,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_end import UnitError, stop

NEED_ROOT = {
    "AmbientCapabilities", "CapabilityBoundingSet", "Group", "IPAddressAllow", "IPAddressDeny",
    "LogExtraFields", "PrivateDevices", "PrivateTmp", "ProtectClock", "ProtectControlGroups", "ProtectHome",
    "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc",
    "ProtectSystem", "ReadWritePaths", "User",
}  # fmt: skip
"""Properties that systemd --user refuses (exit status 216, 218) or accepts without effect."""


def assignments(properties: dict[str, Any]) -> list[str]:
    """NAME=VALUE texts for systemd-run's --property. Raises RuntimeError for control characters."""
    made = []
    for name, value in properties.items():
        for item in value if isinstance(value, list) else [value]:
            text = ("yes" if item else "no") if isinstance(item, bool) else str(item)
            if not text.isprintable():
                raise RuntimeError(f"{name} is {text!r}, which has a line break or another control character")
            made.append(f"{name}={text}")
    return made


def command_line(params: dict[str, Any]) -> list[str]:
    """The systemd-run command line. Each `$` in argv is doubled, because systemd would expand variables."""
    user = params["scope"] == "user"
    command = ["systemd-run", *manager(params["scope"]), "--quiet", "--unit", unit_name(params["name"])]
    if params["description"]:
        command.append("--description=" + params["description"])
    properties = dict(params["properties"])
    if params["user"]:
        properties["User"] = params["user"]
    given = {name: value for name, value in properties.items() if not (user and name in NEED_ROOT)}
    if params["boot_condition"]:
        given["ExecStopPost"] = boot_entry.stop_command(params["name"], params["scope"])
    command += ["--property=" + item for item in assignments(given)]
    command += [f"--setenv={name}={value}" for name, value in params["setenv"].items()]
    return [*command, "--", *(word.replace("$", "$$") for word in params["argv"])]


def start(module: AnsibleModule, unit: Unit) -> None:
    """Start the unit unless it is active, and exit the module with its state."""
    name, params = unit["name"], module.params
    if not params["argv"]:
        module.fail_json(msg=f"To start {name}, argv must hold its command.")
    me = getpass.getuser()
    if params["scope"] == "user" and params["user"] not in ("", me):
        module.fail_json(
            msg=f"Without root {me} cannot start {name} as {params['user']}: become root, or name {me}."
        )
    left_out = sorted(NEED_ROOT & set(params["properties"])) if params["scope"] == "user" else []
    if is_up(unit):
        module.exit_json(changed=False, unit=unit, left_out=left_out)
    command = command_line(params)
    diff = {
        "before": {"active_state": unit["active_state"]},
        "after": {"active_state": "active", "command": command},
    }
    if module.check_mode:
        module.exit_json(changed=True, unit=unit, command=command, left_out=left_out, diff=diff)
    control = ["systemctl", *manager(params["scope"])]
    if unit["active_state"] == "failed":
        run([*control, "reset-failed", "--", unit["name"]])
    if params["boot_condition"]:
        boot_entry.write(name, command, params["boot_condition"], params["user"], params["scope"])
    code, _out, err = run(command)
    after = read_unit(name, time.time(), params["scope"])
    if code:
        see = " ".join([*control, "status", name])
        module.fail_json(msg=f"systemd did not start {name}: {err}. See: {see}", unit=after, command=command)
    module.exit_json(changed=True, unit=after, command=command, left_out=left_out, diff=diff)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "stopped", "absent"], "default": "started"},
            "scope": {"type": "str", "choices": ["auto", "system", "user"], "default": "auto"},
            "argv": {"type": "list", "elements": "str", "default": []},
            "description": {"type": "str", "default": ""},
            "user": {"type": "str", "default": ""},
            "setenv": {"type": "dict", "default": {}},
            "properties": {"type": "dict", "default": {}},
            "boot_condition": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "grace": {"type": "int", "default": -1},
            "timeout": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    if module.params["scope"] == "auto":
        module.params["scope"] = own_scope()
    try:
        unit = read_unit(module.params["name"], time.time(), module.params["scope"])
        if module.params["state"] == "started":
            start(module, unit)
        module.exit_json(**stop(module.params, unit, module.check_mode))
    except UnitError as error:
        module.fail_json(msg=error.args[0], **error.args[1])
    except (OSError, RuntimeError) as error:
        module.fail_json(msg=f"The state of the unit {module.params['name']} cannot be changed: {error}")


if __name__ == "__main__":
    main()
