"""Recognises the interfaces that programs make: VPNs, containers, virtual machines.

Pure functions of what `ip -json -details address` shows. Standard library only.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

VPN, BRIDGE = "vpn", "bridge"


class Program(NamedTuple):
    """A program that makes network interfaces, and how these are recognised.

    title: its name. kind: VPN or BRIDGE.
    name: matches the name of an interface. made_as: the kernel's name of its link type.
    networks, on: an address in one of `networks` identifies the program, if the link type is one of `on`; ""
    is the type of a plain interface.
    see: a command that shows the path of a VPN. Placeholders: {interface}, {host}, {address} (of the peer).
    remedy: how the network of a bridge gets other addresses. Placeholder: {host}.
    """

    title: str
    kind: str
    name: re.Pattern[str]
    made_as: str = ""
    networks: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    see: str = ""
    remedy: str = ""


def _program(title: str, kind: str, name: str, **more: Any) -> Program:
    return Program(title, kind, re.compile(rf"^({name})$"), **more)


PROGRAMS = (
    # Windows shows Tailscale's interface to a mirrored WSL2 as a plain one.
    _program(
        "Tailscale",
        VPN,
        r"tailscale\d*",
        networks=("100.64.0.0/10", "fd7a:115c:a1e0::/48"),
        on=("tun", ""),
        see="tailscale ping {address}  (on {host}; a path via DERP is relayed: open UDP 41641 on one side)",
    ),
    _program("ZeroTier", VPN, r"zt\w+", see="sudo zerotier-cli peers  (on {host}; RELAY is slow)"),
    _program("WireGuard", VPN, r"wg\S*", made_as="wireguard", see="sudo wg show {interface}  (on {host})"),
    _program(
        "Docker",
        BRIDGE,
        r"docker\S*|br-[0-9a-f]{12}",
        remedy='set "bip" or "default-address-pools" in /etc/docker/daemon.json to another range, then sudo '
        "systemctl restart docker  (on {host})",
    ),
    _program(
        "libvirt",
        BRIDGE,
        r"virbr\S*|vnet\d+",
        networks=("192.168.122.0/24",),
        on=("bridge",),
        remedy="sudo virsh net-edit default, another range in <ip address=...>, then sudo virsh net-destroy "
        "default && sudo virsh net-start default  (on {host})",
    ),
    _program("Podman", BRIDGE, r"podman\S*|cni\S*"),
    _program("LXC", BRIDGE, r"lxcbr\S*|lxdbr\S*|incusbr\S*"),
    _program("VirtualBox", BRIDGE, r"vboxnet\S*"),
    _program("VMware", BRIDGE, r"vmnet\S*"),
    _program("a container", BRIDGE, r"veth\S*"),
)


def program_of(name: str, made_as: str, addresses: Iterable[str]) -> Program | None:
    """The program that made an interface, by its name, link type or addresses; None for a plain interface.

    made_as: `info_kind` of `ip -details`, "" for a plain interface. addresses: as in "100.101.102.103/32". A
    bridge that a person has made may be the LAN itself, and is a plain interface here.
    """
    for program in PROGRAMS:
        if program.name.match(name) or (made_as and made_as == program.made_as):
            return program
    interfaces = [ipaddress.ip_interface(text) for text in addresses]
    for program in PROGRAMS:
        if made_as in program.on and any(_has(program, each, made_as) for each in interfaces):
            return program
    return None


def _has(
    program: Program, interface: ipaddress.IPv4Interface | ipaddress.IPv6Interface, made_as: str
) -> bool:
    """Whether the address of an interface is one that the program gives."""
    # Internet providers use 100.64.0.0/10 too. On a plain interface only the IPv6 address is a proof.
    if program.kind == VPN and interface.version == 4 and not made_as:
        return False
    networks = (ipaddress.ip_network(network) for network in program.networks)
    return any(interface.ip in network for network in networks if network.version == interface.version)
