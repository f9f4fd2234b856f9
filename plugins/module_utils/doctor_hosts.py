"""Findings of the doctor about single hosts, made from the measurements (see doctor_measured)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, unlike_most
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import doctor_finding as finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_hosts import clock_fix
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import (
    holder,
    unreachable_finding,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_use import other_port
from ansible_collections.nanofleet.fleet.plugins.module_utils.runtime_environments import by_kind

Measured = Mapping[str, Mapping[str, Any]]
SETUP = "ansible-playbook setup.yml"
LOOPBACK = ("127.", "::1")
MIN_INODES = 1000
FIELDS = {
    "torch": "version of torch",
    "trainer": "digest of the training program",
    "environment": "digest of the installed packages",
}
STORE = "the rendezvous store of a run (TCPStore of torchrun)"


def host_findings(
    measured: Measured, hostvars: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Finding]:
    """All findings of the doctor about single hosts: reachability, clock, disks, ports, data, packages.

    measured: host -> its measurements, with the keys that are listed in doctor_measured. hostvars:
    variables by host. options: min_free_gib (GiB), max_skew_s (seconds), trainer (digest of the folder
    trainer/ on the controller).
    """
    found: list[Finding] = []
    for host, of_host in measured.items():
        if not of_host["reachable"]:
            found.append(_unreachable(measured, host, hostvars[host]))
        elif not of_host["facts"]:
            found.append(_unchecked(host, of_host["why"]))
        else:
            for check in (_system, _disks, _store, _data):
                found += check(host, of_host, options)
    return [*found, *_installed(measured, options), *_rehearsal(measured)]


def _unreachable(measured: Measured, host: str, variables: Mapping[str, Any]) -> Finding:
    """Finding about a host that the controller cannot reach.

    The finding also names the peers that reach the host; then only the path from the controller is cut. If
    there is none, it names the peers that do not reach the host; then the host is down.
    """
    found = unreachable_finding(host, variables, measured[host]["why"])
    views = {peer: (of_peer["paths"].get(host) or {}).get("up") for peer, of_peer in measured.items()}
    seeing, blind = ([peer for peer, up in views.items() if up is state] for state in (True, False))
    also = ""
    if seeing:
        also = f" {', '.join(seeing)} can reach it: only the controller's path is cut."
    elif blind:
        also = f" It does not answer {', '.join(blind)} either: it is off, asleep or unplugged."
    return {**found, "problem": found["problem"] + also, "peer": "", "severity": "error"}


def _unchecked(host: str, why: str) -> Finding:
    """Finding about a host that answers, but on which the module doctor_host failed."""
    if any(words in why for words in ("not found", "No such file", "discovered_interpreter")):
        problem = "This host has no python3 that Ansible can use."
        return finding("NF501", host, problem, f"sudo apt install python3  (on {host})")
    reason = (why or "no reason was given")[:200]
    problem = f"The doctor could not check this host: {reason}"
    return finding("NF502", host, problem, "see the whole error: ansible-playbook doctor.yml -vvv")


def _system(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the clock, the name that resolves to loopback, and the load of a host."""
    facts, own = of_host["facts"], of_host["address"]
    skew, allowed = facts["skew_s"], options["max_skew_s"]
    if abs(skew) > allowed:
        side = "ahead of" if skew > 0 else "behind"
        problem = (
            f"The clock of this host is {abs(skew):.0f} s {side} that of the controller (allowed: "
            f"{allowed:g} s), so the logs of the hosts would be shown in the wrong order."
        )
        yield finding("NF503", host, problem, clock_fix(host))
    name, addresses = facts["hostname"], facts["resolves_to"]
    if own and addresses and all(address.startswith(LOOPBACK) for address in addresses):
        problem = (
            f"On this host, its own name {name} resolves to {', '.join(addresses)}. Runs of nanofleet are "
            "not affected, because nanofleet gives the ranks their network interface. A torchrun that you "
            "start by hand would connect to no other host."
        )
        remedy = (
            f"in /etc/hosts, remove {name} from every line that begins with 127. or ::1, and add the line: "
            f"{own} {name}  (on {host})"
        )
        yield finding("NF505", host, problem, remedy, severity="warning")
    load, cores = facts["load"], facts["machine_cores"]
    if load > cores and not of_host["active"]:
        problem = (
            f"Other programs use the processor of this host: the load is {load:g} on {cores} cores. The "
            "measured rates are lower than those of an idle host."
        )
        yield finding(
            "NF508",
            host,
            problem,
            f"end programs that are not needed: sudo kill PID  (on {host}; top lists them with their PID)",
            severity="warning",
        )


