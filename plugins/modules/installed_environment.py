#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the versions in a run's Python environment; train.yml compares them across hosts."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.environment_reading import read_environment


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "known": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        found = module.params["known"] or read_environment(module.params["python"])
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
