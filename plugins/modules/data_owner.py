#!/usr/bin/python
"""Ansible module: set the owner of a data directory (the login user during rsync, else the service user)."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.data_folder import own


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "reader": {"type": "str", "required": True},
            "mode": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        result = own(Path(p["path"]), p["user"], p["reader"], int(p["mode"], 8), module.check_mode)
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
