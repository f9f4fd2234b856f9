#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: make or remove a run directory, and write files in it."""

from __future__ import annotations

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_folder import make, remove
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import account, acting_as


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
