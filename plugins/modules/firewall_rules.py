#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: the rules of this host's firewalls that drop or admit connections."""

from __future__ import annotations

import functools
import shlex

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import FIREWALLS

DOCUMENTATION = r"""
module: firewall_rules
short_description: List the rules that may drop connections
description:
  - Reads the listings of ufw, firewalld, nft and iptables as text. No packet is evaluated.
  - Run it where a real connection has failed, to find the rule that dropped it.
  - Changes nothing. Without root it returns the active firewalls and no rules.
options:
  interface: {description: Interface to the peers., type: str, default: ""}
attributes:
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: List the rules that may drop connections
  nanofleet.fleet.firewall_rules:
    interface: eth0
"""

RETURN = r"""
rules:
  description: >-
    Rules that drop, refuse or admit - firewall, place, chain, verdict, text, remedy (a shell line), version,
    protocol, source, ports, length. A condition that a rule does not have is empty.
  type: list
  elements: dict
  returned: always
active:
  description: Names of the active firewalls that can be detected without root.
  type: list
  elements: str
  returned: always
"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={"interface": {"type": "str", "default": ""}}, supports_check_mode=True
    )

    @functools.cache
    def printed(line: str) -> str | None:
        """What a command prints; None if it fails or is not installed."""
        words = shlex.split(line)
        path = module.get_bin_path(words[0], opt_dirs=["/usr/sbin", "/sbin"])
        locale = {"LC_ALL": "C", "LANG": "C"}
        code, out, _error = (
            module.run_command([path, *words[1:]], environ_update=locale) if path else (1, "", "")
        )
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
