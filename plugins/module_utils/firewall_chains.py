# SPDX-License-Identifier: MIT
"""Whether the packet filters in force on a host let a new TCP connection in.

Chains of rules, whose tests are answered yes, no or unknown; a packet is walked through every chain that
guards what comes in. Only a certain drop is reported: where a rule that cannot be read might have let the
connection in, nothing is.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Answer = bool | None  # None: unknown


@dataclass(frozen=True)
class Packet:
    """The first packet of a TCP connection."""

    source: str
    destination: str
    port: int
    interface: str

    @property
    def version(self) -> int:
        return ipaddress.ip_address(self.source).version


@dataclass
class Rule:
    verdict: str  # accept, drop, return, jump, goto, none
    tests: list[Callable[[Packet], Answer]] = field(default_factory=list)
    target: str = ""

    def applies(self, packet: Packet) -> Answer:
        answers = [test(packet) for test in self.tests]
        return False if False in answers else None if None in answers else True


@dataclass
class Chain:
    label: str  # as a person would name it
    rules: list[Rule] = field(default_factory=list)
    policy: str = ""  # of a chain that guards what comes in; else empty
    version: int = 0  # of IP; 0: both
    firewall: str = "nft"
    place: str = ""  # FAMILY TABLE CHAIN


Chains = dict[tuple[str, str], Chain]  # (table, chain)


def within(address: Any, network: Any) -> bool:
    try:
        return ipaddress.ip_address(str(address)) in ipaddress.ip_network(str(network), strict=False)
    except ValueError:
        return False


def negated(answer: Answer, inverted: bool) -> Answer:
    return answer if answer is None or not inverted else not answer


def walk(chains: Chains, at: tuple[str, str], packet: Packet, depth: int = 0) -> tuple[str, bool]:
    """(accept, drop or "" for falling through; whether a rule that cannot be read might have let it in)."""
    doubt = False
    chain = chains.get(at)
    if chain is None or depth > 32:  # a target that is no chain, such as NFQUEUE
        return "", True
    for rule in chain.rules:
        applies = rule.applies(packet)
        if applies is False or rule.verdict == "none":
            continue
        if rule.verdict in ("jump", "goto"):
            end, doubted = walk(chains, (at[0], rule.target), packet, depth + 1)
            if applies is None:
                doubt = doubt or end == "accept" or doubted
                continue
            doubt = doubt or doubted
            if end or rule.verdict == "goto":
                return end, doubt
        elif applies is None:
            doubt = doubt or rule.verdict in ("accept", "return")
        else:
            return ("" if rule.verdict == "return" else rule.verdict), doubt
    return "", doubt


def blockers(chains: Chains, packet: Packet) -> list[Chain]:
    """The chains that are certain to drop the packet."""
    found = []
    for at, chain in chains.items():
        if not chain.policy or chain.version not in (0, packet.version):
            continue
        end, doubt = walk(chains, at, packet)
        if (end or chain.policy) == "drop" and not doubt:
            found.append(chain)
    return found
