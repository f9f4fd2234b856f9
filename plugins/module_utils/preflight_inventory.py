"""Findings about an inventory; also how messages name a host, its SSH login and the holder of a port.

Findings about hosts are in preflight_hosts, preflight_run and preflight_use.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import resolved

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
EXAMPLE = "inventory/sample/hosts.yml"
SAMPLE = (
    f"list one host in the group coordinator and the others in workers (as in {EXAMPLE}); without an "
    "inventory: cp -r inventory/sample inventory/mine  (put your hosts in, then add -i inventory/mine to "
    "the command); or, for two hosts on this machine: ansible-playbook lab.yml, then type unset "
    "ANSIBLE_INVENTORY and repeat the command without -i"
)
# Part of the message of ssh -> what it means, and the fix. The first match counts.
SSH_ERRORS = {
    "host key verification failed": (
        "the controller does not know the host's SSH key, or the key has changed",
        "{ssh}  (type yes if the key that ssh shows is the host's; if the key has changed, ssh names the "
        "line of known_hosts to delete)",
    ),
    "permission denied": (
        "its SSH server refuses the user or the key",
        "ssh-copy-id{key}{options} {target}  (if your user on {host} has another name, set ansible_user of "
        "{host} in the inventory)",
    ),
    "could not resolve hostname": (
        "the controller finds no IP address for this name",
        "set ansible_host of {host} to its IP address in the inventory",
    ),
    "connection refused": (
        "the host is on, but no SSH server answers",
        "sudo apt install openssh-server && sudo systemctl enable --now ssh  (on {host}); if its SSH server "
        "uses another port, set ansible_port of {host} in the inventory",
    ),
    "no route to host": (
        "the host is off or on another network",
        "start {host} or connect it, then try: {ssh}",
    ),
    "network is unreachable": (
        "the controller has no route to the network of the host",
        "connect the controller to that network, then try: {ssh}",
    ),
    "timed out": (
        "the host is off, asleep or behind a firewall",
        "start {host} or open its SSH port, then try: {ssh}",
    ),
}


def inventory_findings(
    addresses: Mapping[str, str],
    coordinators: list[str],
    workers: list[str],
    members: list[str],
    as_root: Sequence[str] = (),
) -> Iterator[Finding]:
    """Findings about the groups, host names and addresses of an inventory.

    An inventory must have one coordinator and list each host once, and each host must have its own address
    that resolves. addresses: {host: address}. coordinators, workers: the hosts of these groups. members: the
    hosts of the group fleet, which must contain both groups. as_root: hosts with ansible_become: true.
    """
    hosts = [*coordinators, *workers]
    if not hosts:
        problem = "The inventory lists no host in the groups coordinator and workers."
        yield finding("NF010", "inventory", problem, SAMPLE)
        return
    for host in hosts:
        if not HOST_NAME.fullmatch(host):
            problem = (
                f"The host name {host!r} is not valid: it may contain only letters, digits, dots, dashes, "
                "underscores and colons, and must start with a letter or digit."
            )
            yield finding("NF015", "inventory", problem, f"rename {host} in the inventory")
    yield from _member_findings(hosts, members)
    for host in as_root:
        problem = (
            "ansible_become is true for this host. It overrides become: false of the tasks that have to run "
            "as the login user, such as the task that reads the address of the controller."
        )
        fix = (
            "delete ansible_become: true from the inventory, or -e ansible_become from the command; the "
            "playbooks become root where they need to"
        )
        yield finding("NF023", host, problem, fix)
    if len(coordinators) != 1:
        listed = ", ".join(coordinators) or "none"
        problem = f"The group coordinator must hold exactly one host; it holds {listed}."
        first = [*coordinators, *hosts][0]
        verb = "keep" if coordinators else "move"
        at = "in" if coordinators else "to"
        fix = (
            f"in the inventory, {verb} {first} {at} coordinator and list the other hosts in workers (as in "
            f"{EXAMPLE})"
        )
        yield finding("NF011", "inventory", problem, fix)
    for host, times in Counter(hosts).items():
        if times > 1:
            problem = "This host is listed both as coordinator and as worker."
            group = "workers" if host == coordinators[0] else "coordinator"
            fix = f"remove {host} from the group {group} in the inventory"
            yield finding("NF012", host, problem, fix)
    owners: dict[str, str] = {}
    for host, address in addresses.items():
        if address in owners:
            other = owners[address]
            problem = f"This host and {other} have the same address, {address}."
            fix = (
                f"set the address of {host} in the inventory to its own (fleet_address if it is set there, "
                f"else ansible_host); if both are one machine, remove {host} from the inventory"
            )
            yield finding("NF013", host, problem, fix)
        elif not resolved(address):
            problem = (
                f"The inventory gives this host the address {address}, and the controller finds no IP "
                "address for this name."
            )
            fix = (
                f"set the address of {host} in the inventory to its IP address (fleet_address if it is set "
                f"there, else ansible_host); its addresses are listed by: ip -br address  (on {host})"
            )
            yield finding("NF014", host, problem, fix)
        owners.setdefault(address, host)


def _member_findings(hosts: list[str], members: list[str]) -> Iterator[Finding]:
    """Findings about hosts outside of the group fleet, and about its hosts that no run would use."""
    left_out = [host for host in dict.fromkeys(hosts) if host not in members]
    if not members:
        fix = (
            f"add to the inventory a group fleet with the children coordinator and workers (as in {EXAMPLE})"
        )
        problem = (
            "The inventory has no group named fleet, or this group is empty. Every playbook runs on the "
            "hosts of this group."
        )
        yield finding("NF016", "inventory", problem, fix)
    elif left_out:
        hosts_outside = ", ".join(left_out)
        problem = f"The group fleet, on which every playbook runs, does not contain {hosts_outside}."
        fix = f"in the inventory, make coordinator and workers children of the group fleet (as in {EXAMPLE})"
        yield finding("NF017", "inventory", problem, fix)
    for host in members:
        if host not in hosts:
            problem = (
                "This host is in the group fleet, but neither in coordinator nor in workers: no run uses it."
            )
            fix = (
                f"add {host} to workers in the inventory; or uninstall nanofleet there: "
                f"{reset_command(host)}, then delete {host} from the inventory"
            )
            yield finding("NF018", host, problem, fix)


def reset_command(host: str, where: str = "") -> str:
    """The command that removes nanofleet from one host.

    where: options about a host that no inventory lists, with a space at the end; "" for none.
    """
    return f"ansible-playbook reset.yml {where}--limit {shlex.quote(host)} -e reset_confirm=true"


def former_reset_command(address: str, fleet_id: str) -> str:
    """The command that removes nanofleet from a host that no inventory lists.

    fleet_id: name of the fleet that the host serves.
    """
    return reset_command(address, f"-i {shlex.quote(address)}, -u USER -e fleet_id={shlex.quote(fleet_id)} ")


def ssh_target(host: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """The SSH command with which a person reaches a host as Ansible does, and its parts.

    host: the name of the host. variables: of this host. Keys of the result: host: the argument `host`. ssh:
    the whole command. options: -p and ansible_ssh_common_args, each after a space; key: -i and the key file
    after a space; both "" for none. target: USER@ADDRESS, or ADDRESS if the inventory names no user.
    """
    address = str(variables.get("ansible_host") or host)
    user = variables.get("ansible_user") or variables.get("ansible_ssh_user")
    port = variables.get("ansible_port") or variables.get("ansible_ssh_port")
    key = variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file")
    target = f"{user}@{address}" if user else address
    given = " ".join(str(variables.get("ansible_ssh_common_args") or "").split())
    options = (f" -p {port}" if port else "") + (f" {given}" if given else "")
    identity = f" -i {key}" if key else ""
    return {
        "host": host, "ssh": f"ssh{options}{identity} {target}", "options": options, "key": identity,
        "target": target,
    }  # fmt: skip


def unreachable_finding(host: str, variables: Mapping[str, Any], message: str) -> Finding:
    """The finding about a host that Ansible cannot reach.

    variables: of the host. message: the error of ssh, from which the cause and the fix follow.
    """
    words = ssh_target(host, variables)
    target = words["target"]
    for part, (meaning, fix) in SSH_ERRORS.items():
        if part in message.lower():
            problem = f"SSH cannot reach this host at {target}: {meaning}."
            return finding("NF101", host, problem, fix.format(**words))
    detail = (message.strip() or "no reason given").splitlines()[-1]
    fix = f"connect by hand to see more: {words['ssh']}"
    return finding("NF102", host, f"SSH cannot reach this host at {target}: {detail}", fix)


def holder(held: Mapping[str, Any], port: int) -> tuple[str, str]:
    """The process that uses a port, and the command that ends the process: two texts for a message.

    held: a dict with pid, user, command and unit of the process; a value that is not known is empty or
    missing. port: the number of the port.
    """
    pid, unit, stop = held.get("pid"), held.get("unit"), f"sudo systemctl stop {held.get('unit')}"
    if not pid:
        listing = f"sudo kill PID, the number in the output of: sudo ss -Hltnp sport = :{port}"
        unnamed = ("a process that only root can name", listing)
        return (f"{unit} of {held['user']}", stop) if unit else unnamed
    if int(pid) == 1:
        stop = f"sudo systemctl stop UNIT, the name in the output of: systemctl list-sockets | grep :{port}"
        return "systemd itself, for a socket unit", stop
    process = f"process {pid} of {held['user']} ({held['command']})"
    return (f"{process}, unit {unit}", stop) if unit else (process, f"sudo kill {pid}")
