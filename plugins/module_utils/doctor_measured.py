"""Decisions of the doctor on the controller: who calls whom, what is measured, whether a check is due.

Pure functions of the results that tasks registered. `measured`, which most filters take, is a dict by host:
    reachable, why           whether the host answered; if not, what SSH printed
    facts, marks             of the module doctor_host; facts is {} if the module could not run (see `why`)
    problem                  the message of the role network if it could choose no interface, else ""
    address, interface       of the chosen NIC
    ports, held              of the module doctor_listener; `held` with pid, user, command and unit if known
    active                   names of the units of active runs
    paths, rates             of the module doctor_peers, by peer
    firewall                 rules of the module firewall_rules; None if they were not read
    installed, data          of installed_environment and of the role dataset's comparison; None if not read
    rehearsal                of the module doctor_rehearsal; None if it did not run
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import holds_address

PORTS = ("store_port", "port_low", "port_high")
TURNED_AWAY = ("filtered", "refused", "unreachable")


def rounds(hosts: Sequence[Any]) -> list[list[list[Any]]]:
    """All pairs of hosts in rounds; in a round each host has at most one partner (circle method)."""
    circle: list[Any] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([[a, b] for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [each for each in found if each]


def peers(
    hosts: Sequence[str], hostvars: Mapping[str, Any], me: str, listening: str = "__doctor_listening"
) -> list[dict[str, Any]]:
    """Option `peers` of the module doctor_peers on the host `me`: all other hosts, also unreachable ones.

    listening: name of the variable that holds the result of doctor_listener.
    """
    found = []
    for host in hosts:
        variables = hostvars[host]
        answers = variables.get(listening) or {}
        address = (
            answers.get("address") or variables.get("network_address") or _inventory_address(variables, host)
        )
        if host != me:
            port = variables.get("ansible_port") or variables.get("ansible_ssh_port") or 22
            found.append(
                {
                    "host": host,
                    "address": address,
                    "ports": answers.get("ports") or [],
                    "ssh_port": int(port),
                }
            )
    return found


def _inventory_address(variables: Mapping[str, Any], host: str) -> str:
    return str(variables.get("fleet_address") or variables.get("ansible_host") or host)


def calls(pairs: Sequence[Sequence[str]], measured: Mapping[str, Any]) -> dict[str, str]:
    """{caller: called} for the pairs of a round in which rates are measured.

    The caller is an end of the pair that reaches an open port of the other end. A pair is left out if neither
    end does, or if large packets between them are lost.
    """
    found = {}
    for a, b in pairs:
        for caller, called in ((a, b), (b, a)):
            if open_ports(measured, caller, called) and not swallows(measured, a, b):
                found[caller] = called
                break
    return found


def open_ports(measured: Mapping[str, Any], caller: str, called: str) -> list[dict[str, Any]]:
    """Ports of `called` that `caller` could connect to: dicts of the module doctor_peers."""
    path = measured[caller]["paths"].get(called) or {}
    return [port for port in path.get("ports") or [] if port["state"] == "open"]


def swallows(measured: Mapping[str, Any], a: str, b: str) -> bool:
    """Whether large packets between the hosts a and b are lost without an error, in either direction."""
    paths = (measured[a]["paths"].get(b) or {}, measured[b]["paths"].get(a) or {})
    return any((path.get("mtu") or {}).get("swallowed") for path in paths)


def turned_away(measured: Mapping[str, Any]) -> list[str]:
    """Hosts at the ends of paths with a closed port or with lost large packets.

    The role doctor reads the firewalls of these hosts.
    """
    found = set()
    for host, of_host in measured.items():
        for peer, path in of_host["paths"].items():
            shut = any(port["state"] in TURNED_AWAY for port in path.get("ports") or [])
            if shut or (path.get("mtu") or {}).get("swallowed"):
                found |= {host, peer}
    return sorted(found)


def can_rehearse(hosts: Sequence[str], measured: Mapping[str, Any], forks: int) -> dict[str, Any]:
    """{"hosts", "why"}: the hosts that can rehearse an all-reduce together; why other hosts cannot.

    hosts is [] if fewer than two can, or more than `forks`. The first host serves the rendezvous store. A
    host with a broken path to another one is left out; that path has a finding of its own.
    """
    joined: list[str] = []
    bare: list[str] = []
    why = []
    for host in hosts:
        of_host = measured[host]
        if not of_host["reachable"]:
            why.append(f"{host} does not answer")
        elif not (of_host["installed"] or {}).get("torch"):
            bare.append(host)
        elif any(held["role"] == "store" for held in of_host["held"]):
            why.append(f"the store's port on {host} is held")
        elif any(
            not _is_whole(measured, a, b) for other in joined for a, b in ((host, other), (other, host))
        ):
            why.append(f"a path to or from {host} is broken")
        else:
            joined.append(host)
    if bare:
        why.append(f"no environment yet on {', '.join(bare)} (ansible-playbook setup.yml)")
    if len(joined) > forks:
        why.append(
            f"{len(joined)} hosts must start together and Ansible runs {forks} at once: add -f {len(joined)}"
        )
        joined = []
    # Elsewhere the store's port is not open.
    with_store = bool(joined) and any(port["role"] == "store" for port in measured[joined[0]]["ports"])
    if len(joined) > 1 and not with_store:
        why.append("the host that keeps the store is not among them")
    return {"hosts": joined if with_store and len(joined) > 1 else [], "why": "; ".join(why)}


def part(
    hosts: Sequence[str], measured: Mapping[str, Any], me: str, forks: int, port: int, seconds: float
) -> dict[str, Any]:
    """Options of the module doctor_rehearsal on the host `me`, alone if it cannot rehearse with others."""
    together = can_rehearse(hosts, measured, forks)["hosts"]
    company = together if me in together else [me]
    return {
        "hosts": company,
        "rank": company.index(me),
        "master": measured[company[0]]["address"],
        "port": port,
        "rounds": rounds(list(range(len(company)))),
        "seconds": seconds,
        "join_timeout": 20,
        # Gloo gives up connecting after five times this.
        "timeout": 4,
        "limit": 50,
    }


def _is_whole(measured: Mapping[str, Any], a: str, b: str) -> bool:
    path = measured[a]["paths"].get(b) or {}
    ports = path.get("ports") or []
    return bool(ports) and all(port["state"] == "open" for port in ports) and not swallows(measured, a, b)


def measured(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """The dict `measured` (see the top of this file), from the variables that the tasks registered."""
    return {host: _measured_on(hostvars[host]) for host in hosts}


def _measured_on(variables: Mapping[str, Any]) -> dict[str, Any]:
    def result(name: str) -> Mapping[str, Any]:
        return variables.get(name) or {}

    host, listening, probed = (result(f"__doctor_{name}") for name in ("host", "listening", "probed"))
    running, rates = result("__doctor_held"), variables.get("__doctor_rates") or []
    holders = result("__doctor_holders")  # read as root, where the store's port is held
    answers = [each for each in (running, host) if each]
    lost = next((each for each in answers if each.get("unreachable")), None)
    later = next((each for each in (listening, probed) if each.get("unreachable")), None)
    failed = host if "facts" not in host else {}
    return {
        "reachable": bool(answers) and lost is None and later is None,
        "why": str((lost or later or failed).get("msg") or failed.get("module_stderr") or "").strip(),
        "facts": _facts(host, variables.get("__doctor_answered")),
        "marks": dict(host.get("marks") or {}),
        "problem": str(variables.get("__doctor_network_problem") or ""),
        "address": listening.get("address") or variables.get("network_address") or "",
        "interface": listening.get("interface") or variables.get("network_interface") or "",
        "ports": list(listening.get("ports") or []),
        "held": _held(listening, holders if "listeners" in holders else running),
        "active": list(running.get("active_units") or []),
        "paths": dict(probed.get("peers") or {}),
        "rates": {peer: rate for each in rates for peer, rate in (each.get("peers") or {}).items()},
        "firewall": result("__doctor_firewall").get("rules"),
        "installed": result("__doctor_installed").get("installed"),
        "data": variables.get("dataset_comparison"),
        "rehearsal": result("__doctor_rehearsed").get("rehearsal"),
    }


def _facts(result: Mapping[str, Any], answered: float | None) -> dict[str, Any]:
    """The facts of doctor_host with `skew_s`: seconds that the host's clock is ahead of the controller's.

    Negative if it is behind. 0 if the host's time lies between the start of the task and its answer, so that
    a slow answer does not count as skew.
    """
    facts = dict(result.get("facts") or {})
    if facts:
        before, after = facts["sent"] - facts["time"], facts["time"] - float(answered or facts["time"])
        facts["skew_s"] = round(after if after > 0 else -before if before > 0 else 0.0, 1)
    return facts


def _held(listening: Mapping[str, Any], running: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ports that doctor_listener could not open, with their holder's pid, user, command and unit if known."""
    who = {each["port"]: each for each in running.get("listeners") or []}
    return [{**who.get(held["port"], {}), **held} for held in listening.get("held") or []]


