"""Findings about an inventory and its hosts, and the table that shows them.

A finding is {"host", "problem", "remedy"}: where, one sentence, and what to type next.
"""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean

REPOSITORY = Path(__file__).resolve().parents[3]
SAMPLE = (
    "cp -r inventory/sample inventory/mine  (put your hosts in, then add -i inventory/mine to the command); "
    "or, for two hosts on this machine: ansible-playbook lab.yml"
)
PACKAGES = {"ip": "iproute2", "sysctl": "procps"}
# What ssh says -> (what it means, what to type). The first match counts.
SSH_ERRORS = (
    (
        "host key verification failed",
        "its host key is not known here or has changed",
        "{ssh}  (compare the key)",
    ),
    ("permission denied", "it refuses this user or key", "ssh-copy-id{port} {target}"),
    (
        "could not resolve hostname",
        "its name does not resolve on this machine",
        "set its ansible_host to an address",
    ),
    (
        "connection refused",
        "it is up, but no SSH server answers",
        "sudo apt install openssh-server  (on {host})",
    ),
    ("no route to host", "it is down or on another network", "{ssh}"),
    ("network is unreachable", "this machine has no route to it", "{ssh}"),
    ("timed out", "it is down, asleep or behind a firewall", "{ssh}"),
)


def finding(host: str, problem: str, remedy: str) -> dict[str, str]:
    return {"host": host, "problem": problem, "remedy": remedy}


def table(findings: list[Mapping[str, str]]) -> str:
    """All findings as aligned lines, each followed by what to type next."""
    width = max((len(f["host"]) for f in findings), default=0)
    count = len(findings)
    lines = [f"{count} finding{'' if count == 1 else 's'}; nothing was changed."]
    for f in findings:
        lines.append(f"{f['host']:<{width}}  {f['problem']}")
        lines.append(f"{'':<{width}}  Type: {f['remedy']}")
    return "\n".join(lines)


def is_resolvable(address: str) -> bool:
    try:
        return bool(socket.getaddrinfo(address, None, proto=socket.IPPROTO_TCP))
    except OSError:
        return False


def inventory_findings(
    addresses: Mapping[str, str], coordinators: list[str], workers: list[str]
) -> list[dict[str, str]]:
    """A fleet has exactly one coordinator, no host twice, and an address for each."""
    hosts = [*coordinators, *workers]
    if not hosts:
        return [finding("inventory", "It lists no host in the groups coordinator and workers.", SAMPLE)]
    findings = []
    if len(coordinators) != 1:
        listed = ", ".join(coordinators) or "none"
        problem = f"The group coordinator must hold exactly one host; it holds {listed}."
        example = coordinators[0] if coordinators else hosts[0]
        findings.append(
            finding(
                "inventory",
                problem,
                f"keep {example} in coordinator, the others in workers (inventory/sample)",
            )
        )
    for host, times in Counter(hosts).items():
        if times > 1:
            findings.append(
                finding(
                    host, "It is listed both as coordinator and as worker.", f"remove {host} from one group"
                )
            )
    owners: dict[str, str] = {}
    for host, address in addresses.items():
        if address in owners:
            problem = f"It has the same address as {owners[address]}, {address}."
            findings.append(finding(host, problem, f"give {host} an ansible_host of its own, or remove it"))
        elif not is_resolvable(address):
            problem = f"Its address {address} does not resolve on this machine."
            findings.append(
                finding(host, problem, f"set ansible_host of {host} to its IP address in the inventory")
            )
        owners.setdefault(address, host)
    return findings


