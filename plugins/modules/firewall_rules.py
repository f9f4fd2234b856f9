#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the rules of this host's firewalls that drop or admit connections."""

from __future__ import annotations

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_reading import read_firewalls


def main() -> None:
    module = AnsibleModule(
        argument_spec={"interface": {"type": "str", "default": ""}}, supports_check_mode=True
    )
    found = read_firewalls(module.params["interface"])
    if os.geteuid() != 0:  # only root sees all rules
        found["rules"] = None
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
