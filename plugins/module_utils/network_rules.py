"""The connections that a host has to admit, and findings about what prevents them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_paths import connection_findings
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import FIREWALLS
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import is_loopback, parse_ip
from ansible_collections.nanofleet.fleet.plugins.module_utils.port_range import KERNELS_RANGE
from ansible_collections.nanofleet.fleet.plugins.module_utils.typed_commands import as_typed


def plain(address: Any) -> str:
    """An address in the form in which firewalls print it, so that an existing rule for it is recognised."""
    return str(parse_ip(address) or address)


def is_local(address: str) -> bool:
    """Whether a firewall rule cannot use an address: it is empty, loopback, or has a zone (fe80::1%eth0)."""
    return not address or "%" in address or is_loopback(address)


def sources(peers: Mapping[str, str], hostvars: Mapping[str, Any]) -> list[str]:
    """The addresses from which the peers connect to this host, each once.

    peers: {name: address in the inventory}. hostvars: variables by host. The addresses of a peer are its
    facts network_address and network_listen_address, or its address in `peers` if it has neither fact.
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
    """The connections that the firewall of a host has to admit, as dicts {"source", "port"}.

    port: a port or LOW:HIGH, as text. Controllers that are peers, or at a loopback address, are left out.
    peers: the addresses of the other hosts. ports: the port range of a run as "LOW:HIGH". store_port,
    tracker_port: the ports of the rendezvous store and of the tracker. is_coordinator: whether the host is
    the coordinator, which also admits the peers to the rendezvous store and to the tracker, and `controllers`
    to the tracker. controllers: the addresses of the controllers.
    """
    wanted = [ports, str(store_port), str(tracker_port)] if is_coordinator else [ports]
    found = [(peer, port) for peer in dict.fromkeys(peers) for port in wanted]
    if is_coordinator:
        known = dict.fromkeys(plain(address) for address in controllers if not is_local(address))
        found += [(source, str(tracker_port)) for source in known if source not in map(plain, peers)]
    return [{"source": source, "port": port} for source, port in found]


