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

DOCUMENTATION = r"""
module: transient_unit
short_description: Start, stop and remove a transient systemd service
description:
  - Starts a command as a transient service through C(systemd-run); it survives the SSH session.
  - An active unit is left unchanged and its state is returned.
    The failure of an earlier start is reset before a new one.
  - With O(boot_condition), the host restarts the unit when it boots, until the unit is stopped or its
    end is final.
  - After a stop, it verifies that no process of the unit's control group and no listener on O(ports) is left.
options:
  name:
    description: Name of the unit, with or without C(.service).
    type: str
    required: true
  state:
    description:
      - V(started) runs O(argv) unless the unit is active.
      - V(stopped) stops an active unit; a failure that systemd has recorded is kept.
      - V(absent) is V(stopped), and resets the failure.
    type: str
    choices: [started, stopped, absent]
    default: started
  scope:
    description:
      - Whose systemd has the unit. V(auto) is V(system) as root and V(user) otherwise.
      - V(user) starts it by C(systemd-run --user). It ends with the user's last session unless the user
        lingers, and those of O(properties) that need root are left out.
    type: str
    choices: [auto, system, user]
    default: auto
  argv:
    description: The command; C($) and C(%) are not expanded. Required for V(started).
    type: list
    elements: str
    default: []
  description:
    description: Description of the unit in C(systemctl status).
    type: str
    default: ""
  user:
    description: User that the command runs as; root if empty. With V(scope=user) only the calling user.
    type: str
    default: ""
  setenv:
    description: Environment variables.
    type: dict
    default: {}
  properties:
    description: Unit properties by systemd's names. A boolean becomes yes or no, a list one assignment each.
    type: dict
    default: {}
  boot_condition:
    description:
      - A command that runs as O(user) when the host boots, with C(boot) as a last argument. Exit status 0
        starts the unit with the same command, 1 removes the boot entry.
      - It also runs whenever the unit has ended, with C(end) as a last argument; exit status 1 then removes
        the boot entry. Empty for a unit that does not restart after a boot.
      - The boot entry is C(nanofleet@NAME.service) with a script of root in C(/etc/nanofleet), or of the user
        in C(~/.config/nanofleet).
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports which the unit's processes must no longer listen on once stopped.
    type: list
    elements: int
    default: []
  grace:
    description:
      - Seconds after SIGTERM until the remaining processes get SIGKILL.
      - V(-1) takes the unit's C(TimeoutStopSec).
    type: int
    default: -1
  timeout:
    description: Seconds to wait after C(systemctl stop) until the processes have ended.
    type: int
    default: 10
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Start a run
  nanofleet.fleet.transient_unit:
    name: nanofleet-d4-1a2b3c4d
    argv: [/opt/nanofleet/venv/bin/python, -m, trainer, train]
    user: nanofleet
    properties: {Nice: 5, KillMode: control-group}

- name: End it
  nanofleet.fleet.transient_unit:
    name: nanofleet-d4-1a2b3c4d
    state: absent
    ports: [29500]
"""

RETURN = r"""
unit:
  description: >-
    State of the unit afterwards - name, active_state, sub_state, result, main_pid, exit_status, restarts,
    since (Unix time).
  type: dict
  returned: always
command:
  description: The systemd-run command line that was run, or would be in check mode.
  type: list
  returned: when it is started
left_out:
  description: Those of O(properties) that a user's own systemd cannot apply.
  type: list
  elements: str
  returned: when it is started
ended:
  description: Processes that were in the unit before the stop - pid, user, command, unit.
  type: list
  returned: when it is stopped
"""


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
    """Stop the unit, and send SIGKILL to the processes that are left after `seconds`."""
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
