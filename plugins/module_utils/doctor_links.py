"""Findings of the doctor about the speed of links, made from the measurements (see doctor_measured).

Each finding is a warning, because a slow link does not prevent training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, doctor_finding

Measured = Mapping[str, Mapping[str, Any]]
DENSE_MB = 503
"""MB that a rank sends in one step at depth 8 in sync=dense."""


finding = partial(doctor_finding, severity="warning")


def link_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Warnings about slow interfaces and slow paths. options: slow_mbit, the least good rate in Mbit/s.

    A slow path is not reported if the interface at one of its ends has a warning that explains it.
    """
    found = [each for host in measured for each in _link(measured, host)]
    explained = {each["host"] for each in found}
    directed = directed_rates(measured)
    slow = {
        path: mbit
        for path, mbit in directed.items()
        if mbit < options["slow_mbit"] and not explained & {*path}
    }
    for end, verb in ((0, "sends"), (1, "receives")):
        for host in measured:
            paths = [path for path in directed if path[end] == host]
            # With two hosts both ends are alike: the sender is named, and the peer with it.
            if len(paths) > 1 and all(path in slow for path in paths):
                best = max(slow.pop(path) for path in paths)
                problem = f"It {verb} at {best:.0f} Mbit/s at most, whichever host is the peer."
                found.append(finding("NF540", host, problem, _see_link(measured, host)))
    for (sender, receiver), mbit in slow.items():
        back = directed.get((receiver, sender))
        other = f" ({back:.0f} in the other direction)" if back else ""
        step = DENSE_MB * 8 / max(mbit, 0.1)
        problem = (
            f"It sends to {receiver} at {mbit:.0f} Mbit/s{other}: the gradients of one step at depth 8 "
            f"({DENSE_MB} MB in sync=dense) take {step:.0f} s."
        )
        found.append(finding("NF541", sender, problem, _see_link(measured, sender), receiver))
    return found


def directed_rates(measured: Measured) -> dict[tuple[str, str], float]:
    """Measured rates in Mbit/s by (sender, receiver), without those whose measurement failed."""
    found = {}
    for host, of_host in measured.items():
        for peer, rates in of_host["rates"].items():
            if "error" not in rates:
                found[host, peer] = float(rates["sent_mbit"])
                found[peer, host] = float(rates["received_mbit"])
    return found


def _see_link(measured: Measured, host: str) -> str:
    interface = measured[host]["interface"]
    see = f"cat /sys/class/net/{interface}/speed; tc qdisc show dev {interface}"
    return f"{see}  (on {host}; then cable, port and switch)"


def _link(measured: Measured, host: str) -> Iterator[Finding]:
    """A warning about the chosen interface: WiFi beside a cable, at most 100 Mbit/s, or half duplex."""
    links, name = measured[host]["facts"].get("links") or {}, measured[host]["interface"]
    link = links.get(name)
    if not link:
        return
    cables = [
        (other, each["addresses"][0].split("/")[0])
        for other, each in links.items()
        if each["physical"] and each["carrier"] and not each["wireless"] and each["addresses"]
    ]
    if link["wireless"] and cables:
        other, address = cables[0]
        problem = f"It reaches its peers over WiFi ({name}), although {other} ({address}) has a cable."
        remedy = f"set fleet_address of {host} to {address} in the inventory, then ansible-playbook setup.yml"
        yield finding("NF542", host, problem, remedy)
    elif link["speed_mbit"] and link["speed_mbit"] <= 100 and not link["wireless"]:
        problem = f"{name} runs at {link['speed_mbit']} Mbit/s: a bad cable, or an old port."
        yield finding("NF543", host, problem, f"sudo ethtool {name}  (on {host}; try another cable and port)")
    elif link["duplex"] == "half":
        problem = f"{name} runs at half duplex: it cannot send and receive at once."
        yield finding("NF544", host, problem, f"sudo ethtool -s {name} autoneg on  (on {host})")
