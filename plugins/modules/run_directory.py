#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: make or remove a run directory, and write files in it."""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text, write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account, acting_as

FOLDER_MODE = 0o750
FILE_MODE = 0o640


def prepare_folder(path: str, check: bool) -> bool:
    """Create the folder `path` for a run, or set the mode and group of an existing one.

    Returns whether something was changed, or with `check` would be. Raises ValueError for a symbolic link.
    """
    if os.path.islink(path):
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, and a run's files are written to real folders only. "
            f"Remove the link on this host: sudo rm {path}"
        )
    found = os.stat(path) if os.path.exists(path) else None
    if found and (stat.S_IMODE(found.st_mode), found.st_gid) == (FOLDER_MODE, os.getegid()):
        return False
    if not check:
        os.makedirs(path, exist_ok=True)
        os.chown(path, -1, os.getegid())
        os.chmod(path, FOLDER_MODE)
    return True


def make(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Make the run directory and its files. Returns changed, changed_files and a diff."""
    run_dir = params["path"]
    changed = [prepare_folder(path, check) for path in (os.path.dirname(run_dir), run_dir)]
    names, diff = [], []
    for name in params["remove"]:
        if os.path.lexists(path := os.path.join(run_dir, name)):
            names.append(name)
            if not check:
                os.unlink(path)
    for name, text in params["files"].items():
        path = os.path.join(run_dir, name)
        exists = os.path.isfile(path) and not os.path.islink(path)
        before = read_text(path, strip=False) if exists else ""
        if exists and (before == text or not params["replace"]):
            continue
        names.append(name)
        diff.append({"before_header": path, "after_header": path, "before": before, "after": text})
        if not check:
            write_whole(path, text, FILE_MODE)
    return {"changed": any(changed) or bool(names), "changed_files": names, "diff": diff}


def remove(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Remove the run directory; if its path is a link or a file, remove that. Returns changed."""
    path = params["path"]
    found = os.path.lexists(path)
    if found and not check:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return {"changed": found, "changed_files": []}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "files": {"type": "dict", "default": {}},
            "replace": {"type": "bool", "default": True},
            "remove": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    params, user = module.params, module.params["user"]
    plain = [name for name in (*params["files"], *params["remove"]) if name != os.path.basename(name)]
    if plain:
        module.fail_json(msg=f"{', '.join(plain)}: names of files of a run must not contain a folder.")
    if user and os.geteuid() == 0 and account(user) is None:
        # Before the first setup a dry run has no user yet.
        if module.check_mode or params["state"] == "absent":
            module.exit_json(changed=params["state"] == "present", changed_files=[])
        module.fail_json(msg=f"This host has no user {user}. Set it up: ansible-playbook setup.yml")
    try:
        with acting_as(user):
            done = (make if params["state"] == "present" else remove)(params, module.check_mode)
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"The run's directory cannot be used: {error}")
    module.exit_json(**done)


if __name__ == "__main__":
    main()
