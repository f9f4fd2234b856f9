"""Decisions of the doctor on the controller: which hosts connect, what is measured, whether a check is due.

Pure functions of the results that tasks registered. The argument `measured` of most functions is a dict
{host: its measurements}. The measurements of a host are a dict with the keys
    reachable, why           whether the host answered; if not, what SSH printed
    facts                    of the module doctor_host; {} if the module could not run (see `why`)
    marks                    of the module doctor_host: values that show whether the host has changed
    problem                  the message of the role network if it could choose no interface, else ""
    address, interface       of the NIC that the role network has chosen
    ports, held              of the module doctor_listener; `held` with pid, user, command and unit if known
    active                   names of the units of active runs
    paths, rates             of the module doctor_peers, by peer
    firewall                 rules of the module firewall_rules; None if they were not read
    installed                versions that the module installed_environment read; None if it read none
    data                     comparison of the data with the manifest; None if it was not made
    rehearsal                of trainer.bench.rehearsal; None if it did not run
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import holds_address

Measured = Mapping[str, Mapping[str, Any]]
PORTS = ("store_port", "port_low", "port_high")
BLOCKED = ("filtered", "refused", "unreachable")
CHANGES = {"boot": "was started", "interface": "has another interface", "address": "has another address"}


def pairs_in_rounds(hosts: Sequence[Any]) -> list[list[list[Any]]]:
    """All pairs of hosts, divided into rounds so that a host is in at most one pair of a round.

    Returns [[[a, b], ...] of a round, ...], computed with the circle method.
    """
    circle: list[Any] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([[a, b] for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [each for each in found if each]


def rate_rounds(hosts: Sequence[str], measured: Measured) -> list[dict[str, str]]:
    """The pairs of hosts between which rates are measured, in rounds: {host that connects: the other host}.

    hosts: names. measured: {host: its measurements} (see the top of this file). In a round each host is in at
    most one pair. The host that connects is one that has reached an open port of the other. A pair is left
    out if neither host has reached an open port of the other, or if large packets between the two are lost.
    """
    rounds = []
    for pairs in pairs_in_rounds(hosts):
        connecting: dict[str, str] = {}
        for a, b in pairs:
            ends = [
                (one, other) for one, other in ((a, b), (b, a)) if "open" in _states(measured, one, other)
            ]
            if ends and not loses_packets(measured, a, b):
                connecting.update(ends[:1])
        rounds.append(connecting)
    return rounds


def peers(
    hosts: Sequence[str], hostvars: Mapping[str, Any], me: str, listening: str = "__doctor_listening"
) -> list[dict[str, Any]]:
    """Value of the option `peers` of the module doctor_peers on the host `me`: a dict for each other host.

    Keys: host, address, ports (open listeners, see peer_listener.open_ports), ssh_port. hosts: names of all
    hosts, of which some may be unreachable. hostvars: variables by host. listening: name of the variable that
    holds the result of doctor_listener.
    """
    found = []
    for host in hosts:
        variables = hostvars[host]
        names = ("network_address", "fleet_address", "ansible_host")
        address = next(filter(None, map(variables.get, names)), host)
        ports = (variables.get(listening) or {}).get("ports") or []
        ssh_port = variables.get("ansible_port") or variables.get("ansible_ssh_port") or 22
        if host != me:
            found.append({"host": host, "address": str(address), "ports": ports, "ssh_port": int(ssh_port)})
    return found


def _states(measured: Measured, host: str, peer: str) -> set[str]:
    """States of the ports of `peer` that `host` probed."""
    path = measured[host]["paths"].get(peer) or {}
    return {port["state"] for port in path.get("ports") or []}


def loses_packets(measured: Measured, a: str, b: str) -> bool:
    """Whether large packets between the hosts a and b are lost without an error, in either direction.

    measured: host -> its measurements (see the top of this file).
    """
    paths = (measured[a]["paths"].get(b) or {}, measured[b]["paths"].get(a) or {})
    return any((path.get("mtu") or {}).get("swallowed") for path in paths)


def blocked_hosts(measured: Measured) -> list[str]:
    """The hosts at both ends of each path with a blocked port or with lost large packets.

    The firewalls of these hosts are then read. measured: host -> its measurements (see the top of this
    file).
    """
    found = set()
    for host, of_host in measured.items():
        for peer, path in of_host["paths"].items():
            lost = (path.get("mtu") or {}).get("swallowed")
            if lost or _states(measured, host, peer) & {*BLOCKED}:
                found |= {host, peer}
    return sorted(found)


def can_rehearse(hosts: Sequence[str], measured: Measured, forks: int) -> dict[str, Any]:
    """The hosts that can test an all-reduce together, and why the others cannot: {"hosts", "why"}.

    hosts: names of all hosts, in rank order; the first one serves the rendezvous store. measured: {host: its
    measurements} (see the top of this file). forks: on how many hosts Ansible runs a task at the same time.
    In the result, `hosts` is [] if fewer than two hosts can test it, or more than `forks` hosts, or if the
    host of the rendezvous store cannot; `why` is a text. A host with a broken path to another host is left
    out, because that path has a finding of its own.
    """
    joined: list[str] = []
    bare: list[str] = []
    why = []
    for host in hosts:
        of_host = measured[host]
        paths = [path for other in joined for path in ((host, other), (other, host))]
        if not of_host["reachable"]:
            why.append(f"{host} does not answer")
        elif not (of_host["installed"] or {}).get("torch"):
            bare.append(host)
        elif any(held["role"] == "store" for held in of_host["held"]):
            why.append(f"the port of the rendezvous store on {host} is in use")
        elif any(_states(measured, a, b) != {"open"} or loses_packets(measured, a, b) for a, b in paths):
            why.append(f"a path to or from {host} is broken")
        else:
            joined.append(host)
    if bare:
        why.append(f"no environment yet on {', '.join(bare)} (ansible-playbook setup.yml)")
    if len(joined) > forks:
        count = len(joined)
        why.append(f"{count} hosts must start together and Ansible runs {forks} at once: add -f {count}")
        joined = []
    # Only the first host of the fleet opens the port of the rendezvous store.
    with_store = bool(joined) and any(port["role"] == "store" for port in measured[joined[0]]["ports"])
    if len(joined) > 1 and not with_store:
        why.append("the host of the rendezvous store (the first host) cannot take part")
    return {"hosts": joined if with_store and len(joined) > 1 else [], "why": "; ".join(why)}


def rehearsal_part(
    hosts: Sequence[str], measured: Measured, me: str, forks: int, port: int, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The argument of trainer.bench.rehearsal on the host `me` (for its keys see `rehearse` there).

    If `me` is not among the hosts that can test an all-reduce together, it is the only host in the argument.
    hosts, measured, forks: as for `can_rehearse`. port: the port of the rendezvous store. config: {setting:
    value} of the run whose step is predicted.
    """
    together = can_rehearse(hosts, measured, forks)["hosts"]
    joined = together if me in together else [me]
    return {
        "hosts": joined,
        "rank": joined.index(me),
        "master": measured[joined[0]]["address"],
        "port": port,
        "rounds": pairs_in_rounds(range(len(joined))),
        "config": dict(config),
    }


