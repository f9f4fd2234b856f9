"""Findings of the doctor about the speed of links, made from the measurements (see doctor_measured).

Each finding is a warning, because a slow link does not prevent training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_interfaces import (
    program_on,
    shared_network,
    shown_interface,
    used_interface,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.doctor_measured import prediction
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, doctor_finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.virtual_interfaces import VPN

Measured = Mapping[str, Mapping[str, Any]]
GUIDE = "docs/how-to/slow-link.md"


finding = partial(doctor_finding, severity="warning")


def link_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Warnings about slow interfaces, and about slow paths between two hosts.

    measured: host -> its measurements (see doctor_measured). options: slow_mbit, the rate in Mbit/s below
    which a path is slow. A slow path is not reported if the interface at one of its ends has a warning that
    explains it. If a step of a run was predicted, each warning has the seconds that a rank spends on the
    network in that step.
    """
    predicted = prediction(measured)
    needs = network_needs(predicted) if predicted else ""
    found = [each for host in measured for each in _link(measured, host, needs)]
    explained, least = {each["host"] for each in found}, options["slow_mbit"]
    directed = directed_rates(measured)
    slow = {path: mbit for path, mbit in directed.items() if mbit < least and not explained & {*path}}
    for end, verb, fastest in ((0, "sends", "to its fastest peer"), (1, "receives", "from its fastest peer")):
        for host in measured:
            paths = [path for path in directed if path[end] == host]
            # With two hosts both ends are alike: the sender is named, and the peer with it.
            if len(paths) > 1 and all(path in slow for path in paths):
                best = max(slow.pop(path) for path in paths)
                over = shown_interface(measured[host], measured[host]["interface"])
                problem = (
                    f"This host {verb} only {best:.0f} Mbit/s over {over}, even {fastest}. "
                    f"Below {least:g} Mbit/s a link can limit the speed of training.{needs}"
                )
                found.append(finding("NF540", host, problem, _link_check_and_settings(measured, host)))
    for (sender, receiver), mbit in slow.items():
        back = directed.get((receiver, sender))
        other = f" ({back:.0f} Mbit/s in the other direction)" if back else ""
        over = shown_interface(measured[sender], _interface(measured, sender, receiver))
        problem = (
            f"This host sends {mbit:.0f} Mbit/s to {receiver}{other} over {over}. "
            f"Below {least:g} Mbit/s a link can limit the speed of training.{needs}"
        )
        found.append(
            finding("NF541", sender, problem, _link_check_and_settings(measured, sender, receiver), receiver)
        )
    named = {name for each in found for name in (each["host"], each["peer"])}
    if predicted:
        found += [each for host in measured if host not in named for each in _wifi(measured, host, needs)]
    return found


# -- what a step needs of the network ------------------------------------------------------------------------


def network_needs(predicted: Mapping[str, Any]) -> str:
    """A sentence, with a leading space, about the predicted seconds of a step and of its transfers.

    It has the seconds for the sync mode of the run, for the advised sync modes and for local. predicted: the
    prediction of trainer.bench.step_prediction, with total_batch_size, depth, sync, modes and advice.
    """
    advised = [each.partition("=")[2] for each in predicted["advice"] if each.startswith("sync=")]
    modes = dict.fromkeys([predicted["sync"], *advised, "local"])
    words: list[str] = []
    for mode in modes:
        network, step = (_seconds(predicted["modes"][mode][name]) for name in ("network_s", "step_s"))
        words.append(f"{step} with sync={mode} (transfers: {network})")
    size = f"depth {predicted['depth']} and {predicted['total_batch_size']:,} tokens"
    return f" A step of {size} is predicted to take {', '.join(words)}."


