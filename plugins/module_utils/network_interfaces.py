"""Chooses the network interface to the other hosts, and reports what about it would hinder a run.

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
    """Each finding as one line of text, without duplicates."""
    return list(
        dict.fromkeys(f"{f['code']}  {f['host']}: {f['problem']} Fix: {f['remedy']}" for f in findings)
    )


def resolve(addresses: Mapping[str, str]) -> dict[str, str]:
    """IP address by host name: IPv4 first; loopback and link-local ones only if nothing else is known."""

    def rank(address: str) -> tuple[bool, bool, bool]:
        return is_loopback(address), is_link_local(address), ":" in address

    # A name without an address is left as it is: preflight and the route report what is wrong with it.
    return {host: min(resolved(str(name)) or [str(name)], key=rank) for host, name in addresses.items()}


def kind_of(link: Mapping[str, Any], wireless: Iterable[str]) -> str:
    """Kind of an interface: cable, wifi, tunnel or bridge. wireless: names of the WiFi interfaces."""
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

    peers: address by name of the other hosts. seen: result of the module network_links on `host`, with a
    route to each peer, or to an outside address if there is no peer. override: the interface set in the
    inventory. Returns interface; address (of `host`, on the path to the peers); listen (the address that Gloo
    announces: the first one of the interface); networks (of the interface); problem (a sentence with its
    remedy, or ""); findings (warnings).
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
            problem = (
                f"This host reaches {peer} over {used}, which is {KINDS[kind]}, although the wired "
                f"interface {cables[0]} is on the same network. The kernel's route uses {used}."
            )
            remedy = f"sudo ip link set {used} down  (on {host}; SSH sessions over {used} end), or "
            yield warning(
                "NF201", host, problem, f"{remedy}give its route a higher metric than {cables[0]}'s"
            )
        elif used != interface:
            problem = f"fleet_interface is {interface}, but the kernel sends packets to {peer} over {used}."
            remedy = (
                f"ip route get {target}  (on {host}); route it over {interface}, or remove fleet_interface"
            )
            yield warning("NF202", host, problem, remedy)
    entries = links.get(interface, {}).get("addr_info", [])
    if any(entry.get("temporary") and entry["local"] == address for entry in entries):
        problem = (
            f"This host's address {address} on {interface} is a temporary one (IPv6 privacy): it changes, "
            "and firewall rules do not follow."
        )
        remedy = (
            f"sudo sysctl net.ipv6.conf.{interface}.use_tempaddr=0  (on {host}; in /etc/sysctl.d to keep it)"
        )
        yield warning("NF203", host, problem, f"{remedy}, or use IPv4 addresses")
    for name in seen.get("slow_names", []):
        problem = f"A lookup of the name {name} takes more than 3 s, because a name server does not answer. "
        remedy = f"cat /etc/resolv.conf  (on {host}), and remove the server that does not answer"
        yield warning("NF204", host, f"{problem}The start of a run looks it up several times.", remedy)


def peer_findings(host: str, peers: Iterable[str], hostvars: Mapping[str, Any]) -> list[Finding]:
    """Warnings about peers whose address, as Gloo announces it, cannot be reached from `host`.

    Gloo announces the first address of the interface, IPv4 before IPv6, whatever addresses the inventory has.
    An IPv4 and an IPv6 address cannot connect to each other.
    """
    found = []
    own = hostvars[host]
    for peer in peers:
        its = hostvars[peer]
        here, there = own["network_listen_address"], its.get("network_listen_address", "")
        if not there or (
            (":" in here) == (":" in there)
            and (there == its["network_address"] or reaches(own["network_networks"], there))
        ):
            continue
        problem = (
            f"Gloo announces {here} on {host} and {there} on {peer}, the first addresses of the interfaces "
            f"{own['network_interface']} and {its['network_interface']}. These cannot connect to each other, "
            "so the ranks would wait until they time out."
        )
        remedy = "ip address show  (on both), and give both interfaces a first address in one network"
        found.append(warning("NF205", host, problem, remedy))
    return found
