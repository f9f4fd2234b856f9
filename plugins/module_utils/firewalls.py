# SPDX-License-Identifier: MIT
"""The known firewalls: how their rules are read, and the commands that admit connections.

Whether a firewall drops packets is found by connections that the hosts try. `matching` then selects the rules
that may have dropped them, by address and port.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.nanofleet.fleet.plugins.module_utils import firewall_listings as listings
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_listings import Rule, Run
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import reaches

Wanted = Sequence[Mapping[str, str]]
"""Connections to admit: dicts with source (an address) and port (PORT or LOW:HIGH)."""


def ufw_permit(wanted: Wanted, _place: str, comment: str) -> list[str]:
    """The commands of ufw that admit connections. wanted: dicts with source and port.

    comment: the comment that the rules get.
    """
    return [
        f"sudo ufw prepend allow from {rule['source']} to any port {rule['port']} proto tcp "
        f"comment {shlex.quote(comment)}"
        for rule in wanted
    ]


def firewalld_permit(wanted: Wanted, zone: str, _comment: str) -> list[str]:
    """The commands of firewalld that admit connections. wanted: dicts with source and port.

    zone: the zone of the rules; "" for the default zone.
    """
    option = f"--zone={zone} " if zone else ""
    typed = [
        f"""sudo firewall-cmd --permanent {option}--add-rich-rule='rule family="{family}" """
        f"""source address="{rule["source"]}" """
        f"""port port="{rule["port"].replace(":", "-")}" protocol="tcp" accept'"""
        for rule in wanted
        for family in ["ipv6" if ":" in rule["source"] else "ipv4"]
    ]
    return [*typed, "sudo firewall-cmd --reload"]


def nft_permit(wanted: Wanted, place: str, _comment: str) -> list[str]:
    """The commands of nft that admit connections. wanted: dicts with source and port.

    place: the chain of the rules, as FAMILY TABLE CHAIN; "" for inet filter input.
    """
    return [
        f"sudo nft 'insert rule {place or 'inet filter input'} {'ip6' if is_ipv6 else 'ip'} saddr "
        f"{{ {', '.join(sources)} }} tcp dport {{ {', '.join(ports).replace(':', '-')} }} accept'"
        for is_ipv6, sources, ports in grouped(wanted)
    ]


def grouped(wanted: Wanted) -> list[tuple[bool, list[str], list[str]]]:
    """The connections to admit in groups, for nft and iptables: (whether IPv6, sources, ports).

    wanted: dicts with source and port. Each source of a group is admitted to each of its ports.
    """
    ports: dict[str, list[str]] = {}
    for rule in wanted:
        ports.setdefault(rule["source"], []).append(rule["port"])
    groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for source, its in ports.items():
        groups.setdefault((":" in source, tuple(its)), []).append(source)
    return [(six, members, list(its)) for (six, its), members in groups.items()]


def iptables_permit(wanted: Wanted, _place: str, _comment: str) -> list[str]:
    """The commands of iptables that admit connections. wanted: dicts with source and port."""
    return [
        f"sudo {'ip6tables' if is_ipv6 else 'iptables'} -I INPUT -s {source} -p tcp -m multiport "
        f"--dports {','.join(ports)} -j ACCEPT"
        for is_ipv6, sources, ports in grouped(wanted)
        for source in sources
    ]


@dataclass(frozen=True)
class Firewall:
    """A kind of firewall, such as ufw: how it is detected, how its rules are read, how ports are opened."""

    rules: Callable[[Run, str], list[Rule]]
    """Returns the rules on this host. Arguments: function that runs a command, interface to the peers."""
    permit: Callable[[Wanted, str, str], list[str]]
    """Returns the commands that admit connections. Arguments: connections, place of the rules, comment."""
    listing: str
    """The command, without sudo, that lists the rules."""
    sign: str = ""
    """A command that exits with 0 if the firewall is active and needs no root; empty if there is none."""
    keep: str = ""
    """Text behind the commands of `permit`: how to keep the rules after a reboot."""
    is_managed: bool = False
    """Whether setup.yml sets its rules."""
    files: tuple[str, ...] = ()
    """Its configuration: a change of these files makes a new check by the doctor necessary."""


