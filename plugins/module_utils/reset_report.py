"""The report of reset.yml: what each host loses and keeps, and what to type next. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.preflight_hosts import may_become_root

ROLES = ("run_remove", "serve", "tracker", "dataset", "network", "runtime", "claim")
CONFIRM = "repeat the command with -e reset_confirm=true"


def published(variables: Mapping[str, Any], what: str) -> list[str]:
    """A line for each file, folder or rule that the roles remove, keep or leave on a host, each once.

    variables: of the host. The lines are in variables such as network_removed, one for each role. what:
    removed, kept or left (not made by setup.yml).
    """
    return list(dict.fromkeys(line for role in ROLES for line in variables.get(f"{role}_{what}") or []))


def report(
    hosts: Sequence[str],
    hostvars: Mapping[str, Any],
    done: bool,
    on_controller: Sequence[str],
    force: bool = False,
    fleet: Sequence[str] = (),
) -> list[str]:
    """The lines that reset.yml shows.

    hosts: names of the hosts to reset. hostvars: variables by host. done: True after the removal; False if
    the things to remove were only listed. on_controller: folders that stay on the controller. force: whether
    the reset ends active runs; otherwise active runs are a reason to refuse the reset. fleet: all hosts of
    the fleet; if it contains more than `hosts`, then `hosts` are released from the fleet.
    """
    removed, kept, left = (
        {host: published(hostvars[host], what) for host in hosts} for what in ("removed", "kept", "left")
    )
    would = "" if done else "would "
    lines = []
    for host in hosts:
        if not removed[host]:
            lines.append(f"{host}: nothing of setup.yml is left.")
        lines += [f"{host}: {would}remove{'d' if done else ''} {line}" for line in removed[host]]
        if kept[host]:
            owned = "now owned by root" if done else "owned by root from then on"
            by_root = f" ({owned})" if may_become_root(hostvars[host]) else ""
            lines.append(f"{host}: {would}{'kept' if done else 'keep'}{by_root}: {', '.join(kept[host])}")
        if left[host]:
            lines.append(f"{host}: not removed, not made by setup.yml: {', '.join(left[host])}")
    if any(kept.values()):
        lines.append(
            "Runs and the tracker's records are kept, and the next setup.yml uses them again. "
            "To remove them too, add: -e reset_checkpoints=true"
        )
    lines.append("setup.yml installs no system packages, so none is removed.")
    members = [host for host in hosts if host in fleet]
    others = [host for host in fleet if host not in hosts]
    if others and members:
        lines.append(f"Remove {', '.join(members)} from coordinator and workers in the inventory.")
    if others:
        lines.append(
            f"The firewall rules of {', '.join(others)} for {', '.join(hosts)} are removed by the next "
            "setup: ansible-playbook setup.yml"
        )
    elif on_controller:
        lines.append(f"On this machine remain folders; to remove them: rm -r {shlex.join(on_controller)}")
    if not done and any(removed.values()):
        lines.append(
            "Nothing was changed. The number after changed= in the PLAY RECAP below counts what a reset "
            "would change."
        )
        active = {host: hostvars[host].get("run_remove_active") or [] for host in hosts}
        lines += _about_active(active, force, members if fleet else hosts)
        lines.append(f"To do it, {CONFIRM}")
    return lines


def _about_active(active: Mapping[str, Sequence[str]], force: bool, reached: Sequence[str]) -> list[str]:
    """Lines about active runs: whether the reset would refuse or end them.

    active: runs by host. reached: the hosts on which stop.yml can run.
    """
    runs = list(dict.fromkeys(run for each in active.values() for run in each))
    if not runs:
        return []
    where = ", ".join(host for host, each in active.items() if each)
    what = f"{'Runs are' if len(runs) > 1 else 'A run is'} active on {where} ({', '.join(runs)})"
    if force:
        return [f"{what}: the reset would end it without saving a checkpoint."]
    lines = [f"{what}, so the reset would be refused."]
    if any(active[host] for host in reached):
        stops = " and ".join(f"ansible-playbook stop.yml -e run_id={run}" for run in runs)
        lines.append(f"To save and stop it first: {stops}")
    return [*lines, "To end it with the reset, without saving a checkpoint, add: -e reset_force=true"]
