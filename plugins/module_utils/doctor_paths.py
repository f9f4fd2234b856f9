"""What is wrong with the paths between hosts: findings from what was measured (see doctor_measured).

Of a cause and its consequences only the cause is reported.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import doctor_finding as finding

Measured = Mapping[str, Mapping[str, Any]]
Ports = Sequence[Mapping[str, Any]]
SETUP = "ansible-playbook setup.yml"
AS_ROOT = "the same command with -K, so that doctor may look as root"
SAYS = {
    "filtered": "{host} gets no answer from {peer} on {ports}: its packets are dropped",
    "refused": "{host} is refused by {peer} on {ports}, though doctor listens there",
    "unreachable": "{host} cannot reach {peer} on {ports} ({detail})",
    "silent": "{host} is let in by {peer} on {ports} and then hears nothing: it is frozen, or data vanish",
    "foreign": "{host} meets another program on {ports} of {peer}",
}


def path_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """All findings about the paths. options: port_low, port_high, store_port, slow_rtt_ms."""
    found = list(_interfaces(measured))
    explained = {each["host"] for each in found}
    for host, of_host in measured.items():
        for peer in of_host["ways"]:
            if measured[peer]["reachable"] and not explained & {host, peer}:
                found += [
                    {**each, "way": f"{host} to {peer}"} for each in _way(measured, host, peer, options)
                ]
    return _merged(found)


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """One finding for all that one command mends on one host: a rule may close many ways."""
    merged: dict[tuple[str, str, str], Finding] = {}
    others: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        key = (each["kind"], each["host"], each["remedy"])
        if key in merged:
            others.setdefault(key, []).append(each["way"])
        else:
            merged[key] = each
    for key, ways in others.items():
        merged[key]["problem"] += f" The same: {', '.join(ways)}."
    return [{name: each[name] for name in each if name != "way"} for each in merged.values()]


# -- the interface -------------------------------------------------------------------------------------------


def _interfaces(measured: Measured) -> Iterator[Finding]:
    """A NIC that is not the one the kernel reaches the peers by."""
    for host, of_host in measured.items():
        chosen = of_host["interface"]
        if of_host["problem"]:
            sentence, _dot, remedy = of_host["problem"].partition(". ")
            yield finding("interface", host, f"{sentence}.", f"{remedy or 'ip route'}  (on {host})")
            continue
        for peer, way in of_host["ways"].items():
            used = (way.get("route") or {}).get("interface") or chosen
            # An address that is off the link proves nothing if the peer's own interface is not the right one.
            is_proof = _is_on_link(of_host, used, measured[peer]["address"]) or not _is_odd(measured, peer)
            if chosen and used not in (chosen, "lo") and is_proof:
                yield finding(
                    "wrong-interface", host,
                    f"Its interface is set to {chosen} ({of_host['address']}), but its kernel reaches "
                    f"{peer} by {used}: Gloo would listen where no peer comes.",
                    f"take fleet_interface of {host} out of the inventory, or set it to {used}", peer,
                )  # fmt: skip
                break


def _is_on_link(of_host: Mapping[str, Any], interface: str, address: str) -> bool:
    link = (of_host["facts"].get("links") or {}).get(interface) or {}
    return any(_has_address(network, address) for network in link.get("addresses") or [])


def _is_odd(measured: Measured, host: str) -> bool:
    of_host = measured[host]
    used = {(way.get("route") or {}).get("interface") for way in of_host["ways"].values()} - {None, ""}
    return bool(of_host["interface"]) and bool(used) and of_host["interface"] not in used


# -- the ports -----------------------------------------------------------------------------------------------


def _way(measured: Measured, host: str, peer: str, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about one way, from `host` to `peer`, which listens."""
    way = measured[host]["ways"][peer]
    ports = way.get("ports") or []
    shut = [port for port in ports if port["state"] != "open"]
    strange = next((port for port in shut if port["state"] == "misrouted"), None)
    if strange:
        return [_misrouted(measured, host, peer, strange)]
    if shut and len(shut) == len(ports) and not way.get("up") and not _blame(measured, host, peer, shut):
        return [_no_way(measured, host, peer)]
    states = dict.fromkeys(port["state"] for port in shut)
    found = [
        _shut(measured, host, peer, [port for port in shut if port["state"] == state], options)
        for state in states
    ]
    return [*found, *_packets(measured, host, peer), *_oddities(measured, host, peer, options)]