def fleet_state(
    measured: Mapping[str, Any], options: Mapping[str, Any], hostvars: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of the fleet for which a report holds: while it is unchanged, no new check is due.

    {"settings": ports and order of the hosts, "hosts": {host: marks}}. Firewall rules count only on hosts
    where they were read as root (`__doctor_rules`).
    """
    settings = {"hosts": " ".join(measured)} | {name: str(options[name]) for name in PORTS}
    state: dict[str, Any] = {"settings": settings, "hosts": {}}
    addresses = [of_host["address"] for of_host in measured.values()]
    for host, of_host in measured.items():
        marks = {**of_host["marks"], "interface": of_host["interface"], "address": of_host["address"]}
        rules = hostvars[host].get("__doctor_rules") or {}
        if "rules" in rules:
            # Rules about other addresses change often, for example where fail2ban runs.
            ours = [
                each for each in rules["rules"] if any(holds_address(each["source"], a) for a in addresses)
            ]
            listed = json.dumps(ours, sort_keys=True)
            marks["firewall"] = hashlib.sha256(listed.encode()).hexdigest()[:12]
        state["hosts"][host] = marks
    return state


def kept_file(folder: str, hosts: Sequence[str]) -> Path:
    """Path of a fleet's last good report on the controller: FOLDER/HASH.json, by the names of the hosts."""
    return Path(folder) / f"{hashlib.sha256(chr(10).join(hosts).encode()).hexdigest()[:12]}.json"


def due(state: Mapping[str, Any], kept: str, when: str) -> str:
    """Why a check of the fleet is due, as a phrase; "" if none is due.

    state: the present fleet_state. kept: text of the last good report, "" without one. when: auto, always or
    never.
    """
    if when != "auto":
        return "doctor=always" if when == "always" else ""
    try:
        before = json.loads(kept)["state"]
    except (ValueError, KeyError, TypeError):
        return "no good report is kept"
    if before["settings"] != state["settings"]:
        return "the ports or the order of the hosts have changed since the last good report"
    for host, marks in state["hosts"].items():
        known = before["hosts"].get(host) or {}
        changed = [
            name
            for name, mark in marks.items()
            if mark != known.get(name) and "unreadable" not in (mark, known.get(name))
        ]
        if changed == ["firewall"] and "firewall" not in known:
            return f"the last good report has not read the firewall of {host}"
        if changed:
            what = {
                "boot": "was started",
                "interface": "has another interface",
                "address": "has another address",
            }
            change = what.get(changed[0], f"has another {changed[0]}")
            return f"{host} {change} since the last good report"
    return ""
