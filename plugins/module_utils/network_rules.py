"""The connections that a host has to admit, and findings about what prevents them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_paths import connection_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import FIREWALLS
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import is_loopback, parse_ip
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed

KERNELS_RANGE = "32768 60999"


def plain(address: Any) -> str:
    """An address in the form in which firewalls print it, so that an existing rule is recognised."""
    return str(parse_ip(address) or address)


def is_local(address: str) -> bool:
    """Loopback, or an address with a zone: such a one means nothing to a firewall."""
    return not address or "%" in address or is_loopback(address)


def sources(peers: Mapping[str, str], hostvars: Mapping[str, Any]) -> list[str]:
    """The addresses that the peers connect from, without duplicates.

    peers: address by name. A peer's addresses are its published facts network_address and
    network_listen_address; without them, its address in `peers`.
    """
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
    """The connections that this host has to admit: [{"source", "port"}]. All others stay closed.

    peers: addresses of the other hosts. ports: "LOW:HIGH" of the ranks' listeners. The coordinator also
    admits the peers to the rendezvous store and to the tracker, and the controllers to the tracker.
    """
    wanted = [ports, str(store_port), str(tracker_port)] if is_coordinator else [ports]
    found = [(peer, port) for peer in dict.fromkeys(peers) for port in wanted]
    if is_coordinator:
        known = dict.fromkeys(plain(address) for address in controllers if not is_local(address))
        found += [(source, str(tracker_port)) for source in known if source not in map(plain, peers)]
    return [{"source": source, "port": port} for source, port in found]


def measured(hosts: Sequence[str], hostvars: Mapping[str, Any], low: int, high: int) -> dict[str, Any]:
    """Connections that were tried between these hosts on fixed ports, in the form of doctor_measured.

    low, high: the range of ports. A listener on a port that the kernel chose is left out: in a dry run the
    kernel chooses ports outside of the range that setup.yml would set. Round-trip times are left out, because
    only the doctor reports them.
    """

    def fixed(ports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [port for port in ports if not port["picked"]]

    found = {}
    for host in hosts:
        listening, tried, listed = (
            hostvars[host].get(f"__network_{name}") or {} for name in ("listening", "tried", "listed")
        )
        found[host] = {
            "reachable": "ports" in listening,
            "address": hostvars[host].get("network_address", ""),
            "interface": hostvars[host].get("network_interface", ""),
            "ports": fixed(listening.get("ports") or []),
            "facts": {"port_range": [low, high]},
            "paths": {
                peer: {**each, "ports": fixed(each["ports"]), "rtt_ms": None}
                for peer, each in (tried.get("peers") or {}).items()
            },
            "firewall": listed.get("rules"),
        }
    return found


def findings(
    host: str, own: Mapping[str, Any], connections: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Finding]:
    """The findings (see findings.py) about firewall and ports of `host`.

    own: variables of the host, with the results that the tasks registered. connections: result of `measured`.
    options: port_low, port_high, store_port, wanted (result of `rules`), comment (the text that marks the
    rules of nanofleet), is_root (whether tasks become root).
    """
    if not options["is_root"]:
        return [*owner_findings(host, own, options), *filter_findings(host, "user")]
    closed = connection_findings(connections, {**options, "slow_rtt_ms": 0})
    return [
        *filter_findings(host, own["__network_filter"].get("stdout", "")),
        *port_findings(host, own["__network_ports"], options["port_low"], options["port_high"]),
        *({**each, "severity": "warning"} for each in closed if each["host"] == host),
    ]


def port_findings(host: str, ports: Mapping[str, Any], low: int, high: int) -> Iterator[Finding]:
    """Warnings about the range of ephemeral ports. ports: result of the module ephemeral_ports."""
    span = f"{low}-{high}"
    other_range = "ansible-playbook setup.yml -e network_port_low=LOW -e network_port_high=HIGH"
    for other in ports["overriding"]:
        problem = (
            f"{other} sets another range of ephemeral ports than {span}. At the next boot it overrides the "
            "range that setup.yml sets, because it is read later."
        )
        path = other.partition(" ")[0]
        yield warning("NF210", host, problem, f"sudo sed -i '/ip_local_port_range/d' {path}  (on {host})")
    if ports.get("changed") and ports["before"] != KERNELS_RANGE:
        problem = (
            f"net.ipv4.ip_local_port_range was {ports['before'].replace(' ', '-')}, not the kernel's "
            f"default. setup.yml sets it to {span}; reset.yml restores the former range."
        )
        remedy = (
            "nothing if you have not set it yourself; the file that sets it: "
            f"grep -r ip_local_port_range /etc/sysctl.d /etc/sysctl.conf  (on {host})"
        )
        yield warning("NF211", host, problem, remedy)
    if ports["usable"] < 100:
        problem = (
            f"net.ipv4.ip_local_reserved_ports ({ports['reserved']}) leaves {ports['usable']} ports of "
            f"{span}; a run needs about a hundred."
        )
        yield warning("NF212", host, problem, other_range)
    for held in ports["listeners"]:
        problem = (
            f"The user {held['user']} listens on port {held['port']}, which is in {span}, the range that is "
            "open to the other hosts. They can connect to it."
        )
        yield warning("NF213", host, problem, f"{other_range}, or move that program to another port")


def owner_findings(host: str, own: Mapping[str, Any], options: Mapping[str, Any]) -> list[Finding]:
    """A warning with the commands that the owner of a host without root access for plays has to type.

    Arguments as in `findings`. Without an active firewall there is no warning: nothing needs to be opened,
    and any range of ports can be used.
    """
    active = own["__network_listed"]["active"]
    if not active or not options["wanted"]:
        return []
    typed = FIREWALLS[active[0]].permit(options["wanted"], "", options["comment"])
    wanted = [str(options["port_low"]), str(options["port_high"])]
    if base64.b64decode(own["__network_range"]["content"]).decode().split() != wanted:
        setting = f"net.ipv4.ip_local_port_range = {' '.join(wanted)}"
        path = "/etc/sysctl.d/60-nanofleet.conf"
        typed = [f"echo '{setting}' | sudo tee {path}", f"sudo sysctl --load={path}", *typed]
    problem = (
        f"Plays do not become root on {host}, so its active firewall {active[0]} and its range of ephemeral "
        "ports were not changed. Type the command below there as root, then: ansible-playbook doctor.yml"
    )
    return [warning("NF214", host, problem, f"{' && '.join(typed)}  (on {host})")]


def filter_findings(host: str, answer: str) -> list[Finding]:
    """A warning if systemd does not restrict units to the addresses of the fleet.

    answer: closed (it does), open (it does not), user (the units belong to a user's systemd), else unknown.
    """
    if answer == "closed":
        return []
    reason = {
        "open": "This host's systemd or kernel does not filter a unit's addresses "
        "(IPAddressDeny= has no effect)",
        "user": "This host's units belong to a user's own systemd, which cannot filter a unit's addresses",
    }.get(answer, "Whether systemd filters a unit's addresses (IPAddressDeny=) could not be tested")
    problem = f"{reason}, so only a firewall keeps other machines from the ports of a run."
    remedy = (
        f"sudo ufw status  (on {host}), and enable a firewall, or set fleet_address of every host to its "
        "address in a private network (docs/security.md)"
    )
    return [warning("NF215", host, problem, remedy)]


def protection(host: str, status: str, answer: str, ssh_port: Any = 22) -> str:
    """A message if ufw does not protect the ports of a run; "" if it is active.

    status: of ufw (active, inactive or absent). answer: as in `filter_findings`. ssh_port: port of sshd.
    """
    closed = answer == "closed"
    if status == "absent":
        rest = (
            "The units themselves refuse every address that is not of the fleet."
            if closed
            else f"Every machine that can connect to {host} can also connect to the ports of a run."
        )
        return (
            f"ufw is not installed on {host}, and no other firewall blocks the peers, so no rule was needed. "
            f"{rest}"
        )
    if status == "inactive":
        units = (
            "Until then the units themselves refuse every address that is not of the fleet. "
            if closed
            else ""
        )
        enable = as_typed("ansible-playbook setup.yml -e network_ufw_enable=true")
        return (
            f"ufw is inactive on {host} and was not enabled; the rules are set and take effect with it. "
            f"{units}To enable it: {enable} (or on {host}: sudo ufw allow {ssh_port}/tcp && sudo ufw enable)"
        )
    return ""
