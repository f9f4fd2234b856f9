"""What is wrong on a host by itself: findings from what was measured (see doctor.py), each with its remedy.

A finding has the fields of doctor_ways.py's.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROLES = Path(__file__).resolve().parents[2]
Measured = Mapping[str, Mapping[str, Any]]
Finding = dict[str, str]
SETUP = "ansible-playbook setup.yml"
LOOPBACK = ("127.", "::1")


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


def host_findings(
    measured: Measured, hostvars: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Finding]:
    """All findings about hosts by themselves.

    options: min_free_gib, max_skew_s, store_port, manifest_sha256 (the controller's, empty for none), trainer (its
    digest), rehearsal_why.
    """
    found: list[Finding] = []
    for host, of_host in measured.items():
        if not of_host["reachable"]:
            found.append(_unreachable(measured, host, hostvars[host]))
        elif not of_host["facts"]:
            found.append(_cannot_look(host, of_host["why"]))
        else:
            found += [*_clock(host, of_host, options), *_disks(host, of_host, options), *_name(host, of_host)]
            found += [*_store(host, of_host, options), *_load(host, of_host)]
    return [*found, *_data(measured, options), *_installed(measured, options), *_rehearsal(measured)]


def _preflight() -> Any:
    """The role preflight has the sentences about a host that SSH does not reach."""
    spec = importlib.util.spec_from_file_location(
        "nanofleet_preflight", ROLES / "preflight" / "filter_plugins" / "preflight.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _unreachable(measured: Measured, host: str, variables: Mapping[str, Any]) -> Finding:
    """With what the others see of it: whether it is down, or only the controller's way to it."""
    told = _preflight().unreachable_finding(host, variables, measured[host]["why"])
    views = {peer: (of_peer["ways"].get(host) or {}).get("up") for peer, of_peer in measured.items()}
    seen = [peer for peer, up in views.items() if up]
    blind = [peer for peer, up in views.items() if up is False]
    also = f" {', '.join(seen)} can see it: only the controller's way is cut." if seen else ""
    also = also or (
        f" Nor does it answer {', '.join(blind)}: it is off, asleep or unplugged." if blind else ""
    )
    return finding("unreachable", host, told["problem"] + also, told["remedy"])


def _cannot_look(host: str, why: str) -> Finding:
    if "not found" in why or "No such file" in why or "discovered_interpreter" in why:
        return finding(
            "python",
            host,
            "It has no python3 that Ansible can use.",
            f"sudo apt install python3  (on {host})",
        )
    return finding(
        "look",
        host,
        f"It could not be looked at: {(why or 'no reason was given')[:200]}",
        f"ansible {host} -m ping",
    )