def _seconds(value: float) -> str:
    return "under 0.1 s" if value < 0.1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _link_check_and_settings(measured: Measured, host: str, peer: str = "") -> str:
    """The fix of a slow link: how to find the cause, and settings with which a run sends fewer bytes.

    peer: the host at the other end; "" if the link is slow to all peers.
    """
    interface = _interface(measured, host, peer)
    link = (measured[host]["facts"].get("links") or {}).get(interface) or {}
    program = program_on(measured[host], interface)
    if program and program.kind == VPN:
        address = measured[peer]["address"] if peer else "PEER"
        see = program.see.format(interface=interface, address=address, host=host)
        lan = shared_network(measured, [host, peer]) if peer else ""
        if lan:
            see = f"set fleet_address of {peer} to {lan}, if that is the LAN of both; else {see}"
    elif link.get("wireless"):
        see = (
            f"find the cause: iw dev {interface} link  (on {host}; a cable is faster, and so is 5 GHz near "
            "the access point)"
        )
    else:
        see = (
            f"find the cause: cat /sys/class/net/{interface}/speed; tc qdisc show dev {interface}  (on "
            f"{host}; the first prints the rate of the link in Mbit/s, the second a limit such as tbf if "
            "there is one; then check cable, port and switch)"
        )
    predicted = prediction(measured)
    advice = [f"-e {each}" for each in predicted["advice"]] if predicted else []
    if not advice:
        return see
    command = " or with ".join([f"ansible-playbook train.yml {advice[0]}", *advice[1:]])
    return (
        f"{see}; or start a new run, with your other settings, that needs less of the network: {command} "
        f"({GUIDE})"
    )


def _interface(measured: Measured, host: str, peer: str) -> str:
    """The interface of a host on the path to a peer; without a peer, the one that was chosen."""
    used = used_interface(measured[host], peer) if peer in measured[host]["paths"] else ""
    return str(used or measured[host]["interface"])


# -- interfaces ----------------------------------------------------------------------------------------------


def directed_rates(measured: Measured) -> dict[tuple[str, str], float]:
    """Measured rates in Mbit/s: {(sender, receiver): rate}; measurements that failed are left out.

    measured: host -> its measurements (see doctor_measured).
    """
    found = {}
    for host, of_host in measured.items():
        for peer, rates in of_host["rates"].items():
            if "error" not in rates:
                found[host, peer] = float(rates["sent_mbit"])
                found[peer, host] = float(rates["received_mbit"])
    return found


def _wifi(measured: Measured, host: str, needs: str) -> Iterator[Finding]:
    """A warning about a host that has only WiFi, with the lowest measured rate and `needs`.

    needs: the result of `network_needs`, or "".
    """
    name = measured[host]["interface"]
    link = (measured[host]["facts"].get("links") or {}).get(name) or {}
    rates = [mbit for path, mbit in directed_rates(measured).items() if host in path]
    if link.get("wireless") and rates:
        problem = (
            f"This host has only WiFi ({name}). At the moment it carries {min(rates):.0f} Mbit/s; this "
            f"changes with the distance to the access point and with other users.{needs}"
        )
        yield finding("NF545", host, problem, _link_check_and_settings(measured, host))


def _link(measured: Measured, host: str, needs: str) -> Iterator[Finding]:
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
        problem = (
            f"This host reaches its peers over WiFi ({name}), although its interface {other} ({address}) is "
            f"connected by cable, which is usually faster.{needs}"
        )
        remedy = (
            f"if both interfaces are in one network: sudo ip link set {name} down  (on {host}; SSH sessions "
            f"over {name} end); or, if all hosts have an address in the network of {other}, set "
            "fleet_address of each host to that address in the inventory; then: ansible-playbook setup.yml"
        )
        yield finding("NF542", host, problem, remedy)
    elif (mbit := link["speed_mbit"]) and mbit <= 100 and link["physical"] and not link["wireless"]:
        problem = (
            f"The interface {name} of this host runs at only {mbit} Mbit/s. The cause may be a bad cable "
            f"or an old switch port.{needs}"
        )
        yield finding(
            "NF543",
            host,
            problem,
            f"try another cable and switch port, then check the speed: sudo ethtool {name}  (on {host})",
        )
    elif link["duplex"] == "half":
        problem = (
            f"The interface {name} of this host runs at half duplex: it cannot send and receive at "
            f"once.{needs}"
        )
        yield finding("NF544", host, problem, f"sudo ethtool -s {name} autoneg on  (on {host})")
