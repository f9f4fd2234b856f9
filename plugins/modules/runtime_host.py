#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read what a Python environment depends on: Python, architecture, users, folders, rsync."""

from __future__ import annotations

import os
import platform
import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.host_accounts import described, folder
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import user_name
from ansible_collections.nanofleet.fleet.plugins.module_utils.venv_state import PRINT_VERSION


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
    _code, version, _error = module.run_command([params["python"], "-I", "-c", PRINT_VERSION], check_rc=True)
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
