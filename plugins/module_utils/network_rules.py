"""Which firewall rules a fleet needs, and how they are typed for each kind of firewall."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, warning

KERNELS_RANGE = "32768 60999"


def plain(address: Any) -> str:
    """An address as firewalls write it back, so that a rule is found again."""
    try:
        return str(ipaddress.ip_address(str(address)))
    except ValueError:
        return str(address)


def is_local(address: str) -> bool:
    """Loopback, or an address with a zone: such a one means nothing to a firewall."""
    if not address or "%" in address:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def sources(peers: Mapping[str, str], hostvars: Mapping[str, Any]) -> list[str]:
    """The addresses each peer connects from: those it published, or else the one it is reached at."""
    found = []
    for name, address in peers.items():
        known = [hostvars[name].get(fact) for fact in ("network_address", "network_listen_address")]
        found += [plain(own) for own in known if own] or [plain(address)]
    return list(dict.fromkeys(found))


def rules(
    peers: list[str],
    ports: str,
    store_port: int,
    tracker_port: int,
    is_coordinator: bool,
    controllers: Sequence[str] = (),
) -> list[dict[str, str]]:
    """Who may reach which TCP ports of this host: [{"source", "port"}], nobody else being let in.

    peers: addresses of the other hosts. ports: "LOW:HIGH" of the ranks' listeners.
    The coordinator also serves the rendezvous store to the peers and the tracker to them and the controllers.
    """
    wanted = []
    for peer in dict.fromkeys(peers):
        wanted.append({"source": peer, "port": ports})
        if is_coordinator:
            wanted.append({"source": peer, "port": str(store_port)})
            wanted.append({"source": peer, "port": str(tracker_port)})
    if is_coordinator:
        known = dict.fromkeys(plain(address) for address in controllers if not is_local(address))
        wanted += [
            {"source": source, "port": str(tracker_port)}
            for source in known
            if source not in map(plain, peers)
        ]
    return wanted


def rule_line(rule: Mapping[str, str]) -> str:
    return f"port {rule['port']} from {rule['source']}"


def grouped(wanted: list[Mapping[str, str]]) -> list[tuple[bool, list[str], list[str]]]:
    """(is IPv6, sources, ports) of rules that go into one command."""
    ports: dict[str, list[str]] = {}
    for rule in wanted:
        ports.setdefault(rule["source"], []).append(rule["port"])
    groups: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for source, its in ports.items():
        groups.setdefault((":" in source, tuple(its)), []).append(source)
    return [(six, members, list(its)) for (six, its), members in groups.items()]


def commands(
    firewall: str,
    wanted: list[Mapping[str, str]],
    comment: str = "nanofleet",
    zone: str = "",
    chain: str = "",
) -> list[str]:
    """What an administrator types to let the wanted rules in.

    firewall: ufw, firewalld (with its zone), nft (with chain as "FAMILY TABLE CHAIN") or iptables.
    """
    typed = []
    if firewall == "ufw":
        return [
            f"sudo ufw prepend allow from {r['source']} to any port {r['port']} proto tcp "
            f"comment {shlex.quote(comment)}"
            for r in wanted
        ]
    if firewall == "firewalld":
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
    for six, members, ports in grouped(wanted):
        if firewall == "nft":
            dport = ", ".join(ports).replace(":", "-")
            tests = f"{'ip6' if six else 'ip'} saddr {{ {', '.join(members)} }} tcp dport {{ {dport} }}"
            typed.append(f"sudo nft 'insert rule {chain} {tests} accept'")
        else:
            typed += [
                f"sudo {'ip6tables' if six else 'iptables'} -I INPUT -s {source} -p tcp -m multiport "
                f"--dports {','.join(ports)} -j ACCEPT"
                for source in members
            ]
    return typed


def firewall_findings(host: str, blocked: list[Mapping[str, Any]], peers: Mapping[str, str]) -> list[Finding]:
    """A verdict on each packet filter that keeps peers out, from the result of firewall_in_force."""
    names = {plain(address): name for name, address in peers.items()}
    found = []
    for entry in blocked:
        by_source: dict[str, list[str]] = {}
        for rule in entry["rules"]:
            by_source.setdefault(rule["source"], []).append(rule["port"].replace(":", "-"))
        whom = "; ".join(
            f"TCP {', '.join(ports)} from {names.get(source, source)}" for source, ports in by_source.items()
        )
        kept = {
            "nft": "  (and the same in /etc/nftables.conf, to keep it)",
            "iptables": "  (and sudo netfilter-persistent save, to keep it)",
        }
        typed = commands(entry["firewall"], entry["rules"], zone=entry["zone"], chain=entry["place"])
        found.append(
            warning(
                host,
                f"A firewall other than ufw drops {whom}: {entry['chain']}. It was left alone.",
                f"{' && '.join(typed)}{kept.get(entry['firewall'], '')}  (on {host})",
            )
        )
    return found


def port_findings(host: str, ports: Mapping[str, Any], low: int, high: int) -> list[Finding]:
    """What stands in the way of the range of ports, from the result of ephemeral_ports."""
    span = f"{low}-{high}"
    found = []

    def add(problem: str, remedy: str) -> None:
        found.append(warning(host, problem, remedy))

    for other in ports["overriding"]:
        path = other.partition(" ")[0]
        add(
            f"At its next start {other} sets another range of ports than {span}, being read after ours.",
            f"sudo sed -i '/ip_local_port_range/d' {path}  (on {host})",
        )
    if ports.get("changed") and ports["before"] != KERNELS_RANGE:
        add(
            f"Its range of outgoing ports was {ports['before'].replace(' ', '-')}, not the kernel's own, so "
            f"somebody had set it; it is {span} now. reset.yml restores it.",
            f"grep -r ip_local_port_range /etc/sysctl.d /etc/sysctl.conf  (on {host})",
        )
    if ports["usable"] < 100:
        add(
            f"net.ipv4.ip_local_reserved_ports ({ports['reserved']}) leaves {ports['usable']} ports of "
            f"{span}; a run needs about a hundred.",
            "ansible-playbook setup.yml -e network_port_low=LOW -e network_port_high=HIGH",
        )
    for held in ports["listeners"]:
        add(
            f"Port {held['port']} in {span} is served by {held['user']}, and the other hosts reach it now.",
            "ansible-playbook setup.yml -e network_port_low=LOW -e network_port_high=HIGH, or move it",
        )
    return found


def owner_findings(
    host: str,
    seen: list[str],
    wanted: list[Mapping[str, str]],
    low: int,
    high: int,
    comment: str = "nanofleet",
) -> list[Finding]:
    """What the owner of a host where nobody becomes root has to type, by what tasks/owner.yml read.

    Without a firewall there is nothing to open, and any range of ports will do.
    """
    facts = [line.partition("=")[::2] for line in seen]
    firewalls = [value for key, value in facts if key == "firewall"]
    spans = ["-".join(value.split()) for key, value in facts if key == "range"]
    if not firewalls or not wanted:
        return []
    known = {"nftables": "nft"}.get(firewalls[0], firewalls[0])
    typed = commands(known, wanted, comment, chain="inet filter input")
    if spans and spans[0] != f"{low}-{high}":
        setting, path = f"net.ipv4.ip_local_port_range = {low} {high}", "/etc/sysctl.d/60-nanofleet.conf"
        typed = [f"echo '{setting}' | sudo tee {path}", f"sudo sysctl --load={path}", *typed]
    problem = (
        f"Nobody becomes root there, so {firewalls[0]}, which is on, and the range of ports were left alone. "
        "Whether the peers get in: ansible-playbook doctor.yml. To let them in is for its owner."
    )
    return [warning(host, problem, f"{' && '.join(typed)}  (on {host})")]


def filter_findings(host: str, answer: str) -> list[Finding]:
    """A warning where systemd does not restrict units to the fleet's addresses.

    answer: closed (it does), open (it does not), user (units are a user's own), or anything else (not known).
    """
    if answer == "closed":
        return []
    reason = {
        "open": "Its systemd or kernel does not filter a unit's addresses (IPAddressDeny= has no effect)",
        "user": "Nobody becomes root there, and a user's own systemd cannot filter a unit's addresses",
    }.get(answer, "Whether systemd filters a unit's addresses (IPAddressDeny=) could not be tested")
    return [
        warning(
            host,
            f"{reason}, so only a firewall keeps other machines from the ports of a run.",
            f"sudo ufw status  (on {host}), and enable a firewall, or set fleet_address of every "
            "host to its address in a private network (docs/security.md)",
        )
    ]


def removed_rule(line: str) -> str:
    return f"ufw rule: {line}" if line.startswith("allow ") else line
