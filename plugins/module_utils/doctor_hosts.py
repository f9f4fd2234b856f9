"""Findings of the doctor about single hosts, made from the measurements (see doctor_measured)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, unlike_most
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import doctor_finding as finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import (
    holder,
    unreachable_finding,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_installed import by_kind

Measured = Mapping[str, Mapping[str, Any]]
SETUP = "ansible-playbook setup.yml"
LOOPBACK = ("127.", "::1")
MIN_INODES = 1000


def host_findings(
    measured: Measured, hostvars: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Finding]:
    """All findings about single hosts.

    options: min_free_gib, max_skew_s (seconds), trainer (digest of the trainer in this folder).
    """
    found: list[Finding] = []
    for host, of_host in measured.items():
        if not of_host["reachable"]:
            found.append(_unreachable(measured, host, hostvars[host]))
        elif not of_host["facts"]:
            found.append(_cannot_look(host, of_host["why"]))
        else:
            found += [*_clock(host, of_host, options), *_disks(host, of_host, options), *_name(host, of_host)]
            found += [*_store(host, of_host), *_load(host, of_host)]
    return [*found, *_data(measured, options), *_installed(measured, options), *_rehearsal(measured)]


def _unreachable(measured: Measured, host: str, variables: Mapping[str, Any]) -> Finding:
    """Finding about a host that the controller cannot reach.

    It names the peers that reach the host (only the controller's path is cut) or that do not (it is down).
    """
    found = unreachable_finding(host, variables, measured[host]["why"])
    views = {peer: (of_peer["paths"].get(host) or {}).get("up") for peer, of_peer in measured.items()}
    seen = [peer for peer, up in views.items() if up]
    blind = [peer for peer, up in views.items() if up is False]
    also = f" {', '.join(seen)} can see it: only the controller's path is cut." if seen else ""
    also = also or (
        f" Nor does it answer {', '.join(blind)}: it is off, asleep or unplugged." if blind else ""
    )
    return {**found, "problem": found["problem"] + also, "peer": "", "severity": "error"}


def _cannot_look(host: str, why: str) -> Finding:
    if "not found" in why or "No such file" in why or "discovered_interpreter" in why:
        return finding(
            "NF501",
            host,
            "It has no python3 that Ansible can use.",
            f"sudo apt install python3  (on {host})",
        )
    return finding(
        "NF502",
        host,
        f"It could not be checked: {(why or 'no reason was given')[:200]}",
        f"ansible {host} -m ping",
    )


def _clock(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    skew, allowed = of_host["facts"]["skew_s"], options["max_skew_s"]
    if abs(skew) > allowed:
        side = "ahead of" if skew > 0 else "behind"
        problem = f"Its clock is {abs(skew):.0f} s {side} the controller's (allowed: {allowed:g})."
        yield finding("NF503", host, problem, f"sudo timedatectl set-ntp true  (on {host})")


def _disks(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    reported = set()
    for path, disk in of_host["facts"]["disks"].items():
        mount, needed = disk["mount"], options["min_free_gib"]
        what = f"{mount}, which holds {path}," if mount != path else mount
        if mount in reported:
            continue
        reported.add(mount)
        if not disk["writable"]:
            problem, see = f"{what} can only be read.", f"sudo dmesg | grep -i remount  (on {host})"
            yield finding("NF513", host, problem, see)
        elif disk["free_gib"] < needed:
            problem = f"{what} has {disk['free_gib']:.1f} GiB free; checkpoints and logs need {needed:g}."
            see = f"sudo du -xh --max-depth=2 {mount} | sort -h | tail  (on {host})"
            yield finding("NF504", host, problem, see)
        elif disk["inodes_free"] is not None and disk["inodes_free"] < MIN_INODES:
            problem = f"{what} has room for {disk['inodes_free']} more files: its inodes are used up."
            see = f"sudo du -x --inodes --max-depth=2 {mount} | sort -n | tail  (on {host})"
            yield finding("NF514", host, problem, see)


def _name(host: str, of_host: Mapping[str, Any]) -> Iterator[Finding]:
    name, addresses = of_host["facts"]["hostname"], of_host["facts"]["resolves_to"]
    own = of_host["address"]
    if own and addresses and all(address.startswith(LOOPBACK) for address in addresses):
        yield finding(
            "NF505", host,
            f"Its own name {name} resolves to {', '.join(addresses)}. nanofleet's runs get the "
            "interface and are not affected; a torchrun started by hand would find no peer.",
            f"sudo sed -i -E '/^127\\.0\\.1\\.1/s/.*/{own} {name}/' /etc/hosts  (on {host})",
            severity="warning",
        )  # fmt: skip


def _store(host: str, of_host: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings if the rendezvous store's port cannot be opened, or a process outside of a run holds it."""
    for held in of_host["held"]:
        if held["role"] != "store" or held.get("unit") in of_host["active"]:
            continue
        port = held["port"]
        if held["reason"] != "held":
            problem = f"The rendezvous store's port {port} cannot be opened: {held['reason']}."
            yield finding("NF506", host, problem, "add -e store_port=PORT to take another port")
            continue
        who, end = holder(held, port)
        if not held.get("pid"):
            who += " (an interrupted doctor's listener would be gone in 30 s)"
        problem = f"The rendezvous store's port {port} is held by {who}. A run cannot start."
        yield finding("NF507", host, problem, f"{end}  (on {host}; or take another port: -e store_port=PORT)")


def _load(host: str, of_host: Mapping[str, Any]) -> Iterator[Finding]:
    load, cores = of_host["facts"]["load"], of_host["facts"]["machine_cores"]
    if load > cores and not of_host["active"]:
        problem = f"Other work keeps it busy, a load of {load:g} on {cores} cores: rates are low for it."
        yield finding("NF508", host, problem, f"top  (on {host})", severity="warning")


def _data(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about hosts whose shards differ from the manifest.

    A host without a manifest has no finding: the report lists its data as not measured.
    """
    found = []
    for host, of_host in measured.items():
        listed = (of_host["data"] or {}).get("findings") or []
        if not listed or "manifest.json is missing" in listed:
            continue
        problem = f"Its data are not the controller's: {'; '.join(listed)}."
        found.append(finding("NF509", host, problem, SETUP))
    return found


def _installed(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about hosts whose torch, trainer or environment differs from that of most hosts.

    If two hosts differ from each other, the first is taken to be right.
    """
    found: list[Finding] = []
    installed = {host: each["installed"] for host, each in measured.items() if each["installed"]}
    digest = options["trainer"]
    if installed and digest and all(each.get("trainer") != digest for each in installed.values()):
        problem = "The hosts hold another trainer than this folder: train.yml would refuse."
        found.append(finding("NF510", ", ".join(installed), problem, SETUP))
    for field in ("torch", "trainer", "environment"):
        odd = {each["host"] for each in found}
        for group in by_kind({host: each for host, each in installed.items() if host not in odd}, field):
            values = {host: value[:12] for host, value in group.items()}
            for host, value, usual in unlike_most(values):
                others = ", ".join(other for other, its in values.items() if its == usual)
                problem = f"It has {field} {value}, but {others} {usual}: their ranks must not differ."
                found.append(finding("NF511", host, problem, SETUP))
    return found


def _rehearsal(measured: Measured) -> list[Finding]:
    """A finding if the rehearsed all-reduce failed. Only hosts whose ports are all open take part in it."""
    rehearsals = {host: each["rehearsal"] for host, each in measured.items() if each["rehearsal"]}
    failed = {host: each["error"] for host, each in rehearsals.items() if each.get("error")}
    if not failed:
        return []
    host, error = next(iter(failed.items()))
    others = ", ".join(peer for peer in rehearsals if peer != host)
    problem = f"The rehearsed all-reduce{f' with {others}' if others else ''} failed: {error}"
    return [finding("NF512", host, problem, f"sudo journalctl -b -p warning -n 30  (on {host})")]
