"""Findings of the doctor about interfaces, made from the measurements (see doctor_measured)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import doctor_finding as finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import reaches
from ansible_collections.nanofleet.fleet.plugins.module_utils.virtual_interfaces import (
    BRIDGE,
    Program,
    program_of,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wsl import hyperv_rule

Measured = Mapping[str, Mapping[str, Any]]
SSH_PORT = "22"


def interface_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about the network interface of each host.

    Examples are that no interface can be used, that the kernel sends the packets for a peer over another
    interface than the role network has chosen, or that the kernel sends them over a bridge of containers or
    virtual machines. measured: host -> its measurements (see doctor_measured). options: store_port, port_low,
    port_high.
    """
    found = []
    for host, of_host in measured.items():
        if is_behind_windows(measured, host):
            problem = (
                f"This host runs in WSL2 with NAT networking: its address {of_host['address']} exists only "
                "inside Windows, so no other host can connect to it."
            )
            rule = hyperv_rule([SSH_PORT, *ports_of(options)])
            remedy = (
                "on Windows 11 (22H2 or later), write the two lines [wsl2] and networkingMode=mirrored to "
                f"%UserProfile%\\.wslconfig, then type in PowerShell as administrator: wsl --shutdown; {rule}"
            )
            found.append(finding("NF529", host, problem, remedy))
        elif of_host["problem"]:
            path_problem, _dot, change = of_host["problem"].partition(". ")
            inventory_change = change[:1].lower() + change[1:]
            problem = f"No network interface can be chosen for this host: {path_problem}."
            found.append(finding("NF520", host, problem, inventory_change))
        else:
            found += [*_unused(measured, host)][:1] or _bridges(measured, host)
    return found


def ports_of(options: Mapping[str, Any]) -> list[str]:
    """The ports of a run as texts: that of the rendezvous store, and the port range as "LOW-HIGH".

    options: store_port, port_low, port_high.
    """
    return [str(options["store_port"]), f"{options['port_low']}-{options['port_high']}"]


def is_behind_windows(measured: Measured, host: str) -> bool:
    """Whether a host runs in WSL2 with NAT networking, and no peer reaches all ports that it probed there.

    The result is False if no peer has probed the host. measured: host -> its measurements (see
    doctor_measured).
    """
    views = [of_peer["paths"][host] for of_peer in measured.values() if host in of_peer["paths"]]
    is_nat = measured[host]["facts"].get("wsl") == "nat"
    return is_nat and bool(views) and not any(_is_open(path) for path in views)


def _is_open(path: Mapping[str, Any]) -> bool:
    ports = path.get("ports") or []
    return bool(ports) and all(port["state"] == "open" for port in ports)


def _unused(measured: Measured, host: str) -> Iterator[Finding]:
    """A finding for each peer that the kernel reaches by another interface than the chosen one."""
    of_host = measured[host]
    chosen = of_host["interface"]
    for peer in of_host["paths"]:
        used = used_interface(of_host, peer) or chosen
        # If the peer's address is outside of the networks of this interface, the peer may be the cause.
        link = link_of(of_host, used)
        is_on_link = reaches(link.get("addresses") or [], measured[peer]["address"])
        is_proof = is_on_link or _uses_chosen_interface(measured[peer])
        if chosen and used not in (chosen, "lo") and is_proof:
            problem = (
                f"A run uses the interface {chosen} of this host ({of_host['address']}), but its kernel "
                f"sends packets to {peer} over {used}. Gloo (PyTorch's collectives on CPUs) would listen on "
                f"{chosen}, where {peer} does not connect."
            )
            remedy = (
                f"remove fleet_interface of {host} and {peer} from the inventory, or set that of {host} to "
                f"{used}; then: ansible-playbook setup.yml"
            )
            yield finding("NF521", host, problem, remedy, peer)