def _misrouted(measured: Measured, host: str, peer: str, port: Mapping[str, Any]) -> Finding:
    address, other = measured[peer]["address"], port["detail"]
    return finding(
        "misrouted", peer,
        f"At its address {address} {host} reaches {other} instead: another host has the address too, or a "
        "rule leads packets astray.",
        f"ip -br address  (on {peer} and {other}); sudo iptables-save -t nat  (on {host})", host,
    )  # fmt: skip


def _no_way(measured: Measured, host: str, peer: str) -> Finding:
    address = measured[peer]["address"]
    return finding(
        "no-way", peer,
        f"{host} gets no answer from {address} at all, not even on the SSH port, while the controller "
        f"reaches {peer}: they are on different networks, or a router keeps its clients apart.",
        f"ip route get {address}  (on {host}; put both on one network, or set fleet_address of {peer})", host,
    )  # fmt: skip


def _shut(measured: Measured, host: str, peer: str, ports: Ports, options: Mapping[str, Any]) -> Finding:
    state = ports[0]["state"]
    back = (measured[peer]["ways"].get(host) or {}).get("ports") or []
    sentence = SAYS[state].format(
        host=host, peer=peer, ports=_in_words(measured, peer, ports, options), detail=ports[0]["detail"]
    )
    if back and all(port["state"] == "open" for port in back):
        sentence += ", while the other way is open"
    if state in ("silent", "foreign"):
        return finding(state, peer, f"{sentence}.", f"sudo ss -Hltnp  (on {peer})", host)
    wanted, has = [options["port_low"], options["port_high"]], measured[peer]["facts"].get("port_range")
    astray = [port for port in ports if port.get("picked") and not wanted[0] <= port["port"] <= wanted[1]]
    if astray and has and has != wanted:
        because = f"Its kernel picks ports from {has[0]}-{has[1]}, which is not the range that is opened."
        return finding("range", peer, f"{sentence}. {because}", SETUP, host)
    where, because, remedy = _cause(measured, host, peer, ports)
    kind = "blocked-store" if all(port["role"] == "store" for port in ports) else "blocked-ports"
    return finding(kind, where, f"{sentence}. {because}", remedy, host if where == peer else peer)


def _in_words(measured: Measured, peer: str, ports: Ports, options: Mapping[str, Any]) -> str:
    gloo = sorted(port["port"] for port in ports if port["role"] == "gloo")
    words = [f"the store's port {options['store_port']}"] if len(gloo) < len(ports) else []
    if gloo and len(gloo) == sum(port["role"] == "gloo" for port in measured[peer]["ports"]):
        words.append(f"Gloo's range {options['port_low']}-{options['port_high']}")
    elif gloo:
        words.append(f"port{'s' if len(gloo) > 1 else ''} {', '.join(map(str, gloo))} of Gloo's range")
    return " and ".join(words)


# -- firewalls -----------------------------------------------------------------------------------------------


def _cause(measured: Measured, host: str, peer: str, ports: Ports) -> tuple[str, str, str]:
    """(the host to mend, why it is so, what to type)."""
    rule = _blame(measured, host, peer, ports)
    if rule:
        where = rule["where"]
        return where, f"The rule on {where} is: {rule['text']}.", f"{rule['remedy']}  (on {where})"
    firewall = measured[peer]["firewall"]
    if firewall is None:
        return peer, f"By which rule of {peer}, only root can see.", AS_ROOT
    allowed = all(
        any(_matches(rule, measured[host]["address"], port["port"]) for rule in firewall["allows"])
        for port in ports
    )
    if firewall["ufw"] == "active" and not allowed:
        return peer, f"ufw is active on {peer} and has no rule that lets {host} in.", SETUP
    return (
        peer,
        f"No rule for it was found on {host} or {peer}: another firewall, a router or a cloud's.",
        f"sudo nft list ruleset  (on {peer}, then on {host})",
    )