def _disks(host: str, of_host: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about file systems that are read-only, or lack space or inodes.

    A file system with several of the folders that nanofleet uses is reported once, with the first of them.
    """
    needed = options["min_free_gib"]
    mounts: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for path, disk in of_host["facts"]["disks"].items():
        mounts.setdefault(disk["mount"], (path, disk))
    for mount, (path, disk) in mounts.items():
        what = f"{mount}, which holds {path}," if mount != path else mount
        if not disk["writable"]:
            problem = f"The disk at {what} is mounted read-only, so a run cannot write there."
            see = f"sudo mount -o remount,rw {mount}  (on {host}); the reason: sudo dmesg | grep -i remount"
            yield finding("NF513", host, problem, see)
        elif disk["free_gib"] < needed:
            problem = (
                f"The disk at {what} has {disk['free_gib']:.1f} GiB free; checkpoints and logs need "
                f"{needed:g} GiB."
            )
            see = (
                f"delete large files; they are listed by: sudo du -xh --max-depth=2 {mount} | sort -h | "
                f"tail  (on {host})"
            )
            yield finding("NF504", host, problem, see)
        elif disk["inodes_free"] is not None and disk["inodes_free"] < MIN_INODES:
            problem = (
                f"The disk at {what} has room for only {disk['inodes_free']} more files: its inodes are "
                "almost used up."
            )
            listed = f"sudo du -x --inodes --max-depth=2 {mount} | sort -n | tail  (on {host})"
            yield finding(
                "NF514", host, problem, f"delete files; the folders with most files are listed by: {listed}"
            )


def _store(host: str, of_host: Mapping[str, Any], _options: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings if the rendezvous store's port cannot be opened, or a process outside of a run holds it."""
    for held in of_host["held"]:
        if held["role"] != "store" or held.get("unit") in of_host["active"]:
            continue
        port = held["port"]
        if held["reason"] != "held":
            problem = (
                f"No process of this host can listen on port {port}, which {STORE} needs: {held['reason']}."
            )
            yield finding("NF506", host, problem, other_port("store"))
            continue
        who, end = holder(held, port)
        first = ""
        if not held.get("pid"):
            who += " (a listener that an interrupted doctor.yml has left ends within 30 s)"
            first = "wait 30 s and repeat the command, or "
        problem = f"Port {port}, which {STORE} needs, is in use by {who}. A run cannot start."
        yield finding("NF507", host, problem, f"{first}{end}  (on {host}); or {other_port('store')}")


def _data(host: str, of_host: Mapping[str, Any], _options: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding if the data of a host differ from the manifest, or could not be compared with it.

    A host without a manifest has no finding: the report lists its data as not measured.
    """
    listed = (of_host["data"] or {}).get("findings") or []
    if listed and "manifest.json is missing" not in listed:
        problem = f"The training data of this host did not pass the check: {'; '.join(listed)}."
        yield finding("NF509", host, problem, SETUP)


def _installed(measured: Measured, options: Mapping[str, Any]) -> list[Finding]:
    """Findings about hosts whose torch, trainer or environment differs from that of most hosts.

    If two hosts differ from each other, the first is taken to be right. If the trainer of every host differs
    from that of the controller, one finding names all hosts, and there is no other.
    """
    found: list[Finding] = []
    installed = {host: each["installed"] for host, each in measured.items() if each["installed"]}
    digest = options["trainer"]
    if installed and digest and all(each.get("trainer") != digest for each in installed.values()):
        problem = (
            "The training program on the hosts differs from the folder trainer/ on the controller, so "
            "train.yml would not start a run."
        )
        found.append(finding("NF510", ", ".join(installed), problem, SETUP))
    for field, title in FIELDS.items():
        reported = {host for each in found for host in each["host"].split(", ")}
        kinds = by_kind({host: each for host, each in installed.items() if host not in reported}, field)
        of_a_kind = "Hosts with the same Python, processor and build of torch"
        alike = "All hosts" if field != "environment" else of_a_kind
        for group in kinds:
            values = {host: value[:12] for host, value in group.items()}
            for host, value, usual in unlike_most(values):
                others = ", ".join(other for other, its in values.items() if its == usual)
                problem = (
                    f"The {title} on this host is {value}, but on {others} it is {usual}. {alike} need the "
                    "same one."
                )
                found.append(finding("NF511", host, problem, SETUP))
    return found


def _rehearsal(measured: Measured) -> Iterator[Finding]:
    """A finding for the first host on which trainer.bench.rehearsal, the test of the all-reduce, failed."""
    rehearsals = {host: each["rehearsal"] for host, each in measured.items() if each["rehearsal"]}
    failed = [(host, each["error"]) for host, each in rehearsals.items() if each.get("error")]
    for host, error in failed[:1]:
        others = ", ".join(peer for peer in rehearsals if peer != host)
        problem = (
            f"A short test of computation{f' and all-reduce with {others}' if others else ''} failed: {error}"
        )
        is_old = "No module named" in error
        journal = (
            "repeat the check: ansible-playbook doctor.yml. If it fails again, look for the cause in the "
            f"warnings of the journal: sudo journalctl -b -p warning -n 30  (on {host})"
        )
        remedy = journal if not is_old else SETUP
        yield finding("NF512", host, problem, remedy)
