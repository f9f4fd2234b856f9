"""Which network interface leads to the other hosts, and which firewall rules a fleet needs.

All filters are pure but `network_resolve`, which asks the controller's resolver.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from typing import Any


def resolve(addresses: Mapping[str, str]) -> dict[str, str]:
    """IP address by host name. IPv4 is preferred, loopback is taken only if nothing else is known."""
    resolved = {}
    for host, name in addresses.items():
        try:
            found = socket.getaddrinfo(str(name), None, proto=socket.IPPROTO_TCP)
        except OSError:
            resolved[host] = str(name)  # left as it is: preflight and the route say what is wrong with it
            continue
        found.sort(key=lambda info: (info[4][0].startswith("127."), info[0] != socket.AF_INET))
        resolved[host] = str(found[0][4][0])
    return resolved


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def read_json(text: Any) -> list[dict[str, Any]]:
    try:
        return json.loads(text or "[]")
    except ValueError:
        return []


def interface_addresses(ip_addr: str) -> dict[str, list[str]]:
    """Addresses by interface from `ip -j address show`, IPv4 first, link-local ones left out."""
    found = {}
    for link in read_json(ip_addr):
        inet = [a for a in link.get("addr_info", []) if a.get("scope") == "global" and a.get("local")]
        inet.sort(key=lambda a: a.get("family") != "inet")
        if link.get("ifname"):
            found[link["ifname"]] = [a["local"] for a in inet]
    return found


def choose(
    host: str, peers: Mapping[str, str], routes: list[Mapping[str, Any]], ip_addr: str, override: str = ""
) -> dict[str, str]:
    """The interface and address `host` reaches its peers with.

    peers: address by name of the other hosts. routes: one result of `ip -j route get` per peer (or one to the
    outside world if there is none), each with `item` and `stdout`.
    Returns {"interface", "address", "problem"}: a sentence with its remedy, empty if all is well.
    """

    def verdict(interface: str = "", address: str = "", problem: str = "") -> dict[str, str]:
        return {"interface": interface, "address": address, "problem": problem}

    by_name = interface_addresses(ip_addr)
    usable = {name: found[0] for name, found in by_name.items() if found and name != "lo"}
    listed = ", ".join(f"{name} ({address})" for name, address in usable.items()) or "none"
    if override:
        if override in usable:
            return verdict(override, usable[override])
        return verdict(
            problem=f"{host} has no interface {override} with an address; it has {listed}. "
            f"Set fleet_interface of {host} in the inventory to one of them, or leave it out."
        )
    names = {address: name for name, address in peers.items()}
    chosen: dict[str, tuple[str, str]] = {}  # interface -> (own address, peer)
    for route in routes:
        target = str(route.get("item", ""))
        peer = f"{names[target]} ({target})" if target in names else target
        entries = read_json(route.get("stdout"))
        device, source = (entries[0].get("dev", ""), entries[0].get("prefsrc", "")) if entries else ("", "")
        if is_loopback(target) or device == "lo":
            return verdict(
                problem=f"{host} would reach {peer} through loopback: that is {host} itself. "
                f"Set fleet_address of {names.get(target, target)} in the inventory to the address "
                "the other hosts reach it at."
            )
        if not device:
            if not peers and usable:  # alone and without a default route: any interface will do
                return verdict(next(iter(usable)), next(iter(usable.values())))
            said = str(route.get("stderr") or route.get("msg") or "ip route gave no answer").strip(" .\n")
            return verdict(
                problem=f"{host} has no route to {peer}: {said}. On {host}: ip route get {target}. "
                "Put both on one network, or set fleet_address of the peer to an address that is."
            )
        chosen.setdefault(device, (source or usable.get(device, ""), peer))
    if len(chosen) > 1:
        ways = " but ".join(f"{peer} over {device}" for device, (_, peer) in chosen.items())
        return verdict(
            problem=f"{host} reaches {ways}; a rank uses one interface. "
            "Set fleet_address of these peers to addresses of one network, "
            f"or fleet_interface of {host} to one of {listed}."
        )
    if not chosen:
        return verdict(problem=f"{host} has no network interface with an address: ip address show")
    device, (source, _) = next(iter(chosen.items()))
    return verdict(device, source)


def sources(peers: Mapping[str, str], hostvars: Mapping[str, Any]) -> list[str]:
    """The address each peer connects from: the one it published, or else the one it is reached at."""
    return [hostvars[name].get("network_address") or address for name, address in peers.items()]


def rules(
    peers: list[str],
    ports: str,
    store_port: int,
    tracker_port: int,
    is_coordinator: bool,
    controller: str = "",
) -> list[dict[str, str]]:
    """Who may reach which TCP ports of this host: [{"source", "port"}], nobody else being let in.

    peers: addresses of the other hosts. ports: "LOW:HIGH" of the ranks' listeners.
    The coordinator also serves the rendezvous store to the peers and the tracker to them and the controller.
    """
    wanted = []
    for peer in dict.fromkeys(peers):
        wanted.append({"source": peer, "port": ports})
        if is_coordinator:
            wanted.append({"source": peer, "port": str(store_port)})
            wanted.append({"source": peer, "port": str(tracker_port)})
    link_local = "%" in controller  # means nothing to ufw, and the page would not open at such an address
    if (
        is_coordinator
        and controller
        and not link_local
        and not is_loopback(controller)
        and controller not in peers
    ):
        wanted.append({"source": controller, "port": str(tracker_port)})
    return wanted


def rule_line(rule: Mapping[str, str]) -> str:
    return f"port {rule['port']} from {rule['source']}"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "network_resolve": resolve,
            "network_choose": choose,
            "network_sources": sources,
            "network_rules": rules,
            "network_rule_line": rule_line,
        }
