"""What is wrong with the ways between hosts: findings from what was measured (see doctor.py), each with its remedy.

A finding is {"kind", "host" (where it is to be mended), "peer", "severity" (error: prevents training, or warning),
"problem" (a sentence), "remedy" (what to type)}. Of a cause and its consequences only the cause is told.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Measured = Mapping[str, Mapping[str, Any]]
Finding = dict[str, str]
SETUP = "ansible-playbook setup.yml"
SAYS = {
    "filtered": "No answer to {peer} on {ports}: its packets are dropped",
    "refused": "{peer} is refused on {ports}, though doctor listens there",
    "unreachable": "{peer} cannot reach {ports}: {detail}",
    "silent": "{peer} is let in on {ports} and then hears nothing: this host is frozen, or data are swallowed on the way",
    "foreign": "{peer} meets another program on {ports}",
}


def finding(
    kind: str, host: str, problem: str, remedy: str, peer: str = "", severity: str = "error"
) -> Finding:
    return {
        "kind": kind,
        "host": host,
        "peer": peer,
        "severity": severity,
        "problem": problem,
        "remedy": remedy,
    }


def way_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """All findings about the ways. options: port_low, port_high, store_port, slow_rtt_ms."""
    found = list(_interfaces(measured))
    explained = {each["host"] for each in found}
    for host, of_host in measured.items():
        for peer in of_host["ways"]:
            if measured[peer]["reachable"] and not explained & {host, peer}:
                found += _way(measured, host, peer, options)
    return _once(found)


def _once(found: Sequence[Finding]) -> list[Finding]:
    """Without repetitions: one rule may close several ways."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for each in found:
        seen.setdefault((each["kind"], each["host"], each["problem"]), each)
    return list(seen.values())


# -- the interface -------------------------------------------------------------------------------------------------


def _interfaces(measured: Measured) -> Iterator[Finding]:
    """A NIC that is not the one the kernel reaches the peers by."""
    for host, of_host in measured.items():
        if of_host["problem"]:
            sentence, _dot, remedy = of_host["problem"].partition(". ")
            yield finding("interface", host, f"{sentence}.", f"{remedy or 'ip route'} ({host})")
            continue
        other = {
            way["route"]["interface"]: peer
            for peer, way in of_host["ways"].items()
            if way.get("route", {}).get("interface") not in ("", None, of_host["interface"])
            and not _is_odd(measured, peer)
        }
        for interface, peer in other.items():
            if interface == "lo" or not of_host["interface"]:
                continue
            yield finding(
                "wrong-interface", host,
                f"Its interface is set to {of_host['interface']} ({of_host['address']}), but the kernel reaches {peer} by "
                f"{interface}: Gloo would listen where no peer comes.",
                f"take fleet_interface of {host} out of the inventory, or set it to {interface}",
                peer,
            )  # fmt: skip


def _is_odd(measured: Measured, host: str) -> bool:
    """Whether a host's own interface is not the one it reaches the others by; then its address proves nothing."""
    of_host = measured[host]
    used = {
        way["route"]["interface"] for way in of_host["ways"].values() if way.get("route", {}).get("interface")
    }
    return bool(of_host["interface"]) and bool(used) and of_host["interface"] not in used


# -- the ports -----------------------------------------------------------------------------------------------------


