#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: set the kernel's range of ephemeral ports, now and at boot, or restore the old range."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.port_range import (
    KEY,
    PROC,
    change_back,
    change_to,
    hindrances,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "low": {"type": "int"},
            "high": {"type": "int"},
            "path": {"type": "path", "default": "/etc/sysctl.d/60-nanofleet.conf"},
            "user": {"type": "str", "default": "nanofleet"},
            "fleet": {"type": "str", "default": ""},
        },
        required_if=[("state", "present", ("low", "high"))],
        supports_check_mode=True,
    )
    params = module.params
    path, low, high = params["path"], params["low"], params["high"]
    present = params["state"] == "present"
    change = change_to(path, low, high, params["fleet"]) if present else change_back(path)
    if change.changed and not module.check_mode:
        try:
            if present:
                write_whole(path, change.wanted)
            elif change.text:
                os.unlink(path)
            if change.now != change.target:
                Path(f"{PROC}/ip_local_port_range").write_text(change.target)
        except OSError as error:
            command = f"sudo sysctl -w {KEY}='{change.target}'"
            module.fail_json(
                msg=f"{KEY} could not be set to {change.target}: {error}. Try on this host: {command}"
            )
    result = {
        "changed": change.changed,
        "before": change.before,
        "diff": {
            "before": change.text + f"in force: {change.now}\n",
            "after": change.wanted + f"in force: {change.target}\n",
        },
    }
    if present:
        result.update(hindrances(path, low, high, params["user"]))
    else:
        moved = change.now != change.target
        restored = [f"{KEY} {change.now}, which becomes {change.target} again"] if moved else []
        result["removed"] = ([path] if change.text else []) + restored
    module.exit_json(**result)


if __name__ == "__main__":
    main()