FIREWALLS = {
    "ufw": Firewall(
        listings.ufw_rules, ufw_permit, "ufw status", "grep -qsi ^ENABLED=yes /etc/ufw/ufw.conf",
        is_managed=True, files=("/etc/ufw/ufw.conf", "/etc/ufw/user.rules", "/etc/ufw/user6.rules"),
    ),
    "firewalld": Firewall(
        listings.firewalld_rules, firewalld_permit, "firewall-cmd --list-all",
        "systemctl --quiet is-active firewalld", files=("/etc/firewalld", "/etc/firewalld/zones"),
    ),
    "nft": Firewall(
        listings.nft_rules, nft_permit, "nft list ruleset", "systemctl --quiet is-active nftables",
        keep="  (and the same in /etc/nftables.conf, to keep it)", files=("/etc/nftables.conf",),
    ),
    "iptables": Firewall(
        listings.iptables_rules, iptables_permit, "iptables-save",
        keep="  (and sudo netfilter-persistent save, to keep it)",
    ),
}  # fmt: skip


def matching(
    rules: Iterable[Rule], verdict: str, chain: str, address: str, spans: Iterable[tuple[int, int]]
) -> list[Rule]:
    """Those of `rules` that apply to new TCP connections between the host and `address`.

    rules: dicts as in firewall_listings. verdict: drop, accept or policy. chain: INPUT or OUTPUT. Only rules
    with this verdict and this chain are returned. spans: ranges of ports (low, high); a rule for one port of
    a range is returned too. Rules about the length of packets are left out.
    """
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
    """The policies that drop TCP between the host and `address` because no rule accepts these ports.

    rules: as firewall_listings describes them. chain: INPUT or OUTPUT. spans: ranges of ports (low, high).
    A policy is left out if accept rules at the same place admit each of `spans`.
    """
    spans = list(spans)
    admitting = [
        {(rule["firewall"], rule["place"]) for rule in matching(rules, "accept", chain, address, [span])}
        for span in spans
    ]
    policies = matching(rules, "policy", chain, address, spans)
    return [each for each in policies if not all((each["firewall"], each["place"]) in a for a in admitting)]


def holds_address(written: str, address: str) -> bool:
    """Whether the address condition of a rule (`written`) includes `address`.

    written: addresses and networks, separated by commas; with `!` in front: all addresses except these; ""
    for any address.
    """
    if written in ("", "any", "anywhere"):
        return True
    if written.startswith("!"):
        return not holds_address(written.lstrip("!= "), address)
    return reaches(written.split(","), address)


def holds_port(written: str, low: int, high: int) -> bool:
    """Whether the port condition of a rule (`written`) includes a port from low to high.

    written: ports and ranges LOW:HIGH or LOW-HIGH, separated by commas, or a comparison such as >=1024; ""
    for any port. With `!` in front: all ports except these.
    """
    excludes = written.startswith("!")
    spans = [_span(part) for part in written.split(",")]

    def is_listed(port: int) -> bool:
        return any(first <= port <= last for first, last in spans)

    return not written or any(is_listed(port) != excludes for port in range(low, high + 1))


def _span(part: str) -> tuple[int, int]:
    """The first and the last port of a port, a range or a comparison; (1, 0) if it has no number."""
    numbers = [int(number) for number in re.findall(r"\d+", part)]
    if not numbers:
        return 1, 0
    if part.startswith(">"):
        return numbers[0] + ("=" not in part), 65535
    if part.startswith("<"):
        return 0, numbers[0] - ("=" not in part)
    return numbers[0], numbers[-1]