def _way(measured: Measured, host: str, peer: str, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about one way, from `host` to `peer`, which listens."""
    way = measured[host]["ways"][peer]
    ports = way.get("ports") or []
    if not ports:
        return []
    shut = [port for port in ports if port["state"] != "open"]
    found = []
    strange = next((port for port in shut if port["state"] == "misrouted"), None)
    if strange:
        return [_misrouted(measured, host, peer, strange)]
    if len(shut) == len(ports) and not way.get("up"):
        by_rule = _blame(measured, host, peer, shut)
        if not by_rule:
            return [_no_way(measured, host, peer)]
    for state in dict.fromkeys(port["state"] for port in shut):
        found.append(_shut(measured, host, peer, [port for port in shut if port["state"] == state], options))
    found += _packets(measured, host, peer)
    seen = {port["seen"] for port in ports if port.get("seen")}
    if not shut and measured[host]["address"] and seen and measured[host]["address"] not in seen:
        found.append(
            finding(
                "source-address", host,
                f"It reaches {peer} from {', '.join(sorted(seen))}, not from its own address {measured[host]['address']}: "
                f"rules on {peer} that let {host} in would not match.",
                f"ip route get {measured[peer]['address']}  (on {host}; then set fleet_interface or fleet_address of it)",
                peer, "warning",
            )
        )  # fmt: skip
    if way.get("rtt_ms") and way["rtt_ms"]["median"] > options["slow_rtt_ms"]:
        found.append(
            finding(
                "slow-answer", peer,
                f"A message from {host} takes {way['rtt_ms']['median']:.0f} ms there and back: that is no local network.",
                f"ping -c 20 {measured[peer]['address']}  (on {host}; WiFi's power saving or a VPN does this)",
                host, "warning",
            )
        )  # fmt: skip
    return found


def _misrouted(measured: Measured, host: str, peer: str, port: Mapping[str, Any]) -> Finding:
    address = measured[peer]["address"]
    return finding(
        "misrouted", peer,
        f"At its address {address} {host} reaches {port['detail']} instead: the address is not {peer}'s alone.",
        f"ip -br address  (on {peer} and {port['detail']}; then set fleet_address of {peer} to one of its own)",
        host,
    )  # fmt: skip


def _no_way(measured: Measured, host: str, peer: str) -> Finding:
    address = measured[peer]["address"]
    return finding(
        "no-way", peer,
        f"{host} gets no answer from {address} at all, not even on the SSH port, while the controller reaches {peer}: "
        "they are on different networks, or the router keeps its clients apart.",
        f"ip route get {address}  (on {host}; put both on one network, or set fleet_address of {peer})",
        host,
    )  # fmt: skip


def _shut(
    measured: Measured, host: str, peer: str, ports: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Finding:
    state = ports[0]["state"]
    back = measured[peer]["ways"].get(host) or {}
    is_one_way = bool(back.get("ports")) and all(port["state"] == "open" for port in back["ports"])
    sentence = SAYS[state].format(
        peer=host, ports=_ports_in_words(measured, peer, ports, options), detail=ports[0]["detail"]
    )
    sentence += ", while the other way is open." if is_one_way else "."
    kind = "blocked-store" if all(port["role"] == "store" for port in ports) else "blocked-ports"
    narrowed = [options["port_low"], options["port_high"]]
    if state in ("silent", "foreign"):
        return finding(state, peer, sentence, f"sudo ss -Hltnp  (on {peer})", host)
    picked = [port for port in ports if port.get("picked")]
    in_range = all(narrowed[0] <= port["port"] <= narrowed[1] for port in picked)
    if picked and not in_range and measured[peer]["facts"].get("port_range") != narrowed:
        has = "-".join(map(str, measured[peer]["facts"].get("port_range") or ["?"]))
        sentence += f" Its kernel picks ports from {has} instead of {narrowed[0]}-{narrowed[1]}."
        return finding("range", peer, sentence, SETUP, host)
    where, because, remedy = _cause(measured, host, peer, ports)
    return finding(kind, where, f"{sentence} {because}", remedy, host if where == peer else peer)


def _ports_in_words(
    measured: Measured, peer: str, ports: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    gloo = sorted(port["port"] for port in ports if port["role"] == "gloo")
    all_gloo = sum(port["role"] == "gloo" for port in measured[peer]["ports"])
    words = (
        [f"the store's port {options['store_port']}"]
        if any(port["role"] == "store" for port in ports)
        else []
    )
    if gloo and len(gloo) == all_gloo:
        words.append(f"Gloo's range {options['port_low']}-{options['port_high']}")
    elif gloo:
        words.append(f"port{'s' if len(gloo) > 1 else ''} {', '.join(map(str, gloo))} of Gloo's range")
    return " and ".join(words)


def _cause(
    measured: Measured, host: str, peer: str, ports: Sequence[Mapping[str, Any]]
) -> tuple[str, str, str]:
    """(the host to mend, why it is so, what to type)."""
    rule = _blame(measured, host, peer, ports)
    if rule:
        return (
            rule["where"],
            f"The rule on {rule['where']} is: {rule['text']}.",
            f"{rule['remedy']}  (on {rule['where']})",
        )
    firewall = measured[peer]["firewall"]
    if firewall is None:
        return (
            peer,
            f"Only root on {peer} can see by which rule.",
            "the same command with -K, to let doctor look as root",
        )
    if firewall["ufw"] == "active":
        allowed = all(
            any(_matches(each, measured[host]["address"], port["port"]) for each in firewall["allows"])
            for port in ports
        )
        if not allowed:
            return peer, f"ufw is active on {peer} and has no rule that lets {host} in.", SETUP
    return (
        peer,
        f"No rule was found on {host} or {peer} that does it: another firewall, a router or a cloud's security group.",
        f"sudo nft list ruleset  (on {peer}, then on {host})",
    )


def _blame(
    measured: Measured, host: str, peer: str, ports: Sequence[Mapping[str, Any]]
) -> dict[str, str] | None:
    """The rule that turns away what comes from `host` to these ports of `peer`, coming in there or going out here."""
    for where, chain, address in (
        (peer, "INPUT", measured[host]["address"]),
        (host, "OUTPUT", measured[peer]["address"]),
    ):
        for rule in (measured[where]["firewall"] or {}).get("rules") or []:
            if rule["chain"] == chain and any(_matches(rule, address, port["port"]) for port in ports):
                return {**rule, "where": where}
    return None


def _matches(rule: Mapping[str, str], address: str, port: int) -> bool:
    return (
        not rule.get("length")
        and rule["protocol"] in ("", "tcp", "all", "any")
        and _has_address(rule["source"], address)
        and _has_port(rule["ports"], port)
    )


def _has_address(written: str, address: str) -> bool:
    """Whether a rule's address (one, a network, several, `!` for all but it, or none for any) holds this one."""
    if written in ("", "any", "anywhere"):
        return True
    if written.startswith("!"):
        return not _has_address(written.lstrip("!= "), address)
    for part in written.split(","):
        try:
            if ipaddress.ip_address(address) in ipaddress.ip_network(part, strict=False):
                return True
        except ValueError:
            continue
    return False


def _has_port(written: str, port: int) -> bool:
    """Whether a rule's ports (20000:20999, 20000-20999, 22,80, or none for any) hold this one."""
    if not written:
        return True
    for part in written.split(","):
        bounds = [int(each) for each in re.findall(r"\d+", part)]
        if bounds and bounds[0] <= port <= bounds[-1]:
            return True
    return False


# -- packets -------------------------------------------------------------------------------------------------------


def _packets(measured: Measured, host: str, peer: str) -> list[Finding]:
    """Large packets that vanish without a word."""
    way = measured[host]["ways"][peer]
    mtu = way.get("mtu") or {}
    if not mtu.get("swallowed"):
        cut = way.get("cut")
        return [
            finding("cut", peer, f"The connection of {host} to it breaks off: {cut}.", f"ping {measured[peer]['address']}  (on {host})", host)
        ] if cut else []  # fmt: skip
    interface, passes = measured[host]["interface"], mtu["passes"] or 576
    sentence = (
        f"Packets of {mtu['sent']} bytes from {host} to {peer} vanish without a word"
        f"{f'; those of {passes} arrive' if mtu['passes'] else ''}: a run would connect and then hang."
    )
    for where, chain in ((peer, "INPUT"), (host, "OUTPUT")):
        for rule in (measured[where]["firewall"] or {}).get("rules") or []:
            if rule["chain"] == chain and rule["length"]:
                return [
                    finding("mtu", where, f"{sentence} The rule on {where} is: {rule['text']}.", f"{rule['remedy']}  (on {where})", peer if where == host else host)
                ]  # fmt: skip
    return [
        finding(
            "mtu", host, f"{sentence} Something between them carries less than {interface} of {host} sends.",
            f"sudo ip link set {interface} mtu {passes}  (on {host} and {peer}, until what is between them is mended)", peer,
        )
    ]  # fmt: skip


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"doctor_way_findings": way_findings}
