"""Findings of the doctor about the paths between hosts, made from the measurements (see doctor_measured).

If one fault causes others, only the first one is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import doctor_finding as finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import (
    FIREWALLS,
    holds_address,
    lacking,
    matching,
)

Measured = Mapping[str, Mapping[str, Any]]
Ports = Sequence[Mapping[str, Any]]
SETUP = "ansible-playbook setup.yml"
SHOWN_RULES = 4
AS_ROOT = "the same command with -K, so that doctor can read the rules as root"
SHUT = {
    "filtered": ("gets no answer from", ": its packets are dropped"),
    "refused": ("is refused by", ", though a listener of nanofleet is there"),
    "unreachable": ("cannot reach", " ({detail})"),
}


def path_findings(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """All findings about interfaces and paths. options: port_low, port_high, store_port, slow_rtt_ms."""
    found = list(_interfaces(measured))
    return found + connection_findings(measured, options, {each["host"] for each in found})


def connection_findings(
    measured: Measured, options: Mapping[str, Any], explained: Collection[str] = ()
) -> list[Finding]:
    """Findings about the connections that were probed.

    explained: hosts that another finding covers; their connections are left out.
    """
    found = []
    for host, of_host in measured.items():
        for peer in of_host["paths"]:
            if measured[peer]["reachable"] and not {host, peer} & set(explained):
                found += [
                    {**each, "path": f"{host} to {peer}"} for each in _path(measured, host, peer, options)
                ]
    return _merged(found)


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """Findings with the same code, host and remedy as one finding that lists the other paths.

    One firewall rule may close many paths.
    """
    merged: dict[tuple[str, str, str], Finding] = {}
    others: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        key = (each["code"], each["host"], each["remedy"])
        if key in merged:
            others.setdefault(key, []).append(each["path"])
        else:
            merged[key] = each
    for key, paths in others.items():
        merged[key]["problem"] += f" The same: {', '.join(paths)}."
    return [{name: each[name] for name in each if name != "path"} for each in merged.values()]


# -- the interface -------------------------------------------------------------------------------------------


def _interfaces(measured: Measured) -> Iterator[Finding]:
    """Findings if no interface could be chosen, or if the kernel's routes to the peers use another one."""
    for host, of_host in measured.items():
        chosen = of_host["interface"]
        if of_host["problem"]:
            sentence, _dot, remedy = of_host["problem"].partition(". ")
            yield finding("NF520", host, f"{sentence}.", f"{remedy or 'ip route'}  (on {host})")
            continue
        for peer, path in of_host["paths"].items():
            used = (path.get("route") or {}).get("interface") or chosen
            # An address that is off the link proves nothing if the peer's own interface is not the right one.
            is_proof = _is_on_link(of_host, used, measured[peer]["address"]) or not _is_odd(measured, peer)
            if chosen and used not in (chosen, "lo") and is_proof:
                yield finding(
                    "NF521", host,
                    f"Its interface is set to {chosen} ({of_host['address']}), but its kernel reaches "
                    f"{peer} by {used}: Gloo would listen where no peer connects.",
                    f"remove fleet_interface of {host} from the inventory, or set it to {used}", peer,
                )  # fmt: skip
                break


def _is_on_link(of_host: Mapping[str, Any], interface: str, address: str) -> bool:
    link = (of_host["facts"].get("links") or {}).get(interface) or {}
    return any(holds_address(network, address) for network in link.get("addresses") or [])


def _is_odd(measured: Measured, host: str) -> bool:
    of_host = measured[host]
    used = {(path.get("route") or {}).get("interface") for path in of_host["paths"].values()} - {None, ""}
    return bool(of_host["interface"]) and bool(used) and of_host["interface"] not in used


# -- the ports -----------------------------------------------------------------------------------------------


