# SPDX-License-Identifier: MIT
"""Chooses the network interface with which a host reaches its peers. Standard library only."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import (
    is_link_local,
    is_loopback,
    reaches,
)

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
Owned = Mapping[str, list[Interface]]
"""Addresses of this host by interface."""


def addresses_of(link: Mapping[str, Any]) -> list[Interface]:
    """Addresses of an interface that other hosts can reach, IPv4 first as in Gloo.

    link: an entry of `ip -json address`. Loopback and link-local addresses are left out.
    """
    inet = [entry for entry in link.get("addr_info", []) if entry.get("local")]
    inet.sort(key=lambda entry: entry.get("family") != "inet")
    found = [ipaddress.ip_interface(f"{e['local']}/{e.get('prefixlen', 32)}") for e in inet]
    return [address for address in found if not is_loopback(address.ip) and not is_link_local(address.ip)]


def owned_by(seen: Mapping[str, Any]) -> dict[str, list[Interface]]:
    """The addresses of this host by interface, without loopback and link-local addresses.

    seen: result of the module network_links.
    """
    links = {link["ifname"]: link for link in seen["links"] if link["ifname"] != "lo"}
    return {name: found for name, link in links.items() if (found := addresses_of(link))}


def route_to(
    host: str, peers: Mapping[str, str], seen: Mapping[str, Any], owned: Owned, override: str
) -> tuple[str, str, str]:
    """The interface and own address of `host` for the path to all peers.

    Returns (interface, own address, ""); ("", "", problem) if no interface can be chosen, where problem is a
    message. host, peers, seen, override: as for network_interfaces.choose. owned: result of `owned_by`.
    """
    listed = ", ".join(f"{name} ({found[0].ip})" for name, found in owned.items()) or "none"
    if override and override not in owned:
        return "", "", (
            f"fleet_interface of {host} is {override}, but the interfaces of {host} with an address are "
            f"{listed}. Set fleet_interface of {host} in the inventory to one of these, or remove the "
            "setting."
        )  # fmt: skip
    if override:
        near = [own for own in owned[override] if any(reaches([own], target) for target in peers.values())]
        return override, str((near or owned[override])[0].ip), ""
    names = {address: name for name, address in peers.items()}
    chosen: dict[str, tuple[str, str]] = {}  # interface -> (own address, peer)
    for target, route in seen["routes"].items():
        name = names.get(target, target)
        peer = f"{name} ({target})" if target in names else target
        device, source = route.get("interface", ""), route.get("source", "")
        if is_loopback(target) or device == "lo":
            return "", "", (
                f"On {host}, the address of {peer} leads to {host} itself (loopback). Set fleet_address of "
                f"{name} in the inventory to the address at which the other hosts reach it."
            )  # fmt: skip
        if is_link_local(target):
            return "", "", (
                f"The address of {peer} is link-local: it is valid only with the name of an interface, which "
                f"differs by host, so a run cannot use it. Set fleet_address of {name} to an IPv4 or a "
                f"global IPv6 address. To add one, type on {name}: sudo ip address add fd42::1/64 dev "
                "INTERFACE (another number on each host)."
            )  # fmt: skip
        if not device and not peers and owned:  # one host without a default route: any interface will do
            first = next(iter(owned))
            return first, str(owned[first][0].ip), ""
        if not device:
            printed = str(route.get("error") or "ip route gave no answer").strip(" .\n")
            return "", "", (
                f"{host} has no route to {peer}: {printed}. Connect both to one network, or set "
                f"fleet_address of {name} in the inventory to its address on the network of {host}; to check "
                f"on {host}: ip route get {target}"
            )  # fmt: skip
        own = owned.get(device)
        chosen.setdefault(device, (source or (str(own[0].ip) if own else ""), peer))
    if len(chosen) > 1:
        paths = " but ".join(f"{peer} over {device}" for device, (_, peer) in chosen.items())
        return "", "", (
            f"{host} reaches {paths}, but a rank uses one interface for all peers. In the inventory, set "
            f"fleet_address of these peers to addresses of one network, or fleet_interface of {host} to one "
            f"of {listed}."
        )  # fmt: skip
    for device, (source, _) in chosen.items():
        return device, source, ""
    return (
        "",
        "",
        (
            f"{host} has no network interface with an address. Connect {host} to the network; its "
            f"interfaces are listed by: ip -br address  (on {host})"
        ),
    )
