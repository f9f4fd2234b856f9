"""Recognises WSL2 and its networking mode, and makes the command that opens ports on Windows.

Pure functions; standard library only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

NAT_NETWORK = ipaddress.ip_network("172.16.0.0/12")
WSL_VM = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"
"""The id by which the Hyper-V firewall of Windows knows the virtual machine of WSL."""


def wsl_networking(
    release: str, printed: str, links: Mapping[str, Mapping[str, Any]], gateway_link: str
) -> str:
    """The networking mode of WSL2: "nat", "mirrored" or another mode of Windows; "" if this is no WSL2.

    release: the release of the kernel. printed: the output of `wslinfo --networking-mode`, "" if the command
    is missing or fails. links: {name: interface as a dict with `addresses`}. gateway_link: name of the
    interface of the default route. The result is "unknown" if neither the command nor the interfaces show the
    mode.
    """
    if not is_wsl2(release):
        return ""
    if printed:
        return printed
    if "loopback0" in links:
        return "mirrored"
    addresses = (links.get(gateway_link) or {}).get("addresses") or []
    is_inside = any(ipaddress.ip_interface(each).ip in NAT_NETWORK for each in addresses if ":" not in each)
    return "nat" if gateway_link == "eth0" and is_inside else "unknown"


def is_wsl2(release: str) -> bool:
    """Whether a kernel's release is that of WSL2, such as 5.15.133.1-microsoft-standard-WSL2.

    WSL1, whose release ends in "-Microsoft", has no kernel of its own.
    """
    return "microsoft" in release.lower() and not release.endswith("-Microsoft")


def hyperv_rule(ports: Sequence[str]) -> str:
    """The command of PowerShell that opens TCP ports of a mirrored WSL2 in the Hyper-V firewall.

    ports: each a number or "LOW-HIGH", as text.
    """
    listed = ",".join(f"'{port}'" for port in ports)
    return (
        "New-NetFirewallHyperVRule -Name nanofleet -DisplayName nanofleet -Direction Inbound "
        f"-VMCreatorId '{WSL_VM}' -Protocol TCP -LocalPorts {listed} -Action Allow"
    )
