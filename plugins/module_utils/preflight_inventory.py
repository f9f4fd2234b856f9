"""Findings about an inventory; also how messages name a host, its SSH login and the holder of a port.

Findings about hosts are in preflight_hosts, preflight_run and preflight_use.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import resolved

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
SAMPLE = (
    "cp -r inventory/sample inventory/mine  (put your hosts in, then add -i inventory/mine to the command); "
    "or, for two hosts on this machine: ansible-playbook lab.yml"
)
# Part of the message of ssh -> what it means, and the fix. The first match counts.
SSH_ERRORS = {
    "host key verification failed": (
        "its host key is not known here or has changed",
        "{ssh}  (compare the key)",
    ),
    "permission denied": ("it refuses this user or key", "ssh-copy-id{options} {target}"),
    "could not resolve hostname": (
        "its name does not resolve on this machine",
        "set its ansible_host to an address",
    ),
    "connection refused": (
        "it runs, but no SSH server answers",
        "sudo apt install openssh-server  (on {host})",
    ),
    "no route to host": ("it is down or on another network", "{ssh}"),
    "network is unreachable": ("this machine has no route to it", "{ssh}"),
    "timed out": ("it is down, asleep or behind a firewall", "{ssh}"),
}


def inventory_findings(
    addresses: Mapping[str, str], coordinators: list[str], workers: list[str], members: list[str]
) -> Iterator[Finding]:
    """Findings about groups, names and addresses of the inventory.

    A fleet has one coordinator, each host once, and an address for each that resolves. addresses: by host.
    members: hosts of the group fleet, which the plays run on; it must hold the coordinator and the workers.
    """
    hosts = [*coordinators, *workers]
    if not hosts:
        problem = "The inventory lists no host in the groups coordinator and workers."
        yield finding("NF010", "inventory", problem, SAMPLE)
        return
    for host in hosts:
        if not HOST_NAME.fullmatch(host):
            takes = "letters, digits, dots, dashes, underscores and colons, and starts with a letter or digit"
            problem = f"The host name {host!r} cannot be used: a name has {takes}."
            yield finding("NF015", "inventory", problem, "rename it there")
    yield from _member_findings(hosts, members)
    if len(coordinators) != 1:
        listed = ", ".join(coordinators) or "none"
        problem = f"The group coordinator must hold exactly one host; it holds {listed}."
        fix = f"keep {[*coordinators, *hosts][0]} in coordinator, the others in workers (inventory/sample)"
        yield finding("NF011", "inventory", problem, fix)
    for host, times in Counter(hosts).items():
        if times > 1:
            problem = "This host is listed both as coordinator and as worker."
            yield finding("NF012", host, problem, f"remove {host} from one group")
    owners: dict[str, str] = {}
    for host, address in addresses.items():
        if address in owners:
            problem = f"This host has the same address as {owners[address]}, {address}."
            yield finding("NF013", host, problem, f"give {host} an ansible_host of its own, or remove it")
        elif not resolved(address):
            problem = f"This host's address {address} does not resolve on this machine."
            fix = f"set ansible_host of {host} to its IP address in the inventory"
            yield finding("NF014", host, problem, fix)
        owners.setdefault(address, host)


def _member_findings(hosts: list[str], members: list[str]) -> Iterator[Finding]:
    """Findings about hosts outside of the group fleet, and about its hosts that no run would use."""
    left_out = [host for host in dict.fromkeys(hosts) if host not in members]
    if not members:
        fix = "add the group fleet with the children coordinator and workers (inventory/sample)"
        problem = "The inventory has no group fleet, which every playbook runs on."
        yield finding("NF016", "inventory", problem, fix)
    elif left_out:
        problem = f"Not in the group fleet, so no playbook would reach it: {', '.join(left_out)}."
        fix = "make coordinator and workers the children of fleet (inventory/sample)"
        yield finding("NF017", "inventory", problem, fix)
    for host in members:
        if host not in hosts:
            problem = "This host is in the group fleet, but neither in coordinator nor in workers."
            fix = f"add {host} to workers, or remove it from fleet and release it: {release(host)}"
            yield finding("NF018", host, problem, fix)


def release(host: str, outside: bool = False) -> str:
    """The command that removes nanofleet from one host. outside: whether no inventory lists the host."""
    name = shlex.quote(host)
    where = f"-i {name}, -u USER " if outside else ""
    return f"ansible-playbook reset.yml {where}--limit {name} -e reset_confirm=true"


def ssh_target(host: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """How a person reaches the host by SSH as Ansible does: {"host", "ssh", "options", "target"}.

    ssh: the whole command. options: its -p and ansible_ssh_common_args. target: USER@ADDRESS.
    """
    address = str(variables.get("ansible_host") or host)
    user = variables.get("ansible_user") or variables.get("ansible_ssh_user")
    port = variables.get("ansible_port") or variables.get("ansible_ssh_port")
    key = variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file")
    target = f"{user}@{address}" if user else address
    given = " ".join(str(variables.get("ansible_ssh_common_args") or "").split())
    options = (f" -p {port}" if port else "") + (f" {given}" if given else "")
    ssh = f"ssh{options}" + (f" -i {key}" if key else "") + f" {target}"
    return {"host": host, "ssh": ssh, "options": options, "target": target}


def unreachable_finding(host: str, variables: Mapping[str, Any], message: str) -> Finding:
    """A finding about a host that Ansible cannot reach. message: the error of ssh."""
    words = ssh_target(host, variables)
    for part, (meaning, fix) in SSH_ERRORS.items():
        if part in message.lower():
            problem = f"This host cannot be reached at {words['target']}: {meaning}."
            return finding("NF101", host, problem, fix.format(**words))
    detail = (message.strip() or "no reason given").splitlines()[-1]
    return finding("NF102", host, f"This host cannot be reached at {words['target']}: {detail}", words["ssh"])


def holder(held: Mapping[str, Any], port: int) -> tuple[str, str]:
    """(description of the holder of a port, the command that ends it).

    held: pid, user, command and unit of the holder, as far as known.
    """
    pid, unit, stop = held.get("pid"), held.get("unit"), f"sudo systemctl stop {held.get('unit')}"
    if not pid:
        unnamed = ("a process that only root can name", f"sudo ss -Hltnp sport = :{port}")
        return (f"{unit} of {held['user']}", stop) if unit else unnamed
    if int(pid) == 1:
        return "systemd itself, for a socket unit", f"systemctl list-sockets | grep :{port}"
    process = f"process {pid} of {held['user']} ({held['command']})"
    return (f"{process}, unit {unit}", stop) if unit else (process, f"sudo kill {pid}")
