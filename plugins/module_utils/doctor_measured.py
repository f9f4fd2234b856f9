"""What doctor does next on the controller: who calls whom, what was found out so far, whether it is due.

Pure functions of what the tasks registered. `measured`, which the other filters take, is by host:
    reachable, why           whether it answered at all, and what SSH printed if not
    facts, marks             of the module doctor_host; facts empty where it could not run (see `why`)
    problem                  the network role's sentence where no interface could be chosen
    address, interface       of the chosen NIC
    ports, held              of the module doctor_listener; held with pid, user, command and unit where known
    active                   units of runs that are up
    paths, rates             of the module doctor_peers, by peer
    firewall                 rules of the module firewall_rules, None where they were not read
    installed, data          of the module installed_environment and dataset's compare, None where not read
    rehearsal                of the module doctor_rehearsal, None where it did not run
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
    """All pairs in rounds in which no host has two partners (the circle method of a tournament)."""
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
    """Whom `me` shall probe, as doctor_peers takes it; hosts that do not answer the controller too.

    listening: the variable with the result of doctor_listener.
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
    """Who calls whom in a round of rates: the end that gets through, and packets of every size with it."""
    found = {}
    for a, b in pairs:
        for caller, called in ((a, b), (b, a)):
            if open_ports(measured, caller, called) and not swallows(measured, a, b):
                found[caller] = called
                break
    return found


def open_ports(measured: Mapping[str, Any], caller: str, called: str) -> list[dict[str, Any]]:
    path = measured[caller]["paths"].get(called) or {}
    return [port for port in path.get("ports") or [] if port["state"] == "open"]


def swallows(measured: Mapping[str, Any], a: str, b: str) -> bool:
    """Whether large packets vanish between two hosts, in either direction."""
    paths = (measured[a]["paths"].get(b) or {}, measured[b]["paths"].get(a) or {})
    return any((path.get("mtu") or {}).get("swallowed") for path in paths)


def turned_away(measured: Mapping[str, Any]) -> list[str]:
    """Hosts at either end of a path on which a port did not open: their firewalls are read."""
    found = set()
    for host, of_host in measured.items():
        for peer, path in of_host["paths"].items():
            shut = any(port["state"] in TURNED_AWAY for port in path.get("ports") or [])
            if shut or (path.get("mtu") or {}).get("swallowed"):
                found |= {host, peer}
    return sorted(found)


def can_rehearse(hosts: Sequence[str], measured: Mapping[str, Any], forks: int) -> dict[str, Any]:
    """{"hosts", "why"}: who rehearses an all-reduce together, and why the others do it alone or not at all.

    The first host keeps the store. A host with a broken path to one of them stays out: it is named already.
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
    """The options of doctor_rehearsal on the host `me`; who cannot rehearse with others does it alone."""
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
    """What the tasks registered so far, by host."""
    return {host: _measured_on(hostvars[host]) for host in hosts}


def _measured_on(variables: Mapping[str, Any]) -> dict[str, Any]:
    def result(name: str) -> Mapping[str, Any]:
        return variables.get(name) or {}

    host, listening, probed = (result(f"__doctor_{name}") for name in ("host", "listening", "probed"))
    running, rates = result("__doctor_held"), variables.get("__doctor_rates") or []
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
        "held": _held(listening, running),
        "active": list(running.get("active_units") or []),
        "paths": dict(probed.get("peers") or {}),
        "rates": {peer: rate for each in rates for peer, rate in (each.get("peers") or {}).items()},
        "firewall": result("__doctor_firewall").get("rules"),
        "installed": result("__doctor_installed").get("installed"),
        "data": variables.get("dataset_comparison"),
        "rehearsal": result("__doctor_rehearsed").get("rehearsal"),
    }


def _facts(result: Mapping[str, Any], answered: float | None) -> dict[str, Any]:
    """The host's facts, with `skew_s`: by how much its clock lies outside the time in which it was asked.

    That is 0 for a host that is only slow to answer.
    """
    facts = dict(result.get("facts") or {})
    if facts:
        before, after = facts["sent"] - facts["time"], facts["time"] - float(answered or facts["time"])
        facts["skew_s"] = round(after if after > 0 else -before if before > 0 else 0.0, 1)
    return facts


def _held(listening: Mapping[str, Any], running: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ports that our listener could not have, with who has them where that is known."""
    who = {each["port"]: each for each in running.get("listeners") or []}
    return [{**who.get(held["port"], {}), **held} for held in listening.get("held") or []]


def fleet_state(
    measured: Mapping[str, Any], options: Mapping[str, Any], hostvars: Mapping[str, Any]
) -> dict[str, Any]:
    """What a good report holds for: as long as this is the same, there is no need to check again.

    Which packets a host turns away counts where it was asked as root (`__doctor_rules`).
    """
    settings = {"hosts": " ".join(measured)} | {name: str(options[name]) for name in PORTS}
    state: dict[str, Any] = {"settings": settings, "hosts": {}}
    addresses = [of_host["address"] for of_host in measured.values()]
    for host, of_host in measured.items():
        marks = {**of_host["marks"], "interface": of_host["interface"], "address": of_host["address"]}
        rules = hostvars[host].get("__doctor_rules") or {}
        if "rules" in rules:
            # Those about strangers come and go, where fail2ban runs for one.
            ours = [
                each for each in rules["rules"] if any(holds_address(each["source"], a) for a in addresses)
            ]
            listed = json.dumps(ours, sort_keys=True)
            marks["firewall"] = hashlib.sha256(listed.encode()).hexdigest()[:12]
        state["hosts"][host] = marks
    return state


def kept_file(folder: str, hosts: Sequence[str]) -> Path:
    """The controller's file of a fleet's last good report."""
    return Path(folder) / f"{hashlib.sha256(chr(10).join(hosts).encode()).hexdigest()[:12]}.json"


def due(state: Mapping[str, Any], kept: str, when: str) -> str:
    """Why the fleet is to be checked, as a phrase; empty if it need not be.

    state: fleet_state of now. kept: the text of the last good report, empty if there is none.
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
        changed = [name for name in marks if marks[name] != known.get(name)]
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