def measured(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """The measurements of all hosts, by host (keys: see the top of this file).

    hosts: names. hostvars: variables by host, with the results that the tasks registered.
    """
    return {host: _measured_on(hostvars[host]) for host in hosts}


def _measured_on(variables: Mapping[str, Any]) -> dict[str, Any]:
    def result(name: str) -> Any:
        return variables.get(f"__doctor_{name}") or {}

    host, listening, probed, running = map(result, ("host", "listening", "probed", "held"))
    holders = result("holders")  # read as root, where the store's port is held
    first = [each for each in (running, host) if each]
    lost = next((each for each in (*first, listening, probed) if each.get("unreachable")), None)
    failed = host if "facts" not in host else {}
    return {
        "reachable": bool(first) and lost is None,
        "why": str((lost or failed).get("msg") or failed.get("module_stderr") or "").strip(),
        "facts": _facts(host, variables.get("__doctor_answered")),
        "marks": dict(host.get("marks") or {}),
        "problem": str(variables.get("__doctor_network_problem") or ""),
        "address": variables.get("network_address") or "",
        "interface": variables.get("network_interface") or "",
        "ports": list(listening.get("ports") or []),
        "held": _held(listening, holders if "listeners" in holders else running),
        "active": list(running.get("active_units") or []),
        "paths": dict(probed.get("peers") or {}),
        "rates": dict(result("rates").get("peers") or {}),
        "firewall": result("firewall").get("rules"),
        "installed": result("installed").get("installed") or None,
        "data": variables.get("dataset_comparison"),
        "rehearsal": _rehearsal(result("rehearsed")),
    }


def _rehearsal(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of trainer.bench.rehearsal: the JSON object in the last line that it printed.

    {"error": text} if it failed without a line; None if it did not run. result: the registered result.
    """
    if result.get("stdout"):
        return dict(json.loads(result["stdout"].splitlines()[-1]))
    if not result.get("rc") or "stderr" not in result:
        return None
    return {"error": (result["stderr"].strip().splitlines() or ["it did not end in time"])[-1][:300]}


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


def prediction(measured: Measured) -> dict[str, Any] | None:
    """The predicted step of the run (result of trainer.bench.step_prediction); None if there is none.

    measured: host -> its measurements (see the top of this file).
    """
    found = ((of_host["rehearsal"] or {}).get("predicted") for of_host in measured.values())
    return next(filter(None, found), None)


def why_no_prediction(measured: Measured) -> str:
    """Why no step was predicted although hosts tested an all-reduce together; "" in all other cases.

    measured: {host: its measurements} (see the top of this file).
    """
    for host, of_host in measured.items():
        rehearsal = of_host["rehearsal"] or {}
        first = (rehearsal.get("hosts") or [""])[0]
        if first == host and rehearsal.get("allreduce_mbit") and not rehearsal.get("predicted", True):
            return str(rehearsal.get("prediction_error") or f"{host} did not end in time")
    return ""


def fleet_state(
    measured: Measured, options: Mapping[str, Any], hostvars: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of the fleet on which a report of the doctor depends.

    While the result is unchanged, no new check is due.
    measured: {host: its measurements} (see the top of this file). options: the ports of a run: store_port,
    port_low, port_high. hostvars: variables by host. Returns {"settings": ports and order of the hosts,
    "hosts": {host: its marks}}. The marks of a host include its interface, its address and a digest of its
    firewall rules, if these were read.
    """
    settings = {"hosts": " ".join(measured)} | {name: str(options[name]) for name in PORTS}
    state: dict[str, Any] = {"settings": settings, "hosts": {}}
    addresses = [of_host["address"] for of_host in measured.values()]
    for host, of_host in measured.items():
        marks = {**of_host["marks"], "interface": of_host["interface"], "address": of_host["address"]}
        # The quick form of the check reads the firewall rules with the facts of the host.
        named = (hostvars[host].get(name) or {} for name in ("__doctor_rules", "__doctor_host"))
        rules = next((each for each in named if each.get("rules") is not None), None)
        if rules is not None:
            # Rules about other addresses change often, for example where fail2ban runs.
            ours = [
                each for each in rules["rules"] if any(holds_address(each["source"], a) for a in addresses)
            ]
            listed = json.dumps(ours, sort_keys=True)
            marks["firewall"] = hashlib.sha256(listed.encode()).hexdigest()[:12]
        state["hosts"][host] = marks
    return state


def kept_file(folder: str, hosts: Sequence[str]) -> Path:
    """The path of the file that keeps the last report without a fault: FOLDER/HASH.json.

    The file is on the controller. HASH depends on the names of the hosts.
    """
    return Path(folder) / f"{hashlib.sha256(chr(10).join(hosts).encode()).hexdigest()[:12]}.json"


def due(state: Mapping[str, Any], kept: str, when: str) -> str:
    """Why the doctor has to check the fleet before a run, as a phrase; "" if it need not.

    state: the present result of `fleet_state`. kept: the text of the last report without a fault, "" if
    there is none. when: the value of the setting `doctor`: auto, always or never.
    """
    if when != "auto":
        return "doctor=always" if when == "always" else ""
    try:
        before = json.loads(kept)["state"]
    except (ValueError, KeyError, TypeError):
        return "the doctor has not yet checked this fleet without finding a fault"
    if before["settings"] != state["settings"]:
        return "the ports or the order of the hosts have changed since the last check without a fault"
    for host, marks in state["hosts"].items():
        known = before["hosts"].get(host) or {}
        changed = [
            name
            for name, mark in marks.items()
            if mark != known.get(name) and "unreadable" not in (mark, known.get(name))
        ]
        if changed == ["firewall"] and "firewall" not in known:
            return f"the last check without a fault did not read the firewall of {host}"
        if changed:
            change = CHANGES.get(changed[0], f"has another {changed[0]}")
            return f"{host} {change} since the last check without a fault"
    return ""