def _blame(measured: Measured, host: str, peer: str, ports: Ports) -> dict[str, str] | None:
    """The rule that turns away what goes from `host` to these ports of `peer`, or the answer to it."""
    low, high = (measured[host]["facts"].get("port_range") or [0, 65535])[:2]
    there = [(port["port"], port["port"]) for port in ports]
    chains = (
        (peer, "INPUT", host, there), (host, "OUTPUT", peer, there),
        (peer, "OUTPUT", host, [(low, high)]), (host, "INPUT", peer, [(low, high)]),
    )  # fmt: skip
    for where, chain, other, spans in chains:
        address = measured[other]["address"]
        for rule in (measured[where]["firewall"] or {}).get("rules") or []:
            if rule["chain"] == chain and any(_matches(rule, address, *span) for span in spans):
                return {**rule, "where": where}
    return None


def _matches(rule: Mapping[str, str], address: str, low: int, high: int = 0) -> bool:
    """Whether a rule is for TCP of any size between this address and one of these ports."""
    return (
        not rule.get("length")
        and rule["protocol"] in ("", "tcp", "all", "any")
        and _has_address(rule["source"], address)
        and _has_port(rule["ports"], low, high or low)
    )


def _has_address(written: str, address: str) -> bool:
    """Whether a rule's address (one, a network, several, `!` for all but it, or none for any) holds this."""
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


def _has_port(written: str, low: int, high: int) -> bool:
    """Whether a rule's ports (20000:20999, 20000-20999, 22,80, none for any) hold one of low to high."""
    bounds = [[int(number) for number in re.findall(r"\d+", part)] for part in written.split(",")]
    return not written or any(each and each[0] <= high and low <= each[-1] for each in bounds)


# -- packets -------------------------------------------------------------------------------------------------


def _packets(measured: Measured, host: str, peer: str) -> Iterator[Finding]:
    """Large packets that vanish without a word."""
    way = measured[host]["ways"][peer]
    mtu = way.get("mtu") or {}
    if way.get("cut"):
        remedy = f"ping {measured[peer]['address']}  (on {host})"
        yield finding("cut", peer, f"{host}'s connection to it breaks off: {way['cut']}.", remedy, host)
    if not mtu.get("swallowed"):
        return
    arrive = f", those of {mtu['passes']} arrive" if mtu["passes"] else ""
    sentence = f"Packets of {mtu['sent']} bytes from {host} to {peer} vanish without a word{arrive}: "
    sentence += "a run would connect and then hang."
    for where, chain in ((peer, "INPUT"), (host, "OUTPUT")):
        for rule in (measured[where]["firewall"] or {}).get("rules") or []:
            if rule["chain"] == chain and rule["length"]:
                because, remedy = (
                    f"The rule on {where} is: {rule['text']}.",
                    f"{rule['remedy']}  (on {where})",
                )
                yield finding("mtu", where, f"{sentence} {because}", remedy, host if where == peer else peer)
                return
    interface, small = measured[host]["interface"], mtu["passes"] or 576
    yield finding(
        "mtu", host, f"{sentence} Something between them carries less than {interface} of {host} sends.",
        f"sudo ip link set {interface} mtu {small}  (on {host}, until what is between them is mended)", peer,
    )  # fmt: skip


def _oddities(measured: Measured, host: str, peer: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """What works and should not be so: an unexpected source address, a long way."""
    way, own = measured[host]["ways"][peer], measured[host]["address"]
    there = measured[peer]["address"]
    seen = {port["seen"] for port in way.get("ports") or [] if port.get("seen")}
    if own and seen and own not in seen:
        yield finding(
            "source-address", host,
            f"{peer} sees it come from {', '.join(sorted(seen))} and not from its address {own}: rules "
            f"on {peer} that let it in would not match.",
            f"ip route get {there}  (on {host}; then set fleet_interface or fleet_address of it)", peer,
            "warning",
        )  # fmt: skip
    # The shortest of all: a busy host answers late now and then, a long way always.
    took = (way.get("rtt_ms") or {}).get("min", 0)
    if took > options["slow_rtt_ms"]:
        yield finding(
            "slow-answer", peer,
            f"A message from {host} takes {took:.0f} ms there and back: that is no local network.",
            f"ping -c 20 {there}  (on {host}; a VPN or WiFi's power saving does this)", host, "warning",
        )  # fmt: skip
