# SPDX-License-Identifier: MIT
"""Chains of firewall_chains from the output of `nft --json list ruleset` (libnftables-json(5))."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_chains import (
    Answer,
    Chain,
    Chains,
    Packet,
    Rule,
    negated,
    within,
)


def covers(value: Any, wanted: Any, sets: Mapping[str, list[Any]]) -> Answer:
    """Whether nft's expression `value` (a scalar, prefix, range, set, or the name of one) holds `wanted`."""
    if isinstance(value, str) and value.startswith("@"):
        return covers({"set": sets[value[1:]]}, wanted, sets) if value[1:] in sets else None
    if isinstance(value, Mapping):
        if "set" in value:
            members = value["set"] if isinstance(value["set"], list) else [value["set"]]
            answers = [covers(member, wanted, sets) for member in members]
            return True if True in answers else None if None in answers else False
        if "elem" in value:
            return covers(value["elem"].get("val"), wanted, sets)
        if "prefix" in value:
            return within(wanted, f"{value['prefix']['addr']}/{value['prefix']['len']}")
        if "range" in value:
            low, high = value["range"]
            try:
                if isinstance(wanted, int):
                    return int(low) <= wanted <= int(high)
                numbers = [int(ipaddress.ip_address(str(text))) for text in (low, wanted, high)]
                return numbers[0] <= numbers[1] <= numbers[2]
            except ValueError:
                return None
        return None
    if isinstance(wanted, int):
        return int(value) == wanted if str(value).isdigit() else None
    if isinstance(value, str) and value.endswith("*"):
        return str(wanted).startswith(value[:-1])
    return str(value) == str(wanted) or within(wanted, value)


def nft_fact(left: Mapping[str, Any], packet: Packet) -> tuple[bool, Any]:
    """(known, value) of the left side of a match for this packet; a value of None never equals anything."""
    payload, meta, ct = left.get("payload"), left.get("meta"), left.get("ct")
    if payload:
        what = payload.get("protocol"), payload.get("field")
        own = {"ip": 4, "ip6": 6}.get(str(what[0]))
        if own and own != packet.version:
            return True, None
        known = {
            ("ip", "saddr"): packet.source, ("ip6", "saddr"): packet.source,
            ("ip", "daddr"): packet.destination, ("ip6", "daddr"): packet.destination,
            ("tcp", "dport"): packet.port, ("th", "dport"): packet.port,
            ("ip", "protocol"): "tcp", ("ip6", "nexthdr"): "tcp",
        }  # fmt: skip
        if what[0] in ("udp", "icmp", "icmpv6", "sctp"):
            return True, None
        return what in known, known.get(what)
    if meta:
        of_meta = {
            "iifname": packet.interface, "iif": packet.interface, "l4proto": "tcp",
            "nfproto": f"ipv{packet.version}",
        }  # fmt: skip
        return meta.get("key") in of_meta, of_meta.get(meta.get("key"))
    if ct and ct.get("key") in ("state", "status"):
        return True, "new" if ct["key"] == "state" else "none"
    if "fib" in left and left["fib"].get("result") == "type" and "daddr" in str(left["fib"].get("flags")):
        return True, "local"
    return False, None


def nft_test(match: Mapping[str, Any], sets: Mapping[str, list[Any]]) -> Callable[[Packet], Answer]:
    def test(packet: Packet) -> Answer:
        known, value = nft_fact(match["left"], packet)
        if not known or match.get("op") not in ("==", "in", "!="):
            return None
        if value is None:
            return False
        right = match["right"]
        if isinstance(right, list):
            right = {"set": right}
        return negated(covers(right, value, sets), match["op"] == "!=")

    return test


def vmap_rules(vmap: Mapping[str, Any], tests: list[Any], sets: Mapping[str, list[Any]]) -> list[Rule]:
    """A verdict map as one rule an entry."""
    data = vmap.get("data")
    entries = data.get("set", []) if isinstance(data, Mapping) else sets.get(str(data).lstrip("@"), [])
    made = []
    for entry in entries:
        if isinstance(entry, list) and len(entry) == 2:
            match = {"op": "==", "left": vmap["key"], "right": entry[0]}
            made.append(_with_verdict(entry[1], [*tests, nft_test(match, sets)]))
    return [rule for rule in made if rule]


def _with_verdict(statement: Mapping[str, Any], tests: list[Any]) -> Rule | None:
    for word in ("accept", "drop", "return"):
        if word in statement:
            return Rule(word, tests)
    if "reject" in statement:
        return Rule("drop", tests)
    for word in ("jump", "goto"):
        if word in statement:
            return Rule(word, tests, statement[word]["target"])
    return None


def nft_rules(expression: list[Mapping[str, Any]], sets: Mapping[str, list[Any]]) -> list[Rule]:
    tests: list[Callable[[Packet], Answer]] = []
    for statement in expression:
        if "match" in statement:
            tests.append(nft_test(statement["match"], sets))
        elif "vmap" in statement:
            return vmap_rules(statement["vmap"], tests, sets)
        elif "xt" in statement or "limit" in statement:
            tests.append(lambda _packet: None)
        else:
            rule = _with_verdict(statement, tests)
            if rule:
                return [rule]
    return []


def read_nft(listing: Mapping[str, Any], skipped: Iterable[str] = ()) -> Chains:
    """Chains of `nft --json list ruleset`; skipped: "FAMILY TABLE" of tables that are read elsewhere."""
    objects = [next(iter(entry.items())) for entry in listing.get("nftables", []) if entry]
    sets: dict[str, dict[str, list[Any]]] = {}
    for kind, value in objects:
        if kind in ("set", "map"):
            sets.setdefault(f"{value['family']} {value['table']}", {})[value["name"]] = value.get("elem", [])
    chains: Chains = {}
    for kind, value in objects:
        if kind not in ("chain", "rule"):
            continue
        table = f"{value['family']} {value['table']}"
        if table in skipped or value["family"] not in ("ip", "ip6", "inet"):
            continue
        if kind == "chain":
            guards = value.get("hook") == "input" and value.get("type") == "filter"
            chains[table, value["name"]] = Chain(
                label=f"table {table}, chain {value['name']}",
                policy=value.get("policy", "accept") if guards else "",
                version={"ip": 4, "ip6": 6}.get(value["family"], 0),
                firewall="firewalld" if value["table"] == "firewalld" else "nft",
                place=f"{table} {value['name']}",
            )
        else:
            chains[table, value["chain"]].rules += nft_rules(value.get("expr", []), sets.get(table, {}))
    return chains
