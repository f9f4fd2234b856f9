#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: the rules of this host that turn packets away, each with the command that takes it out."""

from __future__ import annotations

import re
import shlex

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: doctor_firewall
short_description: List what this host's firewalls turn away
description:
  - Reads ufw's own rules, then the rules of nftables and iptables that somebody else made.
  - Only run where a probe was turned away; it needs root and changes nothing.
attributes:
  check_mode: {support: full}
options: {}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: List what turns packets away
  nanofleet.fleet.doctor_firewall:
"""

RETURN = r"""
ufw: {description: State of ufw - active, inactive or absent., type: str, returned: always}
rules:
  description: >-
    Rules that drop or refuse - text, remedy (a shell line), chain, protocol, source, ports, length;
    each of the last four is empty if the rule has none.
  type: list
  elements: dict
  returned: always
allows:
  description: ufw's rules that let somebody in, in the same form.
  type: list
  elements: dict
  returned: always
"""

TURNS_AWAY = {"DROP", "REJECT"}


def option(words: list[str], *names: str) -> str:
    """The word behind the first of these options, and whether a `!` stands before it."""
    for name in names:
        if name in words[:-1]:
            place = words.index(name)
            return ("! " if words[place - 1] == "!" else "") + words[place + 1]
    return ""


def iptables_rules(saved: str, command: str) -> list[dict[str, str]]:
    """Dropping rules of INPUT and OUTPUT in `iptables-save`; ufw's stand in chains of its own."""
    found = []
    for line in saved.splitlines():
        words = shlex.split(line) if line.startswith(("-A INPUT ", "-A OUTPUT ")) else []
        if option(words, "-j") not in TURNS_AWAY:
            continue
        outgoing = words[1] == "OUTPUT"
        found.append(
            {
                "text": f"{command} {line}",
                "remedy": f"sudo {command} -D {line[3:]}",
                "chain": words[1],
                "protocol": option(words, "-p"),
                "source": option(words, "-d") if outgoing else option(words, "-s"),
                "ports": option(words, "--dport", "--dports"),
                "length": option(words, "--length"),
            }
        )
    return found


def ufw_rules(added: str, verbs: set[str]) -> list[dict[str, str]]:
    """The rules in `ufw show added` that do one of `verbs`."""
    found = []
    for line in added.splitlines():
        words = line.strip().split(" comment ")[0].split()
        if words[:1] != ["ufw"] or not verbs & set(words[1:4]):
            continue
        outgoing = "out" in words
        bare = words[-1] if len(words) == 3 else ""
        port, _slash, protocol = (option(words, "port") or bare).partition("/")
        found.append(
            {
                "text": " ".join(words),
                "remedy": f"sudo ufw delete {' '.join(words[1:])}",
                "chain": "OUTPUT" if outgoing else "INPUT",
                "protocol": option(words, "proto") or protocol,
                "source": option(words, "to") if outgoing else option(words, "from"),
                "ports": port,
                "length": "",
            }
        )
    return found


def nft_rules(listed: str) -> list[dict[str, str]]:
    """Dropping rules in `nft -a list ruleset`, but for the tables that iptables and ufw fill."""
    found, table, chain, hook, is_iptables = [], "", "", "", False
    for raw in listed.splitlines():
        line = raw.strip()
        if match := re.match(r"table (\S+ \S+) \{", line):
            table, hook = match[1], ""
            is_iptables = table in ("ip filter", "ip6 filter")
        elif match := re.match(r"chain (\S+) \{", line):
            chain, hook = match[1], ""
        elif match := re.search(r"\bhook (\w+)\b", line):
            hook = match[1]
        match = re.search(r"\b(?:drop|reject)\b.*# handle (\d+)$", line)
        if not match or is_iptables or hook not in ("input", "output"):
            continue
        end = "daddr" if hook == "output" else "saddr"
        found.append(
            {
                "text": f"nft {line.split(' # handle')[0]}",
                "remedy": f"sudo nft delete rule {table} {chain} handle {match[1]}",
                "chain": hook.upper(),
                "protocol": "tcp" if "tcp " in line else "udp" if "udp " in line else "",
                "source": _after(line, end),
                "ports": _after(line, "dport"),
                "length": _after(line, "length"),
            }
        )
    return found


def _after(line: str, word: str) -> str:
    match = re.search(rf"\b{word} (\{{[^}}]*\}}|[<>!=]* ?\S+)", line)
    return match[1].strip("{} ").replace(" ", "") if match else ""


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)

    def said(tool: str, *words: str) -> str | None:
        path = module.get_bin_path(tool, opt_dirs=["/usr/sbin", "/sbin"])
        if path is None:
            return None
        code, out, _error = module.run_command([path, *words], environ_update={"LC_ALL": "C", "LANG": "C"})
        return out if code == 0 else ""

    status = said("ufw", "status")
    ufw = "absent" if status is None else "active" if "Status: active" in status else "inactive"
    added = (said("ufw", "show", "added") or "") if ufw == "active" else ""
    rules = ufw_rules(added, {"deny", "reject"})
    rules += iptables_rules(said("iptables-save") or "", "iptables")
    rules += iptables_rules(said("ip6tables-save") or "", "ip6tables")
    rules += nft_rules(said("nft", "-a", "list", "ruleset") or "")
    module.exit_json(changed=False, ufw=ufw, rules=rules, allows=ufw_rules(added, {"allow", "limit"}))


if __name__ == "__main__":
    main()
