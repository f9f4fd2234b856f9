#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read what an environment depends on: Python, machine, login and service user, folders."""

from __future__ import annotations

import os
import platform
import shutil
import stat

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account, user_name

VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def described(name: str) -> dict[str, str] | None:
    """Comment, home and shell of a user; None if there is no such user."""
    entry = account(name)
    return entry and {"comment": entry.pw_gecos, "home": entry.pw_dir, "shell": entry.pw_shell}


def folder(path: str) -> dict[str, str] | None:
    """Owner and mode of a folder, links not followed; None if it does not exist."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return {"owner": user_name(status.st_uid), "mode": f"{stat.S_IMODE(status.st_mode):04o}"}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "str", "default": "python3"},
            "user": {"type": "str", "required": True},
            "folders": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    _code, version, _error = module.run_command([params["python"], "-I", "-c", VERSION], check_rc=True)
    host = {
        "python": version.strip(),
        "machine": platform.machine(),
        "user": user_name(os.getuid()),
        "rsync": shutil.which("rsync") is not None,
        "account": described(params["user"]),
        "folders": {path: found for path in params["folders"] if (found := folder(path))},
    }
    module.exit_json(changed=False, host=host)


if __name__ == "__main__":
    main()
