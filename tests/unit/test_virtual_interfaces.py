"""Interfaces of VPNs, containers and virtual machines, and WSL2, recognised from what `ip` prints.

listings/ip_address.json is `ip -json -details address` without fields that are not read. The tun, bridge and
veth links were recorded in a network namespace. The Ethernet, WireGuard and WSL2 links are written by hand in
the same format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_interfaces as interfaces
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_report as report
from ansible_collections.nanofleet.fleet.plugins.module_utils import wsl
from ansible_collections.nanofleet.fleet.plugins.module_utils.network_interfaces import kind_of
from ansible_collections.nanofleet.fleet.plugins.modules import doctor_host
from measured_fleet import Measured, a_link, all_findings, close_ports, fleet, only
from port_range import DASHED

LISTINGS = json.loads((Path(__file__).parent / "listings" / "ip_address.json").read_text())
RELEASE = "5.15.133.1-microsoft-standard-WSL2"
PROGRAMS = {
    "docker0": "Docker",
    "br-0123456789ab": "Docker",
    "virbr0": "libvirt",
    "vmbridge": "libvirt",  # by its address range
    "vnet0": "libvirt",
    "veth12ab34c": "a container",
    "tailscale0": "Tailscale",
    "tun0": "Tailscale",  # by its address range
    "ztr2qmcn6n": "ZeroTier",
    "wg0": "WireGuard",
    "home": "WireGuard",  # by its link type
    "br0": None,  # a bridge that a person has made
    "enp3s0": None,
    "wwan0": None,  # an Internet provider's address of 100.64.0.0/10
}


def links_of(listing: str, monkeypatch: pytest.MonkeyPatch, route: str = "eth0") -> dict[str, Any]:
    """The interfaces that doctor_host reads where `ip` prints this listing."""

    def ask_ip(*words: str) -> tuple[list[dict[str, Any]], str]:
        return (LISTINGS[listing] if "address" in words else [{"dst": "default", "dev": route}]), ""

    monkeypatch.setattr(doctor_host, "ask_ip", ask_ip)
    return doctor_host.links()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_recognised_by_name_link_type_or_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_host = {"facts": {"links": links_of("host", monkeypatch)}}
    program = interfaces.program_on(of_host, name)
    assert (program.title if program else None) == PROGRAMS[name]
    (link,) = (each for each in LISTINGS["host"] if each["ifname"] == name)
    kinds = {None: "cable", "vpn": "tunnel", "bridge": "bridge"}
    assert kind_of(link, []) == kinds[program.kind if program else None]


def with_link(measured: Measured, host: str, name: str, **more: Any) -> None:
    """Let the host reach every peer over this interface only."""
    links = measured[host]["facts"]["links"]
    links[name] = a_link(physical=False, **more)
    address = measured[host]["address"]
    links[name]["addresses"] = [f"{address}/32"]
    del links["eth0"]
    measured[host]["interface"] = name
    for path in measured[host]["paths"].values():
        path["route"] = {"interface": name, "source": address}


def test_a_vpn_on_the_path_is_named_with_its_mtu_and_is_no_fault() -> None:
    measured = fleet("tower", "laptop")
    with_link(measured, "laptop", "tailscale0", mtu=1280, made_as="tun")
    measured["laptop"]["facts"]["links"]["docker0"] = a_link(addresses=["172.17.0.1/16"], physical=False)
    assert all_findings(measured) == []
    about = {"time": 1.0, "seconds": 1.0, "quick": False, "rehearsal": {"hosts": [], "why": ""}}
    made = report.report(measured, [], about)
    assert made["hosts"]["laptop"]["made_interfaces"] == [
        {"name": "tailscale0", "program": "Tailscale", "mtu": 1280, "on_path": True},
        {"name": "docker0", "program": "Docker", "mtu": 1500, "on_path": False},
    ]
    assert made["hosts"]["tower"]["made_interfaces"] == []
    text = report.text(made)
    assert "On the path of laptop: tailscale0 (Tailscale, MTU 1280). Not on it: docker0 (Docker)." in text
    assert "of tower:" not in text


@pytest.mark.parametrize(
    ("name", "title", "typed"),
    [
        ("docker0", "Docker", "/etc/docker/daemon.json"),
        ("br-0123456789ab", "Docker", "/etc/docker/daemon.json"),
        ("virbr0", "libvirt", "virsh net-edit default"),
        ("lxcbr0", "LXC", "another range of addresses"),
    ],
)
def test_a_bridge_on_the_path_is_a_fault_with_a_remedy(name: str, title: str, typed: str) -> None:
    measured = fleet("tower", "laptop")
    with_link(measured, "tower", name, made_as="bridge")
    measured["tower"]["facts"]["links"]["eth0"] = a_link(addresses=["192.168.1.10/24"])
    close_ports(measured, "tower", "laptop", "unreachable")
    close_ports(measured, "laptop", "tower", "filtered")
    found = only(measured)
    assert (found["code"], found["host"], found["peer"]) == ("NF535", "tower", "laptop")
    assert found["severity"] == "error"
    assert f"over {name}, a bridge of {title}" in found["problem"]
    assert "set fleet_address of laptop" in found["remedy"]
    assert typed in found["remedy"]


def test_a_guest_that_is_reached_over_a_bridge_is_a_warning_and_its_faults_are_reported() -> None:
    measured = fleet("tower", "laptop")
    with_link(measured, "tower", "virbr0", made_as="bridge")
    found = only(measured)
    assert (found["code"], found["severity"]) == ("NF536", "warning")
    close_ports(measured, "laptop", "tower", "filtered")
    assert {each["code"] for each in all_findings(measured)} == {"NF536", "NF528"}


# -- WSL2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "is_one"),
    [
        (RELEASE, True),
        ("6.6.36.6-microsoft-standard-WSL2+", True),
        ("4.4.0-19041-Microsoft", False),  # WSL1
        ("6.1.0-28-amd64", False),
        ("6.8.0-1017-azure", False),
    ],
)
def test_wsl2_is_recognised_by_its_kernel(release: str, is_one: bool) -> None:
    assert wsl.is_wsl2(release) is is_one


@pytest.mark.parametrize(
    ("listing", "route", "printed", "mode"),
    [
        ("wsl2 nat", "eth0", "", "nat"),
        ("wsl2 mirrored", "eth0", "", "mirrored"),
        ("wsl2 nat", "eth0", "virtioproxy", "virtioproxy"),  # Windows knows best
        ("wsl2 nat", "", "", "unknown"),
        ("host", "enp3s0", "", "unknown"),
    ],
)
def test_the_networking_mode_of_wsl2_is_read(
    listing: str, route: str, printed: str, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_host.platform, "release", lambda: RELEASE)
    links = links_of(listing, monkeypatch, route)
    (tmp_path / "wslinfo").write_text(f"#!/bin/sh\n[ '{printed}' ] || exit 1\necho {printed}\n")
    (tmp_path / "wslinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor_host.wsl(links) == mode
    monkeypatch.setattr(doctor_host.platform, "release", lambda: "6.1.0-28-amd64")
    assert doctor_host.wsl(links) == ""


def test_tailscale_of_windows_is_recognised_in_a_mirrored_wsl2(monkeypatch: pytest.MonkeyPatch) -> None:
    of_host = {"facts": {"links": links_of("wsl2 mirrored", monkeypatch)}}
    assert interfaces.shown_interface(of_host, "eth1") == "eth1 (Tailscale, MTU 1280)"
    assert interfaces.shown_interface(of_host, "eth0") == "eth0"


def test_wsl2_behind_nat_is_the_fault_with_what_to_type_on_windows() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["wsl"] = "nat"
    assert all_findings(measured) == [], "a peer reaches it"
    measured["laptop"]["address"] = "172.24.5.6"
    measured["tower"]["paths"]["laptop"].update(up=False)
    close_ports(measured, "tower", "laptop", "filtered")
    found = only(measured)
    assert (found["code"], found["host"], found["severity"]) == ("NF529", "laptop", "error")
    assert "172.24.5.6 exists only inside Windows" in found["problem"]
    for typed in (
        "[wsl2] and networkingMode=mirrored to %UserProfile%\\.wslconfig",
        "wsl --shutdown",
        "-VMCreatorId '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}'",
        f"-LocalPorts '22','29500','{DASHED}'",
    ):
        assert typed in found["remedy"]


def test_a_mirrored_wsl2_that_gives_no_answer_is_behind_the_firewall_of_windows() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["wsl"] = "mirrored"
    assert all_findings(measured) == []
    close_ports(measured, "tower", "laptop", "filtered")
    measured["tower"]["paths"]["laptop"].update(up=False)
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF528", "laptop")
    assert "the Hyper-V firewall of Windows" in found["problem"]
    assert "New-NetFirewallHyperVRule" in found["remedy"]
    assert f"'29500','{DASHED}'" in found["remedy"]
    assert "'22'" not in found["remedy"]