def _clock(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    skew = of_host["facts"]["skew_s"]
    if abs(skew) > options["max_skew_s"]:
        way = "ahead of" if skew > 0 else "behind"
        yield finding(
            "clock", host, f"Its clock is {abs(skew):.0f} s {way} the controller's (allowed: {options['max_skew_s']:g}).",
            f"sudo timedatectl set-ntp true  (on {host})",
        )  # fmt: skip


def _disks(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    told = set()
    for path, disk in of_host["facts"]["disks"].items():
        if disk["mount"] in told:
            continue
        see = f"sudo du -xh --max-depth=2 {disk['mount']} | sort -h | tail  (on {host})"
        what = ""
        if not disk["writable"]:
            what, see = (
                f"{disk['mount']}, which holds {path}, can only be read.",
                f"sudo dmesg | grep -i remount  (on {host})",
            )
        elif disk["free_gib"] < options["min_free_gib"]:
            what = (
                f"{disk['free_gib']:.1f} GiB are free on {disk['mount']}, which holds {path}; {options['min_free_gib']:g} are "
                "needed for checkpoints and logs."
            )
        elif disk["inodes_free"] is not None and disk["inodes_free"] < 1000:
            what = f"No more files can be made on {disk['mount']}, which holds {path}: {disk['inodes_free']} inodes are free."
        if what:
            told.add(disk["mount"])
            yield finding("disk", host, what, see)


def _name(host: str, of_host: Mapping[str, Any]) -> Iterator[Finding]:
    facts = of_host["facts"]
    addresses = facts["resolves_to"]
    if addresses and all(address.startswith(LOOPBACK) for address in addresses) and of_host["address"]:
        name = facts["hostname"]
        yield finding(
            "loopback-name", host,
            f"Its name {name} resolves to {', '.join(addresses)}. nanofleet tells Gloo the interface, so its runs are not "
            "affected; a torchrun started by hand would meet nobody.",
            f"sudo sed -i -E '/^127\\.0\\.1\\.1/s/.*/{of_host['address']} {name}/' /etc/hosts  (on {host})",
            severity="warning",
        )  # fmt: skip


def _store(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    """The rendezvous port in other hands than a run's."""
    for held in of_host["held"]:
        if held["role"] != "store" or held.get("unit") in of_host["active"]:
            continue
        port = held["port"]
        if held["reason"] != "held":
            yield finding(
                "store-port",
                host,
                f"The store's port {port} cannot be opened: {held['reason']}.",
                "another one: -e store_port=PORT",
            )
            continue
        who, end = (
            "a process that only root can name, or by a doctor that was interrupted and ends within 30 s",
            f"ss -Hltnp sport = :{port}  (on {host}, as root; or -e store_port=PORT)",
        )
        if held.get("pid"):
            unit = f", unit {held['unit']}" if held.get("unit") else ""
            who = f"process {held['pid']} of {held['user']} ({held['command']}){unit}"
            end = f"sudo systemctl stop {held['unit']}" if held.get("unit") else f"sudo kill {held['pid']}"
            end += f"  (on {host}; or take another port: -e store_port=PORT)"
        yield finding(
            "held-port", host, f"The store's port {port} is held by {who}: no run can meet there.", end
        )


def _load(host: str, of_host: Mapping[str, Any]) -> Iterator[Finding]:
    facts = of_host["facts"]
    if facts["load"] > facts["machine_cores"] and not of_host["active"]:
        yield finding(
            "load", host,
            f"Other work keeps it busy: a load of {facts['load']:g} on {facts['machine_cores']} cores. Rates may be low for it.",
            f"top  (on {host})", severity="warning",
        )  # fmt: skip


def _data(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    found = []
    for host, of_host in measured.items():
        said = (of_host["data"] or {}).get("findings") or []
        if not said or "manifest.json is missing" in said:
            continue
        files = [
            each.split()[0] for each in said if " is missing" not in each and "manifest.json" not in each
        ]
        where = options["data_dir"]
        remove = " ".join(f"{where}/{name if '/' in name else 'shards/' + name}" for name in files)
        first = f"sudo rm {remove}  (on {host}), then " if files else ""
        found.append(
            finding("data", host, f"Its data are not the controller's: {'; '.join(said)}.", f"{first}{SETUP}")
        )
    return found


def _installed(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Hosts whose environment is not that of most; where two disagree, the first host is taken to be right."""
    found = []
    installed = {host: each["installed"] for host, each in measured.items() if each["installed"]}
    kinds = {
        host: (each.get("python", ""), measured[host]["facts"].get("machine"))
        for host, each in installed.items()
    }
    told: set[str] = set()
    for field, words in (
        ("torch", "torch"),
        ("trainer", "trainer of digest"),
        ("environment", "environment"),
    ):
        groups = (
            {host: kinds[host] for host in installed}
            if field == "environment"
            else dict.fromkeys(installed, ("", ""))
        )
        for kind in dict.fromkeys(groups.values()):
            values = {
                host: str(installed[host].get(field)).split("+")[0] for host in groups if groups[host] == kind
            }
            usual = _usual(list(values.values()))
            others = [host for host, value in values.items() if value == usual]
            for host, value in values.items():
                if value != usual and host not in told:
                    told.add(host)
                    found.append(
                        finding("versions", host, f"It has {words} {value[:12]}, {', '.join(others)} {usual[:12]}: ranks would not meet, or differ.", SETUP)
                    )  # fmt: skip
    stale = [
        host
        for host, each in installed.items()
        if options["trainer"] and each.get("trainer") != options["trainer"]
    ]
    if stale and len(stale) == len(installed):
        found.append(
            finding("versions", ", ".join(stale), "The hosts hold another trainer than this folder: train.yml would refuse.", SETUP)
        )  # fmt: skip
    return found


def _usual(values: Sequence[str]) -> str:
    """The most frequent; of equally frequent ones the first."""
    return Counter(values).most_common(1)[0][0]


def _rehearsal(measured: Measured) -> list[Finding]:
    """An all-reduce that failed though every port was open."""
    said = {
        host: each["rehearsal"]["error"]
        for host, each in measured.items()
        if (each["rehearsal"] or {}).get("error")
    }
    if not said:
        return []
    host, error = next(iter(said.items()))
    others = [peer for peer in measured if peer != host and measured[peer]["rehearsal"]]
    return [
        finding(
            "all-reduce", host, f"The rehearsed all-reduce with {', '.join(others) or 'itself'} failed: {error}",
            "ansible-playbook doctor.yml -v  (again; each host's own words are shown)",
        )
    ]  # fmt: skip


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"doctor_host_findings": host_findings}
