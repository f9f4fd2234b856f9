#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: start a transient systemd service with systemd-run, or stop it and verify its end."""

from __future__ import annotations

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import own_scope, read_unit
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_end import UnitError, stop
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_start import start


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
            "leaves_at_sleep": {"type": "bool", "default": False},
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
        change = start if module.params["state"] == "started" else stop
        module.exit_json(**change(module.params, unit, module.check_mode))
    except UnitError as error:
        module.fail_json(msg=error.args[0], **error.args[1])
    except (OSError, RuntimeError) as error:
        module.fail_json(msg=f"The state of the unit {module.params['name']} cannot be changed: {error}")


if __name__ == "__main__":
    main()
