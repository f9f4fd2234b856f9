#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: which wanted connections the packet filters in force on this host drop."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_chains import Packet, blockers
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_iptables import read_iptables
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_nft import read_nft

DOCUMENTATION = r"""
module: firewall_in_force
short_description: Find the chains that drop wanted connections
description:
  - Reads what nft and iptables-save list, whoever set it up (ufw, firewalld, a file of one's own), and walks
    the first packet of each wanted connection through the chains that guard what comes in.
  - Changes nothing. Rules that cannot be read never lead to a verdict.
options:
  rules:
    description: The wanted connections, each from one address to a TCP port or a range of them.
    type: list
    elements: dict
    required: true
    suboptions:
      source: {description: Address that connects., type: str, required: true}
      port: {description: "A port, or a range as LOW:HIGH.", type: str, required: true}
  interface:
    description: Interface on which they arrive.
    type: str
    required: true
  address:
    description: Address of this host that they are for.
    type: str
    required: true
attributes:
  check_mode: {support: full}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Look for a firewall that keeps the peer out
  nanofleet.fleet.firewall_in_force:
    rules:
      - source: 192.168.1.11
        port: "20000:20999"
    interface: eth0
    address: 192.168.1.10
"""

RETURN = r"""
blocked:
  description: >-
    One entry a chain that drops some of them - C(chain) in words, C(firewall) (nft, firewalld or iptables),
    C(place) (FAMILY TABLE CHAIN of nft), C(rules), and of firewalld its C(zone).
  type: list
  elements: dict
  returned: always
readable:
  description: Whether the listings could be read, which takes root.
  type: bool
  returned: always
"""

TABLES = ("filter", "nat", "mangle", "raw", "security")


def find_blocked(
    rules: list[dict[str, str]], listings: dict[str, Any], interface: str, address: str
) -> list[dict[str, Any]]:
    """The entries of `blocked`. listings: nft (its JSON, parsed), iptables and ip6tables (text)."""
    # iptables keeps its rules in nft's tables as well, where nft cannot read them all.
    twice = {
        f"{family} {name}"
        for family, text in (("ip", listings["iptables"]), ("ip6", listings["ip6tables"]))
        for name in TABLES
        if f"*{name}" in text.splitlines()
    }
    chains = {
        **read_iptables(listings["iptables"], 4),
        **read_iptables(listings["ip6tables"], 6),
        **read_nft(listings["nft"], twice),
    }
    found: dict[str, dict[str, Any]] = {}
    for rule in rules:
        try:
            source = str(ipaddress.ip_address(rule["source"]))
        except ValueError:
            continue
        port = int(rule["port"].partition(":")[0])
        for chain in blockers(chains, Packet(source, address, port, interface)):
            entry = {"chain": chain.label, "firewall": chain.firewall, "place": chain.place, "rules": []}
            found.setdefault(chain.label, entry)["rules"].append(rule)
    return list(found.values())


def main() -> None:
    rule_spec = {"source": {"type": "str", "required": True}, "port": {"type": "str", "required": True}}
    module = AnsibleModule(
        argument_spec={
            "rules": {"type": "list", "elements": "dict", "required": True, "options": rule_spec},
            "interface": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    readable = True

    def said(command: str, *words: str) -> str:
        """What a command prints; empty if it is not installed or fails."""
        nonlocal readable
        path = module.get_bin_path(command, opt_dirs=["/usr/sbin", "/sbin"])
        if path is None:
            return ""
        code, out, error = module.run_command([path, *words], environ_update={"LC_ALL": "C"})
        readable = readable and "ermission denied" not in error and "not permitted" not in error
        return out if code == 0 else ""

    try:
        nft = json.loads(said("nft", "--json", "list", "ruleset") or "{}")
    except ValueError:
        nft = {}
    listings = {"nft": nft, "iptables": said("iptables-save"), "ip6tables": said("ip6tables-save")}
    params = module.params
    blocked = find_blocked(params["rules"], listings, params["interface"], params["address"])
    for entry in blocked:
        zone = said("firewall-cmd", f"--get-zone-of-interface={params['interface']}").strip()
        entry["zone"] = zone or said("firewall-cmd", "--get-default-zone").strip()
    module.exit_json(changed=False, blocked=blocked, readable=readable)


if __name__ == "__main__":
    main()
