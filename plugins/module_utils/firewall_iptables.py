# SPDX-License-Identifier: MIT
"""Chains of firewall_chains from the output of `iptables-save` and `ip6tables-save`."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_chains import (
    Answer,
    Chain,
    Chains,
    Packet,
    Rule,
    negated,
    within,
)

PASSING = {"LOG", "NFLOG", "MARK", "CONNMARK", "SET", "TRACE", "AUDIT", "TCPMSS"}
"""Targets that decide nothing."""
MODULES = {"tcp", "conntrack", "state", "multiport", "comment", "addrtype"}


def _in_ports(text: str) -> Callable[[Packet], Answer]:
    spans = [part.partition(":") for part in text.split(",")]
    return lambda packet: any(
        int(low or 0) <= packet.port <= int(high or (low if not colon else 65535))
        for low, colon, high in spans
    )


def _with_sign(test: Callable[[Packet], Answer], inverted: bool) -> Callable[[Packet], Answer]:
    """The test, or what it is after a `!`."""
    return lambda packet: negated(test(packet), inverted)


def _option(name: str, value: str) -> Callable[[Packet], Answer]:
    """The test that an iptables option asks for; one that is not known is answered unknown."""
    if name in ("-s", "--source"):
        return lambda packet: within(packet.source, value)
    if name in ("-d", "--destination"):
        return lambda packet: within(packet.destination, value)
    if name in ("-i", "--in-interface"):
        stem = value[:-1] if value.endswith("+") else ""
        return lambda packet: packet.interface.startswith(stem) if stem else packet.interface == value
    if name in ("-p", "--protocol"):
        return lambda _packet: value in ("tcp", "6", "all")
    if name in ("--dport", "--dports", "--destination-ports"):
        return _in_ports(value)
    if name in ("--ctstate", "--state"):
        return lambda _packet: "NEW" in value.split(",")
    if name == "--dst-type":
        return lambda _packet: value == "LOCAL"
    return lambda _packet: None


def iptables_rule(words: list[str]) -> Rule:
    rule, inverted, index = Rule("none"), False, 0
    while index < len(words):
        word = words[index]
        value = words[index + 1] if index + 1 < len(words) else ""
        if word == "!":
            inverted, index = True, index + 1
            continue
        if word in ("-j", "-g"):
            ends = {"ACCEPT": "accept", "DROP": "drop", "REJECT": "drop", "RETURN": "return"}
            rule.verdict = ends.get(value, "goto" if word == "-g" else "jump")
            if value in PASSING:
                rule.verdict = "none"
            rule.target = value
            break  # what follows are the target's own options
        if word in ("-m", "--match"):
            if value not in MODULES:
                rule.tests.append(lambda _packet: None)
        elif word.startswith("-") and word != "--comment":
            test = _option(word, value)
            rule.tests.append(_with_sign(test, inverted))
        inverted = False
        index += 2 if value and not value.startswith("-") else 1
    return rule


def read_iptables(text: str, version: int) -> Chains:
    """Chains of the filter table in the output of iptables-save or ip6tables-save."""
    chains: Chains = {}
    table = ""
    command = "iptables" if version == 4 else "ip6tables"
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif table == "filter" and line.startswith(":"):
            name, policy = line[1:].split()[:2]
            guards = name == "INPUT"
            chains[command, name] = Chain(
                label=f"{command}, chain {name}",
                policy=policy.lower() if guards else "",
                version=version,
                firewall="iptables",
            )
        elif table == "filter" and line.startswith("-A "):
            words = shlex.split(line)
            chains[command, words[1]].rules.append(iptables_rule(words[2:]))
    return chains
