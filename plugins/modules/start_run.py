#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: write the files of a run on a host and start its unit, in one call."""

from __future__ import annotations

import os
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text, write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_folder import make
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account, acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import own_scope, read_unit
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_end import UnitError
from ansible_collections.nanofleet.fleet.plugins.module_utils.unit_start import start

SCRIPT_MODE = 0o755


def write_script(path: str, text: str, check: bool) -> bool:
    """Write `text` to `path`, the script of a unit. Returns False if the file is already correct.

    check: write nothing; the result is the same.
    """
    mode = os.stat(path).st_mode & 0o7777 if os.path.isfile(path) else None
    if mode == SCRIPT_MODE and read_text(path, strip=False) == text:
        return False
    if not check:
        write_whole(path, text, SCRIPT_MODE)
    return True


def run(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """Write the files of a run and start its unit; returns the result of the module.

    p: options of the module. check: change nothing. Raises ValueError if the user of the unit is missing
    (not with `check`) or the run directory is a link, OSError if a file cannot be written, UnitError or
    RuntimeError if the unit cannot be started.
    """
    scope, folder = own_scope(), {**p["folder"], "path": p["run_dir"], "replace": True}
    missing = bool(p["user"]) and os.geteuid() == 0 and account(p["user"]) is None
    if missing and not check:
        raise ValueError(f"This host has no user {p['user']}. Set it up: ansible-playbook setup.yml")
    if missing:  # before the first setup a dry run has no user yet
        made: dict[str, Any] = {"changed": True, "diff": []}
    else:
        with acting_as(p["user"]):
            made = make(folder, check)
    script = write_script(p["script"]["path"], p["script"]["text"], check)
    unit = read_unit(p["name"], time.time(), scope)
    names = ("argv", "description", "user", "setenv", "boot_condition", "leaves_at_sleep")
    options = {name: p[name] for name in names}
    properties = {"scope": scope, "name": p["name"], "properties": p["properties"]}
    started = start({**options, **properties}, unit, check)
    diff = [*made.get("diff", []), *([started["diff"]] if "diff" in started else [])]
    return {**started, "changed": made["changed"] or script or started["changed"], "diff": diff}


def main() -> None:
    folder_spec = {
        "files": {"type": "dict", "default": {}},
        "remove": {"type": "list", "elements": "str", "default": []},
    }
    script_spec = {
        "path": {"type": "path", "required": True},
        "text": {"type": "str", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "run_dir": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "folder": {"type": "dict", "required": True, "options": folder_spec},
            "script": {"type": "dict", "required": True, "options": script_spec},
            "argv": {"type": "list", "elements": "str", "required": True},
            "description": {"type": "str", "default": ""},
            "setenv": {"type": "dict", "default": {}},
            "properties": {"type": "dict", "default": {}},
            "boot_condition": {"type": "list", "elements": "str", "default": []},
            "leaves_at_sleep": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    p = module.params
    names = (*p["folder"]["files"], *p["folder"]["remove"])
    plain = [name for name in names if name != os.path.basename(name)]
    if plain:
        module.fail_json(msg=f"{', '.join(plain)}: names of files of a run must not contain a folder.")
    try:
        result = run(p, module.check_mode)
    except UnitError as error:
        module.fail_json(msg=error.args[0], **error.args[1])
    except (OSError, RuntimeError, ValueError) as error:
        module.fail_json(msg=f"The run cannot be started: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
