"""Findings about a host itself: SSH, system, disks, root and clock. Parses the facts of all preflight checks.

Facts are the key=value lines that templates/probe.sh.j2 and root.sh.j2 print on a host, as a dict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import (
    release,
    unreachable_finding,
)

PACKAGES = {"ip": "iproute2", "sysctl": "procps"}
MIN_SYSTEMD = 247
"""The tracker's unit needs 247 (ProtectProc=, ProcSubset=); units of runs need 245 (ProtectClock=)."""
SEVERAL = ("python", "missing", "busy", "active", "battery", "mains", "port")
"""Keys that may be on several lines: their facts are lists."""
Facts = Mapping[str, Any]


def may_become_root(variables: Mapping[str, Any]) -> bool:
    """Whether plays may become root on a host: False only if its variables set ansible_become: false."""
    return bool(boolean(variables.get("ansible_become", True), strict=False))


def parse_probe(text: str) -> dict[str, Any]:
    """The facts in the `key=value` lines of a probe; a key without a value is left out.

    The keys of SEVERAL are lists of strings; disks is {path: {"free_kb", "mount"}}; all others are strings.
    """
    facts: dict[str, Any] = {key: [] for key in SEVERAL} | {"disks": {}}
    for line in text.replace("\r", "").splitlines():
        key, _, value = line.partition("=")
        value = value.strip()
        if key in SEVERAL and value:
            facts[key].append(value)
        elif key == "disk":
            parts = value.split()
            if len(parts) == 3 and parts[1].isdigit():
                facts["disks"][parts[0]] = {"free_kb": int(parts[1]), "mount": parts[2]}
        elif value:
            facts[key] = value
    return facts


