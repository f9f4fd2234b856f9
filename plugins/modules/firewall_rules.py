#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: the rules of this host's firewalls that drop or admit connections."""

from __future__ import annotations

import functools
import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import FIREWALLS


def main() -> None:
    module = AnsibleModule(
        argument_spec={"interface": {"type": "str", "default": ""}}, supports_check_mode=True
    )

    @functools.cache
    def printed(line: str) -> str | None:
        """What a command prints; None if it fails or is not installed."""
        words = shlex.split(line)
        path = module.get_bin_path(words[0], opt_dirs=["/usr/sbin", "/sbin"])
        if path is None:
            return None
        locale = {"LC_ALL": "C", "LANG": "C"}
        code, out, _error = module.run_command([path, *words[1:]], environ_update=locale)
        return None if code else out

    def run(line: str) -> str:
        return printed(line) or ""

    module.exit_json(
        changed=False,
        rules=[rule for each in FIREWALLS.values() for rule in each.rules(run, module.params["interface"])],
        active=[name for name, each in FIREWALLS.items() if each.sign and printed(each.sign) is not None],
    )


if __name__ == "__main__":
    main()