def _path(measured: Measured, host: str, peer: str, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about the path from `host` to `peer`, whose listener `host` has probed."""
    path = measured[host]["paths"][peer]
    ports = path.get("ports") or []
    shut = [port for port in ports if port["state"] != "open"]
    strange = next((port for port in shut if port["state"] == "misrouted"), None)
    if strange:
        return [_misrouted(measured, host, peer, strange)]
    rule = _blame(measured, host, peer, shut) or _blame_answers(measured, host, peer)
    if shut and len(shut) == len(ports) and not path.get("up") and not rule:
        return [_no_path(measured, host, peer)]
    states = dict.fromkeys(port["state"] for port in shut)
    found = [
        _shut(measured, host, peer, [port for port in shut if port["state"] == state], options)
        for state in states
    ]
    return [*found, *_packets(measured, host, peer), *_oddities(measured, host, peer, options)]


def _misrouted(measured: Measured, host: str, peer: str, port: Mapping[str, Any]) -> Finding:
    address, other = measured[peer]["address"], port["detail"]
    return finding(
        "NF522", peer,
        f"When {host} connects to {address}, the address of {peer}, it reaches {other} instead. Two hosts "
        "have this address, or a rule redirects the packets.",
        f"ip -br address  (on {peer} and {other}); sudo iptables-save -t nat  (on {host})", host,
    )  # fmt: skip


def _no_path(measured: Measured, host: str, peer: str) -> Finding:
    address = measured[peer]["address"]
    return finding(
        "NF523", peer,
        f"{host} gets no answer from {address} at all, not even on the SSH port, while the controller "
        f"reaches {peer}: they are on different networks, or a router keeps its clients apart.",
        f"ip route get {address}  (on {host}; put both on one network, or set fleet_address of {peer})", host,
    )  # fmt: skip


def _shut(measured: Measured, host: str, peer: str, ports: Ports, options: Mapping[str, Any]) -> Finding:
    state, words = ports[0]["state"], _in_words(measured, peer, ports, options)
    back = (measured[peer]["paths"].get(host) or {}).get("ports") or []
    is_one_way = back and all(port["state"] == "open" for port in back)
    also = ", while the other direction is open" if is_one_way else ""
    if state == "silent":
        problem = (
            f"{host} can connect to {peer} on {words} but receives no data. The program on {peer} is frozen, "
            "or packets are lost"
        )
        return finding("NF524", peer, f"{problem}{also}.", f"sudo ss -Hltnp  (on {peer})", host)
    if state == "foreign":
        problem = f"A program other than nanofleet answers {host} on {words} of {peer}"
        return finding("NF525", peer, f"{problem}{also}.", f"sudo ss -Hltnp  (on {peer})", host)
    verb, how = SHUT[state]
    how = how.format(detail=ports[0]["detail"]) + also
    wanted, has = [options["port_low"], options["port_high"]], measured[peer]["facts"].get("port_range")
    astray = [port for port in ports if port.get("picked") and not wanted[0] <= port["port"] <= wanted[1]]
    if astray and has and has != wanted:
        because = f"Its kernel picks ports from {has[0]}-{has[1]}, which is not the range that is opened."
        return finding("NF526", peer, f"{host} {verb} {peer} on {words}{how}. {because}", SETUP, host)
    where, because, remedy = _cause(measured, host, peer, ports, options)
    is_store = all(port["role"] == "store" for port in ports)
    other = host if where == peer else peer
    problem = f"{host} {verb} {peer} on {words}{how}. {because}"
    return finding("NF527" if is_store else "NF528", where, problem, remedy, other)


def _in_words(measured: Measured, peer: str, ports: Ports, options: Mapping[str, Any]) -> str:
    gloo = sorted(port["port"] for port in ports if port["role"] == "gloo")
    words = [f"the store's port {options['store_port']}"] if len(gloo) < len(ports) else []
    if gloo and len(gloo) == sum(port["role"] == "gloo" for port in measured[peer]["ports"]):
        words.append(f"Gloo's range {options['port_low']}-{options['port_high']}")
    elif gloo:
        words.append(f"port{'s' if len(gloo) > 1 else ''} {', '.join(map(str, gloo))} of Gloo's range")
    return " and ".join(words)


# -- firewalls -----------------------------------------------------------------------------------------------


def _cause(
    measured: Measured, host: str, peer: str, ports: Ports, options: Mapping[str, Any]
) -> tuple[str, str, str]:
    """(host to change, cause as a sentence, command to type) for ports of `peer` that `host` cannot reach."""
    rule = _blame(measured, host, peer, ports)
    if rule:
        return _by_rule(rule)
    if measured[peer]["firewall"] is None:
        return peer, f"Only root can read the firewall rules of {peer}.", AS_ROOT
    spans = [(port["port"], port["port"]) for port in ports]
    ends = ((peer, "INPUT", host), (host, "OUTPUT", peer))
    for where, chain, other in ends:
        for policy in lacking(measured[where]["firewall"] or [], chain, measured[other]["address"], spans):
            because = f"{policy['text']} is active on {where} and has no rule that lets {other} in."
            if chain == "OUTPUT":
                because = f"{policy['text']} is active on {where} and has no rule that lets it reach {other}."
            return where, because, _permission(policy, where, measured[other]["address"], ports, options)
    rule = _blame_answers(measured, host, peer)
    if rule:
        return _by_rule(rule)
    for where, chain, other in ends:
        drops = matching(measured[where]["firewall"] or [], "drop", chain, measured[other]["address"], spans)
        if drops:
            drops.sort(key=lambda each: not (each["ports"] or each["source"]))
            texts = "; ".join(dict.fromkeys(each["text"] for each in drops[:SHOWN_RULES]))
            return where, f"Rules of {where} that may drop them: {texts}.", _listing(drops[0], where)
    return (
        peer,
        f"No rule for it was found on {host} or {peer}: another firewall, a router or a cloud's.",
        f"sudo nft list ruleset  (on {peer}, then on {host})",
    )


def _by_rule(rule: Mapping[str, str]) -> tuple[str, str, str]:
    where = rule["where"]
    remedy = f"{rule['remedy']}  (on {where})" if rule["remedy"] else _listing(rule, where)
    return where, f"The rule on {where} is: {rule['text']}.", remedy


def _listing(rule: Mapping[str, str], where: str) -> str:
    return f"sudo {FIREWALLS[rule['firewall']].listing}  (on {where})"


def _permission(
    policy: Mapping[str, str], where: str, source: str, ports: Ports, options: Mapping[str, Any]
) -> str:
    """The command after which a policy admits TCP from `source` to these ports.

    For outgoing packets it is the command that lists the rules.
    """
    firewall = FIREWALLS[policy["firewall"]]
    if policy["chain"] == "OUTPUT":
        return _listing(policy, where)
    if firewall.is_managed:
        return SETUP
    names = {
        "gloo": f"{options['port_low']}:{options['port_high']}",
        "store": str(options["store_port"]),
    }
    wanted = [{"source": source, "port": names[role]} for role in sorted({port["role"] for port in ports})]
    return f"{' && '.join(firewall.permit(wanted, policy['place'], ''))}{firewall.keep}  (on {where})"


def _blame(measured: Measured, host: str, peer: str, ports: Ports) -> dict[str, str] | None:
    """The rule that by itself drops packets from `host` to these ports of `peer`; None without one."""
    there = [(port["port"], port["port"]) for port in ports]
    return _dropping(measured, ((peer, "INPUT", host), (host, "OUTPUT", peer)), [there])


def _blame_answers(measured: Measured, host: str, peer: str) -> dict[str, str] | None:
    """The rule that by itself drops the answers of `peer` to `host`, from any port; None without one."""
    low, high = (measured[host]["facts"].get("port_range") or [0, 65535])[:2]
    return _dropping(
        measured, ((peer, "OUTPUT", host), (host, "INPUT", peer)), [[(low, low)], [(high, high)]]
    )


def _dropping(
    measured: Measured, ends: Sequence[tuple[str, str, str]], each_of: Sequence[list[tuple[int, int]]]
) -> dict[str, str] | None:
    """The first rule at these ends that drops packets to each group of ports; None without one.

    ends: (host of the rule, chain, host at the other end). each_of: groups of port ranges (low, high).
    """
    for where, chain, other in ends:
        rules, address = measured[where]["firewall"] or [], measured[other]["address"]
        for rule in matching(rules, "drop", chain, address, each_of[0]):
            if rule["remedy"] and all(matching([rule], "drop", chain, address, group) for group in each_of):
                return {**rule, "where": where}
    return None


# -- packets -------------------------------------------------------------------------------------------------


def _packets(measured: Measured, host: str, peer: str) -> Iterator[Finding]:
    """Findings about connections that break off and about large packets that are lost without an error."""
    path = measured[host]["paths"][peer]
    mtu = path.get("mtu") or {}
    if path.get("cut"):
        remedy = f"ping {measured[peer]['address']}  (on {host})"
        yield finding(
            "NF530", peer, f"A connection from {host} to {peer} breaks off: {path['cut']}.", remedy, host
        )
    if not mtu.get("swallowed"):
        return
    arrive = f", those of {mtu['passes']} arrive" if mtu["passes"] else ""
    sentence = f"Packets of {mtu['sent']} bytes from {host} to {peer} are lost without an error{arrive}: "
    sentence += "a run would connect and then hang."
    for where, chain in ((peer, "INPUT"), (host, "OUTPUT")):
        for rule in measured[where]["firewall"] or []:
            if (rule["chain"], rule["verdict"]) == (chain, "drop") and rule["length"]:
                where, because, remedy = _by_rule({**rule, "where": where})
                yield finding(
                    "NF531", where, f"{sentence} {because}", remedy, host if where == peer else peer
                )
                return
    interface, small = measured[host]["interface"], mtu["passes"] or 576
    yield finding(
        "NF532", host, f"{sentence} A device between {host} and {peer} has a smaller MTU than {interface}.",
        f"sudo ip link set {interface} mtu {small}  (on {host}, until that device is fixed)", peer,
    )  # fmt: skip


def _oddities(measured: Measured, host: str, peer: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Warnings about a path that works: an unexpected source address, a long round trip."""
    path, own = measured[host]["paths"][peer], measured[host]["address"]
    there = measured[peer]["address"]
    seen = {port["seen"] for port in path.get("ports") or [] if port.get("seen")}
    if own and seen and own not in seen:
        yield finding(
            "NF533", host,
            f"{peer} receives packets of {host} from {', '.join(sorted(seen))}, not from {own}, the address "
            f"of {host}. A firewall rule on {peer} that allows {own} does not match them.",
            f"ip route get {there}  (on {host}; then set fleet_interface or fleet_address of it)", peer,
            "warning",
        )  # fmt: skip
    # The shortest of all: a busy host answers late now and then, a distant one always.
    took = (path.get("rtt_ms") or {}).get("min", 0)
    if took > options["slow_rtt_ms"]:
        yield finding(
            "NF534", peer,
            f"A message from {host} takes {took:.0f} ms there and back: that is no local network.",
            f"ping -c 20 {there}  (on {host}; a VPN or WiFi's power saving does this)", host, "warning",
        )  # fmt: skip
