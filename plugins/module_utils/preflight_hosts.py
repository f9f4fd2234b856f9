"""Findings about a host itself: SSH, system, disks, root and clock. Parses the facts of all preflight checks.

Facts are the key=value lines that templates/probe.sh.j2 and root.sh.j2 print on a host, as a dict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_inventory import (
    former_reset_command,
    ssh_target,
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
    """The facts in the `key=value` lines of a probe; a line without a value is ignored.

    The facts whose key is in SEVERAL are lists of strings. All others are strings, except the fact disks,
    which is {path: {"free_kb", "mount", "read_only"}}.
    """
    facts: dict[str, Any] = {key: [] for key in SEVERAL} | {"disks": {}}
    for line in text.replace("\r", "").splitlines():
        key, _, value = line.partition("=")
        value = value.strip()
        if key in SEVERAL and value:
            facts[key].append(value)
        elif key == "disk":
            parts = value.split()
            if len(parts) >= 3 and parts[1].isdigit():
                read_only = parts[3:] == ["ro"]
                facts["disks"][parts[0]] = {
                    "free_kb": int(parts[1]), "mount": parts[2], "read_only": read_only,
                }  # fmt: skip
        elif value:
            facts[key] = value
    return facts


def facts_of(hosts: list[str], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{host: its facts}, from the registered results of the probe and of the probe as root.

    hosts: names. hostvars: variables by host, with `__preflight_probe` and `__preflight_root`. A host that
    SSH does not reach has only the fact `unreachable`, the message of SSH. All others also have `becomes`:
    whether plays may become root there. The fact gpu is left out unless the host has the CUDA build of torch.
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
        if hostvars[host].get("runtime_torch", "cpu") != "cuda":  # the CPU build of torch uses no GPU
            found[host].pop("gpu", None)
    return found


def host_findings(hosts: list[str], hostvars: Mapping[str, Any], limits: Mapping[str, Any]) -> list[Finding]:
    """All findings about single hosts, from the results that the role preflight registered on them.

    hosts: names, the coordinator first. hostvars: variables by host. limits: a dict with free_gb (GiB that
    must be free on a disk), skew_s (seconds by which a clock may differ from the controller's), pythons and
    architectures (those that can be used) and addresses ({host: address}).
    """
    findings = []
    for host, facts in facts_of(hosts, hostvars).items():
        if "unreachable" in facts:
            findings.append(unreachable_finding(host, hostvars[host], facts["unreachable"]))
            continue
        if host == hosts[0]:
            findings += former_findings(host, facts, limits.get("addresses") or {})
        if not facts.get("kernel"):
            problem = (
                "SSH connects to this host, but the commands that examine it print nothing: the login shell "
                "of the SSH user does not run them."
            )
            ssh = ssh_target(host, hostvars[host])["ssh"]
            fix = (
                f"type: {ssh} uname  (it prints Linux if commands work); on {host}, at its console or as "
                "another user, correct the login shell of the SSH user (the last field of: getent passwd "
                "USER) and the files that the shell reads, such as .bashrc"
            )
            findings.append(finding("NF115", host, problem, fix))
            continue
        findings += system_findings(host, facts, limits)
        result = hostvars[host].get("__preflight_root") or {}
        findings += root_findings(host, hostvars[host], result, facts, limits["skew_s"])
    return findings


def former_findings(host: str, facts: Facts, addresses: Mapping[str, str]) -> list[Finding]:
    """Warnings about hosts that were in the fleet at the last setup.yml and are not in the inventory now.

    host, facts: the coordinator and its facts, among which is the list of the hosts at the last setup.yml.
    addresses: {host: address} of the hosts in the inventory.
    """
    try:
        claim = json.loads(facts.get("claim", ""))
        before, fleet_id = claim["hosts"], str(claim["fleet_id"])
    except (ValueError, KeyError, TypeError):
        return []
    if not isinstance(before, dict) or host not in before:
        return []
    problem = (
        "This host was in the fleet at the last setup.yml and is no longer in the inventory. nanofleet is "
        "still installed on it, and the systemd unit of a run may restart there."
    )
    return [
        warning(
            "NF019",
            name,
            problem,
            f"uninstall nanofleet there: {former_reset_command(str(address), fleet_id)}  (USER: your login "
            "there)",
        )
        for name, address in before.items()
        if name not in addresses and address not in addresses.values()
    ]


def system_findings(host: str, facts: Facts, limits: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the system, systemd, processor, Python, commands and disks of a host.

    facts: of the host (see the top of this file). limits: as for `host_findings`.
    """
    on, remove = f"(on {host})", f"remove {host} from the inventory"
    upgrade = "Debian 12 or 13 or Ubuntu 24.04"
    if facts.get("kernel") != "Linux" or facts.get("systemd") != "yes":
        problem = f"This host's system ({facts['kernel']}) has no systemd; training runs are systemd units."
        fix = f"{remove}, or install {upgrade} on it"
        if facts["kernel"] == "Linux":
            fix = (
                f"start {host} with systemd (in WSL: write the two lines [boot] and systemd=true to "
                f"/etc/wsl.conf, then type on Windows: wsl --shutdown), or {remove}"
            )
        yield finding("NF103", host, problem, fix)
        return
    system, version = facts.get("distribution") or "unknown system", facts.get("systemd_version", "")
    if version.isdigit() and int(version) < MIN_SYSTEMD:
        problem = (
            f"The systemd {version} of this host ({system}) is too old: nanofleet needs {MIN_SYSTEMD} or "
            "later."
        )
        yield finding("NF104", host, problem, f"upgrade {host} to {upgrade}, or {remove}")
    machine = facts.get("machine")
    if machine not in limits["architectures"]:
        available = " and ".join(limits["architectures"])
        problem = f"The processor of this host is {machine}, and torch is available for {available} only."
        yield finding("NF105", host, problem, remove)
    pythons = list(limits["pythons"])
    versions = " or ".join(pythons)
    if facts.get("python3") != "yes":
        problem = (
            f"This host has no command python3. Ansible and the training program need Python {versions}."
        )
        yield finding("NF106", host, problem, f"sudo apt install python3 python3-venv  {on}")
    elif not set(facts["python"]) & set(pythons):
        has = ", ".join(sorted(set(facts["python"]))) or "none"
        problem = (
            f"The training program needs Python {versions}. On this host ({system}) the Python of the "
            f"setting runtime_python, from which setup.yml makes the environment, is {has}."
        )
        fix = (
            f"upgrade {host} to {upgrade}; or install another Python there and write its path at {host} in "
            f"the inventory, such as runtime_python: /usr/bin/python{pythons[0]}"
        )
        yield finding("NF107", host, problem, fix)
    for command in facts["missing"]:
        package = PACKAGES.get(command, command)
        problem = f"This host has no command {command}, which the playbooks use."
        yield finding("NF108", host, problem, f"sudo apt install {package}  {on}")
    yield from _disk_findings(host, facts, float(limits["free_gb"]))


def _disk_findings(host: str, facts: Facts, free_gb: float) -> Iterator[Finding]:
    # A host that is set up already has its environment; only runs and upgrades still need space.
    needed = min(1.0, free_gb) if facts.get("installed") == "yes" else free_gb
    full: dict[str, list[str]] = {}
    read_only: dict[str, list[str]] = {}
    for path, disk in facts["disks"].items():
        if disk["read_only"]:
            read_only.setdefault(disk["mount"], []).append(path)
        elif disk["free_kb"] < needed * 2**20:
            full.setdefault(disk["mount"], []).append(path)
    for mount, paths in read_only.items():
        folders = "there" if paths == [mount] else f"to {' and '.join(paths)}"
        problem = f"The disk at {mount} is mounted read-only, and nanofleet writes {folders}."
        typed = f"sudo mount -o remount,rw {mount}  (on {host}); the reason: sudo dmesg | grep -i remount"
        yield finding("NF114", host, problem, typed)
    for mount, paths in full.items():
        free = min(facts["disks"][path]["free_kb"] for path in paths) / 2**20
        folders = " and ".join(paths)
        problem = (
            f"The disk at {mount} has {free:.1f} GiB free, and nanofleet needs {needed:g} GiB for {folders}."
        )
        typed = (
            f"delete large files; they are listed by: sudo du -xh --max-depth=2 {mount} | sort -h | tail  "
            f"(on {host})"
        )
        yield finding("NF109", host, problem, typed)


def root_findings(
    host: str, variables: Mapping[str, Any], result: Mapping[str, Any], facts: Facts, skew_s: float
) -> Iterator[Finding]:
    """Findings about sudo and the clock of a host.

    variables: of the host. result: the registered result of the probe as root. facts: of the host (see the
    top of this file). skew_s: seconds by which the host's clock may differ from the controller's.
    """
    if "time" not in facts or (facts.get("uid") != "0" and may_become_root(variables)):
        output = " ".join(str(result.get(key) or "") for key in ("msg", "stderr", "stdout", "module_stdout"))
        user = facts.get("login") or variables.get("ansible_user") or "the SSH user"
        given = [name for name in ("ansible_become_password", "ansible_become_pass") if variables.get(name)]
        if "incorrect" in output.lower():
            fix = (
                f"repeat the command with -K, then type the password of {user} on {host}; if it differs from "
                f"that on the other hosts, set ansible_become_password of {host} in the inventory (encrypt "
                "it: ansible-vault encrypt_string --prompt)"
            )
            if given:  # it is used before -K
                fix = f"correct {given[0]} of {host} in the inventory"
            problem = f"sudo on this host refuses the password that was given for {user}."
            yield finding("NF110", host, problem, fix)
            return
        if refused := re.search(r"[^\n]*(?:sudoers|sudo: (?:command )?not found)[^\n]*", output):
            problem = f"The user {user} cannot use sudo on this host: {refused[0].strip()}"
            fix = (
                f"as root: apt install sudo && adduser {user} sudo  (on {host}), then wait 2 minutes, until "
                "Ansible has closed its SSH connection, and repeat the command with -K; or train without "
                f"sudo: write ansible_become: false at {host} in the inventory (docs/how-to/no-sudo.md)"
            )
            yield finding("NF116", host, problem, fix)
            return
        fix = "repeat the command with -K (--ask-become-pass), then type the password"
        problem = f"sudo on this host asks for the password of {user}, and none was given."
        if not re.search(r"missing sudo password|(?:password|terminal) is required", output.lower()):
            problem = (
                f"sudo on this host does not work for {user}. Usually it asks for a password, and none was "
                "given."
            )
            fix += f"; if that does not help, see the error of sudo: sudo true  (on {host})"
        yield finding("NF111", host, problem, fix)
        return
    skew, allowed = int(facts["time"]) - int(facts["sent"]), float(skew_s)
    if abs(skew) > allowed:
        side = "ahead of" if skew > 0 else "behind"
        problem = (
            f"The clock of this host is {abs(skew)} s {side} that of the controller (allowed: {allowed:g} "
            "s), so the logs of the hosts would be shown in the wrong order."
        )
        yield finding("NF112", host, problem, clock_fix(host))


def clock_fix(host: str) -> str:
    """The fix for a host whose clock differs from that of the controller."""
    return (
        f"sudo timedatectl set-ntp true  (on {host}; if NTP is not supported there: sudo apt install "
        "systemd-timesyncd; if this is reported for all hosts, correct the clock of the controller)"
    )
