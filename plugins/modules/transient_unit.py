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
    describe,
    is_up,
    listeners,
    manager,
    own_scope,
    processes_of,
    read_unit,
    run,
    unit_name,
)

NEED_ROOT = {
    "AmbientCapabilities", "CapabilityBoundingSet", "Group", "IPAddressAllow", "IPAddressDeny",
    "LogExtraFields", "PrivateDevices", "PrivateTmp", "ProtectClock", "ProtectControlGroups", "ProtectHome",
    "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc",
    "ProtectSystem", "ReadWritePaths", "User",
}  # fmt: skip
"""Properties that systemd --user refuses (exit status 216, 218) or accepts without effect."""


def assignments(properties: dict[str, Any]) -> list[str]:
    """Properties as NAME=VALUE texts for `systemd-run --property`. RuntimeError for control characters."""
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


def stop(module: AnsibleModule, unit: Unit) -> None:
    """Stop the unit, remove its boot entry, and exit the module with the processes that were ended."""
    name, params = unit["name"], module.params
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
    if not changed or module.check_mode:
        module.exit_json(changed=changed, unit=unit, ended=ended, diff=diff)
    if has_entry:
        boot_entry.remove(name, scope)
    if running:
        if params["grace"] >= 0:
            kill_after(params["grace"], name, scope, control)
        code, _out, err = run([*control, "stop", "--", name])
        stopped = read_unit(name, time.time(), scope)
        if code and is_up(stopped):
            module.fail_json(msg=f"systemd did not stop {name}: {err}", unit=stopped)
    # systemd may record a unit that was stopped on request as failed.
    if (running or reset) and read_unit(name, time.time(), scope)["active_state"] == "failed":
        run([*control, "reset-failed", "--", name])
    left = remains(name, pids, params["ports"], params["timeout"], scope)
    unit = read_unit(name, time.time(), scope)
    if left:
        module.fail_json(
            msg=f"{name} was stopped, but this remains: {'; '.join(left)}. End these processes on this host.",
            unit=unit,
            ended=ended,
        )
    module.exit_json(changed=True, unit=unit, ended=ended, diff=diff)


def kill_after(seconds: float, name: str, scope: str, control: list[str]) -> None:
    """Stop a unit, and send SIGKILL to its processes that are left after `seconds`.

    name, scope: of the unit. control: runs systemctl.
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

    pids: processes of the unit before the stop; their listeners count.
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
        (start if module.params["state"] == "started" else stop)(module, unit)
    except (OSError, RuntimeError) as error:
        module.fail_json(msg=f"The state of the unit {module.params['name']} cannot be changed: {error}")


if __name__ == "__main__":
    main()
