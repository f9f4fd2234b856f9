"""Chooses the network interface to the other hosts, and warns about problems with that interface.

All functions are pure except `resolve`, which asks the controller's resolver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.interface_route import (
    addresses_of,
    owned_by,
    route_to,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import (
    is_link_local,
    is_loopback,
    parse_ip,
    reaches,
    resolved,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.virtual_interfaces import BRIDGE, program_of

# Tunnels of programs that virtual_interfaces does not name.
TUNNEL = re.compile(r"^(tun|tap|ppp|utun|nordlynx)")
TUNNEL_KINDS = {"tun", "wireguard", "ipip", "sit", "gre", "ip6tnl", "vti", "vxlan"}
KINDS = {
    "wifi": "WiFi",
    "tunnel": "a tunnel",
    "bridge": "a bridge of containers or virtual machines",
}


def lines(findings: Iterable[Mapping[str, str]]) -> list[str]:
    """The findings as text, one line each: CODE  HOST: PROBLEM Fix: REMEDY. Equal lines appear once."""
    return list(
        dict.fromkeys(f"{f['code']}  {f['host']}: {f['problem']} Fix: {f['remedy']}" for f in findings)
    )


def resolve(addresses: Mapping[str, str]) -> dict[str, str]:
    """The IP address of each host: {host: IP address}.

    addresses: {host: name or address}. If a name has several addresses, IPv4 is preferred. Loopback and
    link-local addresses are used only if the name has no others. A name that does not resolve is left as it
    is.
    """

    def rank(address: str) -> tuple[bool, bool, bool]:
        return is_loopback(address), is_link_local(address), ":" in address

    # A name without an address is left as it is: preflight and the route report what is wrong with it.
    return {host: min(resolved(str(name)) or [str(name)], key=rank) for host, name in addresses.items()}


def kind_of(link: Mapping[str, Any], wireless: Iterable[str]) -> str:
    """The kind of an interface: cable, wifi, tunnel (VPN) or bridge (of containers or virtual machines).

    link: an entry of `ip -json address`. wireless: the names of the WiFi interfaces.
    """
    name = link["ifname"]
    made_as = (link.get("linkinfo") or {}).get("info_kind", "")
    if name in wireless:
        return "wifi"
    program = program_of(name, made_as, [str(address) for address in addresses_of(link)])
    if program:
        return "bridge" if program.kind == BRIDGE else "tunnel"
    return "tunnel" if TUNNEL.match(name) or made_as in TUNNEL_KINDS else "cable"


def choose(
    host: str, peers: Mapping[str, str], seen: Mapping[str, Any], override: str = ""
) -> dict[str, Any]:
    """The interface and the address with which `host` reaches its peers, as a dict.

    peers: {name: address} of the other hosts. seen: result of the module network_links on `host`, with a
    route to each peer, or to an outside address if there is no peer. override: the interface set in the
    inventory; "" for none. Keys of the result:
    interface: the name of the interface. address: the address of `host` on the path to the peers.
    listen: the address that Gloo announces, which is the first address of the interface.
    networks: the IP networks of all addresses of the interface, as texts.
    problem: why no interface can be chosen, with the remedy; "" if one was chosen. findings: warnings.
    """
    owned = owned_by(seen)
    interface, address, problem = route_to(host, peers, seen, owned, override)
    found = owned.get(interface, [])
    return {
        "interface": interface,
        "address": address,
        "listen": str(found[0].ip) if found else address,
        "networks": [str(own.network) for own in found],
        "problem": problem,
        "findings": [] if problem else list(_findings(host, peers, seen, interface, address)),
    }


def _findings(
    host: str, peers: Mapping[str, str], seen: Mapping[str, Any], interface: str, address: str
) -> Iterator[Finding]:
    """Warnings about the chosen interface: a better path, an address that changes, slow name lookups."""
    links = {link["ifname"]: link for link in seen["links"]}
    kinds = {name: kind_of(link, seen.get("wireless", [])) for name, link in links.items()}
    for name, target in peers.items():
        used = seen["routes"].get(target, {}).get("interface") or interface
        kind, peer = kinds.get(used, ""), f"{name} ({target})"
        cables = [
            other
            for other, link in links.items()
            if other not in ("lo", used) and kinds[other] == "cable" and reaches(addresses_of(link), target)
        ]
        if kind in KINDS and cables:
            title, wired = KINDS[kind], cables[0]
            problem = (
                f"The kernel of this host sends packets to {peer} over {used} ({title}), although the wired "
                f"interface {wired} is on the same network. A wired interface is usually faster."
            )
            remedy = (
                f"if SSH reaches {host} over {used}, first set ansible_host to its address on {wired}. Then, "
                f"until the next boot: sudo ip link set {used} down  (on {host}), or only for {name}: "
                f"sudo ip route add {target} dev {wired}  (on {host}; the same for every peer); then: "
                "ansible-playbook setup.yml"
            )
            yield warning("NF201", host, problem, remedy)
        elif used != interface:
            problem = (
                f"fleet_interface of this host is {interface}, but its kernel sends packets to {peer} over "
                f"{used}."
            )
            remedy = (
                f"set fleet_address of {name} in the inventory to its address on the network of {interface}; "
                f"or, if all peers are reached over {used}, set fleet_interface of {host} to {used}; then: "
                "ansible-playbook setup.yml. The interface to a peer follows dev in the output of: ip route "
                f"get ADDRESS  (on {host}, with the peer's address)"
            )
            yield warning("NF202", host, problem, remedy)
    entries = links.get(interface, {}).get("addr_info", [])
    if any(entry.get("temporary") and entry["local"] == address for entry in entries):
        problem = (
            f"The address {address} of this host on {interface} is temporary (IPv6 privacy extensions). "
            "When the kernel replaces the address, the firewall rules of the other hosts no longer match."
        )
        path = "/etc/sysctl.d/61-addresses.conf"
        # NetworkManager takes the value of `default` whenever it activates a connection.
        remedy = (
            "set fleet_address of every host to an IPv4 address in the inventory; or turn temporary "
            "addresses off: "
            f"printf 'net/ipv6/conf/%s/use_tempaddr=0\\n' default {interface} | sudo tee {path} && "
            f"sudo sysctl --load={path} && sudo ip -6 address flush dev {interface} temporary  (on {host}); "
            "then: ansible-playbook setup.yml"
        )
        yield warning("NF203", host, problem, remedy)
    by_address = {address: peer for peer, address in peers.items()}
    for name in seen.get("slow_names", []):  # the name of this host, or the address of a peer
        problem = (
            f"A lookup of the name {name} on this host takes more than 3 s, because a name server does not "
            "answer. The start of a run looks up this name several times."
        )
        entry = f"ADDRESS {name}" if not parse_ip(name) else f"{name} {by_address.get(name, 'NAME')}"
        remedy = (
            f"write the name with its IP address into /etc/hosts: echo '{entry}' | sudo tee -a /etc/hosts  "
            f"(on {host}); or, in /etc/resolv.conf or the network settings of {host}, remove the name server "
            f"that does not answer; to test a server: timeout 3 bash -c '</dev/tcp/SERVER/53'  (on {host}; "
            "SERVER: the server's address; the command fails if the server does not answer)"
        )
        yield warning("NF204", host, problem, remedy)


def peer_findings(host: str, peers: Iterable[str], hostvars: Mapping[str, Any]) -> list[Finding]:
    """Warnings about peers that `host` cannot reach at the address at which the peer's Gloo would listen.

    On each host Gloo listens on the first address of the chosen interface, IPv4 before IPv6, whatever
    addresses the inventory has. An IPv4 and an IPv6 address cannot connect to each other. peers: names of the
    other hosts. hostvars: variables by host, with the facts network_* of the role network.
    """
    found = []
    own = hostvars[host]
    for peer in peers:
        its = hostvars[peer]
        own_interface, interface_of_peer = own["network_interface"], its.get("network_interface", "")
        here, there = own["network_listen_address"], its.get("network_listen_address", "")
        if not there or (
            (":" in here) == (":" in there)
            and (there == its["network_address"] or reaches(own["network_networks"], there))
        ):
            continue
        problem = (
            "Gloo (PyTorch's collectives on CPUs) uses the first address of an interface: "
            f"{here} of {own_interface} on {host}, and {there} of {interface_of_peer} on {peer}. These two "
            "addresses cannot connect to each other, so the ranks would wait until they time out."
        )
        remedy = (
            f"set fleet_interface of {host} and of {peer} in the inventory to interfaces whose first "
            "addresses are in one network; the addresses are listed by: ip -br address  (on both hosts). If "
            "only a later address of an interface is in that network, delete the first one: sudo ip address "
            "delete ADDRESS dev INTERFACE  (ADDRESS as listed, such as 10.0.0.5/24)"
        )
        found.append(warning("NF205", host, problem, remedy))
    return found
