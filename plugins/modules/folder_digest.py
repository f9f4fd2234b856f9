#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: compute the sha256 over names and contents of all files in a folder, to compare copies."""

from __future__ import annotations

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.file_digests import folder_digest
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        with acting_as(module.params["user"]):
            result = folder_digest(Path(module.params["path"]))
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"The folder {module.params['path']} cannot be read: {error}.")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
