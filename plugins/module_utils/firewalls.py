# SPDX-License-Identifier: MIT
"""The firewalls that are known: how each is read, and what is typed to admit connections.

Real connections show that packets are lost; `matching` picks the rules that are for the port and address.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.nanofleet.fleet.plugins.module_utils import firewall_listings as listings
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import Rule, Run

Wanted = Sequence[Mapping[str, str]]
"""Connections to admit: source, and port as PORT or LOW:HIGH."""


def ufw_permit(wanted: Wanted, _place: str, comment: str) -> list[str]:
    return [
        f"sudo ufw prepend allow from {rule['source']} to any port {rule['port']} proto tcp "
        f"comment {shlex.quote(comment)}"
        for rule in wanted
    ]


def firewalld_permit(wanted: Wanted, zone: str, _comment: str) -> list[str]:
    typed = []
    for rule in wanted:
        family = "ipv6" if ":" in rule["source"] else "ipv4"
        rich = (
            f'rule family="{family}" source address="{rule["source"]}" '
            f'port port="{rule["port"].replace(":", "-")}" protocol="tcp" accept'
        )
        typed.append(
            f"sudo firewall-cmd --permanent {f'--zone={zone} ' if zone else ''}--add-rich-rule='{rich}'"
        )
    return [*typed, "sudo firewall-cmd --reload"]


def nft_permit(wanted: Wanted, place: str, _comment: str) -> list[str]:
    return [
        f"sudo nft 'insert rule {place or 'inet filter input'} {'ip6' if is_ipv6 else 'ip'} saddr "
        f"{{ {', '.join(sources)} }} tcp dport {{ {', '.join(ports).replace(':', '-')} }} accept'"
        for is_ipv6, sources, ports in grouped(wanted)
    ]


def grouped(wanted: Wanted) -> list[tuple[bool, list[str], list[str]]]:
    """(is IPv6, sources, ports) of connections that go into one command."""
    ports: dict[str, list[str]] = {}
    for rule in wanted:
        ports.setdefault(rule["source"], []).append(rule["port"])
    groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for source, its in ports.items():
        groups.setdefault((":" in source, tuple(its)), []).append(source)
    return [(six, members, list(its)) for (six, its), members in groups.items()]


def iptables_permit(wanted: Wanted, _place: str, _comment: str) -> list[str]:
    return [
        f"sudo {'ip6tables' if is_ipv6 else 'iptables'} -I INPUT -s {source} -p tcp -m multiport "
        f"--dports {','.join(ports)} -j ACCEPT"
        for is_ipv6, sources, ports in grouped(wanted)
        for source in sources
    ]


@dataclass(frozen=True)
class Firewall:
    """One kind of firewall."""

    rules: Callable[[Run, str], list[Rule]]
    """Its rules on this host, given the interface to the peers."""
    permit: Callable[[Wanted, str, str], list[str]]
    """What is typed to admit connections at a place, with a comment."""
    listing: str
    """What is typed to see its rules."""
    sign: str = ""
    """A command that succeeds, for any user, where it is active."""
    keep: str = ""
    """What is to be done so that what `permit` typed outlives a restart."""
    is_managed: bool = False
    """Whether setup.yml sets its rules."""


FIREWALLS = {
    "ufw": Firewall(
        listings.ufw_rules,
        ufw_permit,
        "ufw status",
        sign="grep -qsi ^ENABLED=yes /etc/ufw/ufw.conf",
        is_managed=True,
    ),
    "firewalld": Firewall(
        listings.firewalld_rules,
        firewalld_permit,
        "firewall-cmd --list-all",
        sign="systemctl --quiet is-active firewalld",
    ),
    "nft": Firewall(
        listings.nft_rules,
        nft_permit,
        "nft list ruleset",
        sign="systemctl --quiet is-active nftables",
        keep="  (and the same in /etc/nftables.conf, to keep it)",
    ),
    "iptables": Firewall(
        listings.iptables_rules,
        iptables_permit,
        "iptables-save",
        keep="  (and sudo netfilter-persistent save, to keep it)",
    ),
}


def matching(
    rules: Iterable[Rule], verdict: str, chain: str, address: str, spans: Iterable[tuple[int, int]]
) -> list[Rule]:
    """The rules for new TCP connections of any size between this address and one port of these spans."""
    spans = list(spans)
    return [
        rule
        for rule in rules
        if (rule["verdict"], rule["chain"], rule["length"]) == (verdict, chain, "")
        and rule["protocol"] in ("", "tcp", "all", "any", "6")
        and rule["version"] in ("", "6" if ":" in address else "4")
        and holds_address(rule["source"], address)
        and any(holds_port(rule["ports"], *span) for span in spans)
    ]


def lacking(rules: Sequence[Rule], chain: str, address: str, spans: Iterable[tuple[int, int]]) -> list[Rule]:
    """The policies that drop these connections, no plain rule beside them admitting each."""
    spans = list(spans)
    return [
        policy
        for policy in matching(rules, "policy", chain, address, spans)
        if not all(
            any(
                (rule["firewall"], rule["place"]) == (policy["firewall"], policy["place"])
                for rule in matching(rules, "accept", chain, address, [span])
            )
            for span in spans
        )
    ]


def holds_address(written: str, address: str) -> bool:
    """Whether a rule's address (one, a network, several, `!` for all but it, or none for any) holds this."""
    if written in ("", "any", "anywhere"):
        return True
    if written.startswith("!"):
        return not holds_address(written.lstrip("!= "), address)
    for part in written.split(","):
        try:
            if ipaddress.ip_address(address) in ipaddress.ip_network(part, strict=False):
                return True
        except ValueError:
            continue
    return False


def holds_port(written: str, low: int, high: int) -> bool:
    """Whether a rule's ports (20000:20999, 20000-20999, 22,80, none for any) hold one of low to high."""
    if written.startswith("!"):
        return not holds_port(written.lstrip("!= "), low, high)
    bounds = [[int(number) for number in re.findall(r"\d+", part)] for part in written.split(",")]
    return not written or any(each and each[0] <= high and low <= each[-1] for each in bounds)
