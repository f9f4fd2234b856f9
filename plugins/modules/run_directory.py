#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: make or remove a run directory, and write files in it that the trainer does not write."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account, acting_as

DOCUMENTATION = r"""
module: run_directory
short_description: Make a run directory and files in it, or remove it
description:
  - Works with the rights of O(user), so that a link of that user leads only to files that the user may
    change anyway.
  - Refuses a run directory, or a folder of runs, that is a link. A link with the name of a file is replaced
    by the file.
  - A file is replaced in one step. Files have the mode 0640, directories 0750.
options:
  path:
    description: The run directory.
    type: path
    required: true
  user:
    description: The owner, if the module runs as root; otherwise it is whoever runs the module.
    type: str
    default: ""
  state:
    description: V(present) makes the directory and its files; V(absent) removes it and its content.
    type: str
    choices: [present, absent]
    default: present
  files:
    description: Files to write, name to text.
    type: dict
    default: {}
  replace:
    description: Whether a file that exists with another text is replaced.
    type: bool
    default: true
  remove:
    description: Names of files to remove.
    type: list
    elements: str
    default: []
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Write the run file
  nanofleet.fleet.run_directory:
    path: /var/lib/nanofleet/runs/d4-1a2b3c4d
    user: nanofleet
    files: {run.json: "{}\n"}
    remove: [outcome.json]

- name: Remove the run's directory
  nanofleet.fleet.run_directory:
    path: /var/lib/nanofleet/runs/d4-1a2b3c4d
    user: nanofleet
    state: absent
"""

RETURN = r"""
changed_files:
  description: Names of the files that were written or removed.
  type: list
  elements: str
  returned: always
"""

FOLDER_MODE = 0o750
FILE_MODE = 0o640


class RefusedError(Exception):
    """The run directory cannot be used. The text of the error is the message for the person."""


def open_folder(path: str, check: bool) -> tuple[int | None, bool]:
    """(descriptor of a folder, whether it was made or changed). A missing folder is made.

    In check mode a missing folder is not made; its descriptor is None. Raises RefusedError for a link.
    """
    if os.path.islink(path):
        raise RefusedError(
            f"{path} is a link to {os.readlink(path)}, and a run's files are written to real folders only. "
            f"Remove the link on this host: sudo rm {path}"
        )
    missing = not os.path.exists(path)
    if missing and check:
        return None, True
    if missing:
        os.mkdir(path, FOLDER_MODE)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    changed = (stat.S_IMODE(found.st_mode), found.st_gid) != (FOLDER_MODE, os.getegid())
    if changed and not check:
        os.fchown(folder, -1, os.getegid())
        os.fchmod(folder, FOLDER_MODE)
    return folder, changed or missing


def read_file(folder: int, name: str) -> str | None:
    """The text of a regular file in a folder; None if there is no such file."""
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with open(opened, encoding="utf-8", errors="replace") as file:
        return file.read() if stat.S_ISREG(os.fstat(opened).st_mode) else None


def write_file(folder: int, name: str, text: str) -> None:
    """Write a file in a folder in one step; it replaces a file or link of that name."""
    temporary = f".{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(temporary, flags, FILE_MODE, dir_fd=folder), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def make(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Make the run directory and its files. Returns changed, changed_files and a diff."""
    changed, folder = False, None
    for path in (os.path.dirname(params["path"]), params["path"]):
        if folder is not None:
            os.close(folder)
        folder, made = open_folder(path, check)
        changed = changed or made
    names, diff = [], []
    for name in params["remove"]:
        if folder is not None and os.path.lexists(os.path.join(params["path"], name)):
            names.append(name)
            if not check:
                os.unlink(name, dir_fd=folder)
    for name, text in params["files"].items():
        before = read_file(folder, name) if folder is not None else None
        if before == text or not (before is None or params["replace"]):
            continue
        names.append(name)
        header = os.path.join(params["path"], name)
        diff.append({"before_header": header, "after_header": header, "before": before or "", "after": text})
        if folder is not None and not check:
            write_file(folder, name, text)
    return {"changed": changed or bool(names), "changed_files": names, "diff": diff}


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
    except (OSError, RefusedError) as error:
        module.fail_json(msg=f"The run's directory cannot be used: {error}")
    module.exit_json(**done)


if __name__ == "__main__":
    main()