def _bridges(measured: Measured, host: str) -> list[Finding]:
    """Findings about peers that a host reaches over a bridge of containers or virtual machines."""
    of_host, found = measured[host], []
    for peer, path in of_host["paths"].items():
        used = used_interface(of_host, peer) or of_host["interface"]
        program = program_on(of_host, used)
        if not program or program.kind != BRIDGE or not measured[peer]["reachable"]:
            continue
        bridge = f"{used}, a bridge of {program.title}"
        if _is_open(path):
            problem = (
                f"This host reaches {peer} over {bridge}: {peer} is a container or a virtual machine on "
                f"{host}, and both compute on the same processor."
            )
            remedy = (
                "remove one of the two from the inventory, or give each processors of its own: for a "
                f"container, write for example fleet_cpus: 0-3 at {host} and fleet_cpus: 4-7 at {peer} in "
                f"the inventory; for a virtual machine, pin its processors and set fleet_cpus of {host} to "
                "the others"
            )
            found.append(finding("NF536", host, problem, remedy, peer, "warning"))
            continue
        address = measured[peer]["address"]
        problem = (
            f"The kernel of this host sends packets for {peer} ({address}) over {bridge}, so they never "
            f"leave {host}."
        )
        range_change = (
            program.remedy.format(host=host) or f"give {used} another range of addresses  (on {host})"
        )
        remedy = (
            f"set fleet_address of {peer} in the inventory to its address on your network, then: "
            f"ansible-playbook setup.yml. If {address} already is that address, the network of {used} "
            f"contains it: {range_change}"
        )
        found.append(finding("NF535", host, problem, remedy, peer))
    return found


# -- what is known of an interface ---------------------------------------------------------------------------


def link_of(of_host: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The facts of the interface `name` of a host, such as mtu and addresses; {} if it is unknown.

    of_host: the measurements of the host (see doctor_measured).
    """
    return (of_host["facts"].get("links") or {}).get(name) or {}


def program_on(of_host: Mapping[str, Any], name: str) -> Program | None:
    """The program, such as Docker, that made the interface `name` of a host; None for any other interface.

    of_host: the measurements of the host (see doctor_measured).
    """
    link = link_of(of_host, name)
    return program_of(name, link.get("made_as") or "", link.get("addresses") or []) if name else None


def shown_interface(of_host: Mapping[str, Any], name: str) -> str:
    """An interface with its kind, as text: eth0, wlan0 (WiFi), or tailscale0 (Tailscale, MTU 1280).

    of_host: the measurements of the host (see doctor_measured). name: the interface.
    """
    program, link = program_on(of_host, name), link_of(of_host, name)
    if program:
        return f"{name} ({program.title}, MTU {link.get('mtu')})"
    return f"{name} (WiFi)" if link.get("wireless") else name


def made_interfaces(of_host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The interfaces of a host that programs such as Docker made: {"name", "program", "mtu", "on_path"} each.

    of_host: the measurements of the host (see doctor_measured). on_path: whether the host reaches a peer
    over the interface. An interface that has no address and leads to no peer is left out, such as that of
    a container in a bridge.
    """
    used = {used_interface(of_host, peer) for peer in of_host["paths"]} | {of_host["interface"]}
    found = []
    for name, link in (of_host["facts"].get("links") or {}).items():
        program = program_on(of_host, name)
        if program and (link["addresses"] or name in used):
            on_path = name in used
            found.append({"name": name, "program": program.title, "mtu": link["mtu"], "on_path": on_path})
    return found


def used_interface(of_host: Mapping[str, Any], peer: str) -> str:
    """The interface over which the kernel of a host sends packets to `peer`; "" if it is unknown.

    of_host: the measurements of the host (see doctor_measured). peer: a key of its `paths`. Raises KeyError
    for a host that it has not probed.
    """
    return str((of_host["paths"][peer].get("route") or {}).get("interface") or "")


def shared_network(measured: Measured, hosts: Sequence[str]) -> str:
    """An address of the second host in a wired or WiFi network of the first host; "" if there is none.

    measured: host -> its measurements (see doctor_measured). hosts: the names of the first and second host.
    """
    here, there = (
        [
            address
            for name, link in (measured[host]["facts"].get("links") or {}).items()
            if link["physical"] and not program_on(measured[host], name)
            for address in link["addresses"]
        ]
        for host in hosts
    )
    ends = (address.split("/")[0] for address in there)
    return next((end for end in ends if reaches(here, end)), "")


def _uses_chosen_interface(of_host: Mapping[str, Any]) -> bool:
    """Whether a route of a host to a peer uses the interface that the role network has chosen.

    The result is also True if the chosen interface or all routes are unknown.
    """
    used = {used_interface(of_host, peer) for peer in of_host["paths"]} - {""}
    return not of_host["interface"] or not used or of_host["interface"] in used