def ssh_target(host: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """What a person types to reach the host the way Ansible does."""
    address = str(variables.get("ansible_host") or host)
    user = variables.get("ansible_user") or variables.get("ansible_ssh_user")
    port = variables.get("ansible_port") or variables.get("ansible_ssh_port")
    key = variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file")
    target = f"{user}@{address}" if user else address
    ssh = "ssh" + (f" -p {port}" if port else "") + (f" -i {key}" if key else "") + f" {target}"
    return {"host": host, "ssh": ssh, "port": f" -p {port}" if port else "", "target": target}


def unreachable_finding(host: str, variables: Mapping[str, Any], message: str) -> dict[str, str]:
    words = ssh_target(host, variables)
    for pattern, meaning, remedy in SSH_ERRORS:
        if pattern in message.lower():
            problem = f"Cannot be reached at {words['target']}: {meaning}."
            return finding(host, problem, remedy.format(**words))
    detail = message.strip().splitlines()[-1] if message.strip() else "no reason given"
    return finding(host, f"Cannot be reached at {words['target']}: {detail}", words["ssh"])


def parse_probe(text: str) -> dict[str, Any]:
    """The `key=value` lines of templates/probe.sh.j2; some come more than once."""
    facts: dict[str, Any] = {"pythons": [], "missing": [], "disks": {}}
    for line in text.replace("\r", "").splitlines():
        key, separator, value = line.partition("=")
        if not separator:
            continue
        if key == "python":
            facts["pythons"].append(value)
        elif key == "missing":
            facts["missing"].append(value)
        elif key == "disk":
            words = value.split()
            if len(words) == 3 and words[1].isdigit():
                facts["disks"][words[0]] = {"free_kb": int(words[1]), "mount": words[2]}
        else:
            facts[key] = value.strip()
    return facts


def fixed_memory_gb(values: Mapping[str, Any], vocabulary: int = 32768) -> float:
    """GiB that weights, gradients and two optimizer moments take in float32, whatever the batch."""
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    from trainer.config import RunConfig

    config = RunConfig.from_strings(values)
    width = config.n_embd
    kv_width = (config.n_kv_head or config.n_head) * config.head_dim
    tables = 2 * vocabulary * width + (config.depth + 1) // 2 * vocabulary * kv_width
    blocks = config.depth * (2 * width * width + 2 * width * kv_width + 8 * width * width)
    return (tables + blocks) * 16 / 2**30


def system_findings(host: str, facts: Mapping[str, Any], limits: Mapping[str, Any]) -> list[dict[str, str]]:
    """What is wrong with one reachable host, from its probe."""
    findings = []
    pythons, architectures = list(limits["pythons"]), list(limits["architectures"])
    if facts.get("kernel") != "Linux" or facts.get("systemd") != "yes":
        problem = (
            f"It runs {facts.get('kernel') or 'an unknown system'} without systemd; runs are systemd units."
        )
        return [
            finding(
                host, problem, f"remove {host} from the inventory, or use Debian 12+ or Ubuntu 24.04+ on it"
            )
        ]
    if facts.get("machine") not in architectures:
        problem = (
            f"Its processor is {facts.get('machine')}; torch is at hand for {' and '.join(architectures)}."
        )
        findings.append(finding(host, problem, f"remove {host} from the inventory"))
    range_ = " or ".join(pythons)
    if facts.get("python3") != "yes":
        problem = f"No python3 is installed; Ansible and the trainer need Python {range_}."
        findings.append(finding(host, problem, f"sudo apt install python3 python3-venv  (on {host})"))
    elif not set(facts["pythons"]) & set(pythons):
        found = ", ".join(sorted(set(facts["pythons"]))) or "none"
        problem = (
            f"Python {range_} is needed; it has {found} ({facts.get('distribution') or 'unknown system'})."
        )
        findings.append(
            finding(host, problem, f"sudo apt install python{pythons[0]}  (on {host}), or upgrade it")
        )
    for command in facts["missing"]:
        package = PACKAGES.get(command, command)
        findings.append(
            finding(host, f"The command {command} is missing.", f"sudo apt install {package}  (on {host})")
        )
    # A host that is set up has its environment already; what is left to grow are runs and the odd upgrade.
    needed_gb = min(1.0, limits["free_gb"]) if facts.get("installed") == "yes" else limits["free_gb"]
    full: dict[str, list[str]] = {}
    for path, disk in facts["disks"].items():
        if disk["free_kb"] < float(needed_gb) * 2**20:
            full.setdefault(disk["mount"], []).append(path)
    for mount, paths in full.items():
        free = min(facts["disks"][path]["free_kb"] for path in paths) / 2**20
        problem = f"{free:.1f} GiB are free on {mount} for {' and '.join(paths)}; {needed_gb:g} are needed."
        findings.append(
            finding(host, problem, f"sudo du -xh --max-depth=2 {mount} | sort -h | tail  (on {host})")
        )
    memory = str(facts.get("memory_kb", ""))
    if limits.get("config") and memory.isdigit():
        needed, has = fixed_memory_gb(limits["config"]) + 0.5, int(memory) / 2**20
        if needed > has:
            depth = limits["config"].get("depth", 8)
            problem = f"Depth {depth} needs at least {needed:.1f} GiB of memory; it has {has:.1f} GiB."
            findings.append(
                finding(host, problem, f"ansible-playbook train.yml -e depth={max(1, int(depth) // 2)}")
            )
    return findings


def may_become_root(variables: Mapping[str, Any]) -> bool:
    """Whether plays may become root there; ansible_become: false in the inventory says that nobody may."""
    return bool(boolean(variables.get("ansible_become", True), strict=False))


def root_findings(
    host: str, variables: Mapping[str, Any], result: Mapping[str, Any], skew_s: float
) -> list[dict[str, str]]:
    """Whether sudo works without asking, and whether the clocks agree."""
    words = dict(pair.split("=", 1) for pair in str(result.get("stdout", "")).split() if "=" in pair)
    if "time" not in words or (words.get("uid") != "0" and may_become_root(variables)):
        said = " ".join(str(result.get(key) or "") for key in ("msg", "stderr", "stdout", "module_stdout"))
        user = variables.get("ansible_user") or "the SSH user"
        if "incorrect" in said.lower():
            return [
                finding(host, f"sudo refuses the password of {user}.", "add -K and type the password again")
            ]
        return [
            finding(
                host, f"sudo asks for a password of {user}.", "add -K (--ask-become-pass) to the same command"
            )
        ]
    skew = int(words["time"]) - int(words["sent"])
    if abs(skew) > float(skew_s):
        way = "ahead of" if skew > 0 else "behind"
        problem = f"Its clock is {abs(skew)} s {way} the controller's."
        return [finding(host, problem, f"sudo timedatectl set-ntp true  (on {host})")]
    return []


def host_findings(
    hosts: list[str], hostvars: Mapping[str, Any], limits: Mapping[str, Any]
) -> list[dict[str, str]]:
    """All findings of all `hosts` from the results that tasks/hosts.yml registered."""
    findings = []
    for host in hosts:
        variables = hostvars[host]
        probe = variables["__preflight_probe"]
        if probe.get("unreachable"):
            findings.append(unreachable_finding(host, variables, str(probe.get("msg", ""))))
            continue
        facts = parse_probe(str(probe.get("stdout", "")))
        findings += system_findings(host, facts, limits)
        findings += root_findings(host, variables, variables.get("__preflight_root", {}), limits["skew_s"])
    return findings


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {
            "preflight_table": table,
            "preflight_inventory_findings": inventory_findings,
            "preflight_host_findings": host_findings,
        }