def measured(hosts: Sequence[str], hostvars: Mapping[str, Any], low: int, high: int) -> dict[str, Any]:
    """The connections that were tried between these hosts, in the form that doctor_paths takes.

    hosts: names. hostvars: variables by host, with the results of the tasks that tried the connections.
    low, high: the first and the last port of the port range of a run. Listeners on ports that the kernel
    chose are left out: in check mode the port range is not set on the hosts yet, and such a port may be
    outside of it. Round-trip times are left out, because only the doctor reports them.
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
    """The findings about firewall and ports of `host` (keys: see findings.py).

    own: variables of the host, with the results that the tasks registered. connections: the result of
    `measured`. options: a dict with port_low, port_high, store_port, wanted (the result of `rules`), comment
    (the text that marks the firewall rules of nanofleet) and is_root (whether tasks become root).
    """
    if not options["is_root"]:
        connection = str((own.get("__network_ssh") or {}).get("stdout") or "").split()
        ssh_port = (connection or ["22"])[-1]
        return [*owner_findings(host, own, options), *filter_findings(host, "user", ssh_port)]
    closed = connection_findings(connections, {**options, "slow_rtt_ms": 0})
    return [
        *filter_findings(host, own["__network_filter"].get("stdout", "")),
        *port_findings(host, own["__network_ports"], options["port_low"], options["port_high"]),
        *({**each, "severity": "warning"} for each in closed if each["host"] == host),
    ]


def port_findings(host: str, ports: Mapping[str, Any], low: int, high: int) -> Iterator[Finding]:
    """Warnings about the ephemeral ports of a host, which setup.yml limits to the port range of a run.

    ports: the result of the module ephemeral_ports. low, high: the port range.
    """
    span = f"{low}-{high}"
    settings = (
        "write network_port_low: LOW and network_port_high: HIGH into group_vars/fleet.yml of the inventory"
    )
    other_range = (
        f"{settings} (LOW and HIGH: the first and the last of about 1,000 other ports), then: "
        "ansible-playbook setup.yml"
    )
    for other in ports["overriding"]:
        problem = (
            "The ranks use ephemeral ports, which the kernel picks from its range, and the firewall rules "
            f"open only {span}. The file {other} sets another range, which overrides that of setup.yml at "
            "the next boot. The ranks then use closed ports, and a run cannot start."
        )
        path = other.partition(" ")[0]
        yield warning(
            "NF210",
            host,
            problem,
            f"sudo sed -i --follow-symlinks '/ip_local_port_range/d' {path}  (on {host})",
        )
    if ports.get("changed") and ports["before"] != KERNELS_RANGE:
        before = ports["before"].replace(" ", "-")
        problem = (
            f"setup.yml has changed net.ipv4.ip_local_port_range from {before}, which is not the kernel's "
            f"default, to {span}: the ranks use ephemeral ports, and the firewall rules open only {span}. "
            "reset.yml restores it."
        )
        remedy = (
            f"do nothing if no other program on this host needs ports of {before}. Otherwise let nanofleet "
            f"use a part of {before}: {settings} (LOW and HIGH: the first and the last of about 1,000 ports "
            f"in {before}), then: ansible-playbook setup.yml"
        )
        yield warning("NF211", host, problem, remedy)
    if ports["usable"] < 100:
        problem = (
            f"A run needs about 100 ports, and can use only {ports['usable']} of the range {span} on this "
            f"host. The others are reserved (net.ipv4.ip_local_reserved_ports is {ports['reserved']})."
        )
        yield warning("NF212", host, problem, other_range)
    for held in ports["listeners"]:
        problem = (
            f"A program of the user {held['user']} listens on port {held['port']}. This port is in the range "
            f"{span}, which is open to the other hosts, so they can connect to that program."
        )
        remedy = (
            f"end the program: sudo kill PID  (on {host}; PID and name are listed by: sudo ss -Hltnp sport = "
            f":{held['port']}) or set another port in its configuration; or use another range: {other_range}"
        )
        yield warning("NF213", host, problem, remedy)


def owner_findings(host: str, own: Mapping[str, Any], options: Mapping[str, Any]) -> list[Finding]:
    """A warning with the commands that a person has to type on a host where plays have no root access.

    own: variables of the host, with the registered results. options: as for `findings`. Without an active
    firewall there is no warning: nothing needs to be opened, and any range of ports can be used.
    """
    active = own["__network_listed"]["active"]
    if not active or not options["wanted"]:
        return []
    firewall = active[0]
    typed = FIREWALLS[firewall].permit(options["wanted"], "", options["comment"])
    wanted = [str(options["port_low"]), str(options["port_high"])]
    if base64.b64decode(own["__network_range"]["content"]).decode().split() != wanted:
        setting = f"net.ipv4.ip_local_port_range = {' '.join(wanted)}"
        path = "/etc/sysctl.d/60-nanofleet.conf"
        typed = [f"echo '{setting}' | sudo tee {path}", f"sudo sysctl --load={path}", *typed]
    problem = (
        f"setup.yml has no root access on {host} (ansible_become: false), so it did not change the active "
        f"firewall {firewall} and the range of ephemeral ports there."
    )
    remedy = (
        f"if this was not done before, let a user with sudo type: {' && '.join(typed)}  (on {host}), then: "
        "ansible-playbook doctor.yml"
    )
    return [warning("NF214", host, problem, remedy)]


def filter_findings(host: str, answer: str, ssh_port: Any = 22) -> list[Finding]:
    """A warning, unless systemd is known to restrict the units on `host` to the addresses of the fleet.

    answer: the result of a test: closed (systemd restricts them), open (systemd does not restrict them), user
    (the units belong to a user's systemd, which cannot restrict them), anything else if the test failed.
    ssh_port: port of sshd.
    """
    if answer == "closed":
        return []
    reason = {
        "open": "The systemd or kernel of this host does not restrict the addresses with which a unit "
        "communicates (IPAddressDeny= has no effect)",
        "user": "The units on this host belong to a user's own systemd, which cannot restrict the addresses "
        "with which a unit communicates",
    }.get(
        answer,
        "setup.yml could not test whether systemd restricts the addresses with which a unit communicates "
        "(IPAddressDeny=)",
    )
    problem = f"{reason}. So only a firewall keeps other machines from the ports of a run."
    remedy = (
        "enable a firewall, such as ufw: ansible-playbook setup.yml -e network_ufw_enable=true, or set "
        "fleet_address of every host to its address in a VPN such as WireGuard (docs/security.md)"
    )
    if answer == "user":  # setup.yml changes no firewall there
        remedy = (
            f"let a user with sudo enable a firewall, such as ufw: sudo ufw allow {ssh_port}/tcp && sudo ufw "
            f"enable  (on {host}), then: ansible-playbook setup.yml  (it shows the rules to add); or set "
            "fleet_address of every host to its address in a VPN such as WireGuard (docs/security.md)"
        )
    return [warning("NF215", host, problem, remedy)]


def protection(host: str, status: str, answer: str, ssh_port: Any = 22) -> str:
    """A message if ufw does not protect the ports of a run; "" if ufw is active.

    status: the status of ufw (active, inactive or absent). answer: as in `filter_findings`. ssh_port: port of
    sshd.
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
            f"ufw is inactive on {host} and was not enabled. Its rules are set, and take effect when ufw is "
            f"enabled. {units}To enable it: {enable} (or on {host}: sudo ufw allow {ssh_port}/tcp && sudo "
            "ufw enable)"
        )
    return ""