def facts_of(hosts: list[str], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts of each host, from the probe and the probe as root that the tasks registered.

    A host that SSH does not reach has only `unreachable`, the message of SSH. All others also have `becomes`:
    whether plays may become root there.
    """
    found = {}
    for host in hosts:
        probe, root = hostvars[host]["__preflight_probe"], hostvars[host].get("__preflight_root") or {}
        if probe.get("unreachable"):
            found[host] = {"unreachable": str(probe.get("msg", ""))}
            continue
        # The lines of the probe as root come last and so override those of an ordinary user.
        outputs = [str(result.get("stdout") or "") for result in (probe, root)]
        found[host] = parse_probe("\n".join(outputs)) | {"becomes": may_become_root(hostvars[host])}
    return found


def host_findings(hosts: list[str], hostvars: Mapping[str, Any], limits: Mapping[str, Any]) -> list[Finding]:
    """All findings about single hosts, from the results that tasks/hosts.yml registered.

    limits: free_gb, skew_s, pythons, architectures, addresses (by host).
    """
    findings = []
    for host, facts in facts_of(hosts, hostvars).items():
        if "unreachable" in facts:
            findings.append(unreachable_finding(host, hostvars[host], facts["unreachable"]))
            continue
        if host == hosts[0]:
            findings += former_findings(host, facts, limits.get("addresses") or {})
        findings += system_findings(host, facts, limits)
        result = hostvars[host].get("__preflight_root") or {}
        findings += root_findings(host, hostvars[host], result, facts, limits["skew_s"])
    return findings


def former_findings(host: str, facts: Facts, addresses: Mapping[str, str]) -> list[Finding]:
    """Warnings about hosts that were in the fleet at the last setup.yml and are not in the inventory now.

    They are listed in the claim on the coordinator (`host`). addresses: of the hosts in the inventory.
    """
    try:
        before = json.loads(facts.get("claim", ""))["hosts"]
    except (ValueError, KeyError, TypeError):
        return []
    if not isinstance(before, dict) or host not in before:
        return []
    problem = (
        "This host was in the fleet at the last setup.yml and is not in the inventory any more. What was "
        "installed there stays, and the unit of a run may restart, until the host is released."
    )
    return [
        warning("NF019", name, problem, release(str(address), outside=True))
        for name, address in before.items()
        if name not in addresses and address not in addresses.values()
    ]


def system_findings(host: str, facts: Facts, limits: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the system, systemd, processor, Python, commands and disks of a host."""
    on, remove = f"(on {host})", f"remove {host} from the inventory"
    upgrade = "Debian 12+ or Ubuntu 24.04+"
    if facts.get("kernel") != "Linux" or facts.get("systemd") != "yes":
        system = facts.get("kernel") or "an unknown system"
        problem = f"This host's system ({system}) has no systemd; training runs are systemd units."
        yield finding("NF103", host, problem, f"{remove}, or use {upgrade} on it")
        return
    system, version = facts.get("distribution") or "unknown system", facts.get("systemd_version", "")
    if version.isdigit() and int(version) < MIN_SYSTEMD:
        problem = (
            f"This host's systemd {version} ({system}) is too old for the units: {MIN_SYSTEMD} is needed."
        )
        yield finding("NF104", host, problem, f"upgrade it to {upgrade}, or {remove}")
    if facts.get("machine") not in limits["architectures"]:
        available = " and ".join(limits["architectures"])
        problem = f"This host's processor is {facts.get('machine')}; torch is available for {available}."
        yield finding("NF105", host, problem, remove)
    pythons = list(limits["pythons"])
    if facts.get("python3") != "yes":
        problem = f"No python3 is installed; Ansible and the trainer need Python {' or '.join(pythons)}."
        yield finding("NF106", host, problem, f"sudo apt install python3 python3-venv  {on}")
    elif not set(facts["python"]) & set(pythons):
        has = ", ".join(sorted(set(facts["python"]))) or "none"
        problem = f"Python {' or '.join(pythons)} is needed; it has {has} ({system})."
        fix = f"sudo apt install python{pythons[0]}  (on {host}), or upgrade the system of {host}"
        yield finding("NF107", host, problem, fix)
    for command in facts["missing"]:
        fix = f"sudo apt install {PACKAGES.get(command, command)}  {on}"
        yield finding("NF108", host, f"The command {command} is missing.", fix)
    yield from _disk_findings(host, facts, float(limits["free_gb"]))


def _disk_findings(host: str, facts: Facts, free_gb: float) -> Iterator[Finding]:
    # A host that is set up already has its environment; only runs and upgrades still need space.
    needed = min(1.0, free_gb) if facts.get("installed") == "yes" else free_gb
    full: dict[str, list[str]] = {}
    for path, disk in facts["disks"].items():
        if disk["free_kb"] < needed * 2**20:
            full.setdefault(disk["mount"], []).append(path)
    for mount, paths in full.items():
        free = min(facts["disks"][path]["free_kb"] for path in paths) / 2**20
        problem = f"{free:.1f} GiB are free on {mount} for {' and '.join(paths)}; {needed:g} are needed."
        typed = f"free space there: see sudo du -xh --max-depth=2 {mount} | sort -h | tail  (on {host})"
        yield finding("NF109", host, problem, typed)


def root_findings(
    host: str, variables: Mapping[str, Any], result: Mapping[str, Any], facts: Facts, skew_s: float
) -> Iterator[Finding]:
    """Findings about sudo and the clock of a host.

    result: registered result of the probe as root. skew_s: allowed difference to the controller's clock.
    """
    if "time" not in facts or (facts.get("uid") != "0" and may_become_root(variables)):
        output = " ".join(str(result.get(key) or "") for key in ("msg", "stderr", "stdout", "module_stdout"))
        user = variables.get("ansible_user") or "the SSH user"
        if "incorrect" in output.lower():
            yield finding(
                "NF110", host, f"sudo refuses the password of {user}.", "add -K and type the password again"
            )
            return
        fix = "add -K (--ask-become-pass) to the same command"
        yield finding("NF111", host, f"sudo asks for a password of {user}.", fix)
        return
    skew = int(facts["time"]) - int(facts["sent"])
    if abs(skew) > float(skew_s):
        side = "ahead of" if skew > 0 else "behind"
        problem = f"This host's clock is {abs(skew)} s {side} the controller's."
        yield finding("NF112", host, problem, f"sudo timedatectl set-ntp true  (on {host})")
