#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read this host's interfaces and routes from the kernel. Needs no root."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.network_reading import read_network


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "str", "required": True},
            "known": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    if module.get_bin_path("ip", opt_dirs=["/usr/sbin", "/sbin"]) is None:
        module.fail_json(msg="The command ip is missing. Type on this host: sudo apt install iproute2")
    module.exit_json(changed=False, **(module.params["known"] or read_network(module.params["targets"])))


if __name__ == "__main__":
    main()
