"""The report of reset.yml: what each host loses and keeps, and what to type next. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.become_root import may_become_root

ROLES = ("run_remove", "tracker", "dataset", "network", "runtime", "claim")
CONFIRM = "type the same with -e reset_confirm=true"


def published(variables: Mapping[str, Any], what: str) -> list[str]:
    """The lines that the roles published as ROLE_removed, ROLE_kept or ROLE_left (`what`), each once."""
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

    done: whether anything was removed, or only listed. on_controller: folders that stay on the controller.
    force: whether active runs are ended instead of a refusal. fleet: all hosts of the fleet; if it has others
    than `hosts`, then `hosts` are released from it.
    """
    lines, kept_anywhere, anything = [], False, False
    for host in hosts:
        removed = published(hostvars[host], "removed")
        kept = published(hostvars[host], "kept")
        left = published(hostvars[host], "left")
        anything = anything or bool(removed)
        kept_anywhere = kept_anywhere or bool(kept)
        if not removed:
            lines.append(f"{host}: nothing of setup.yml is left.")
        lines += [f"{host}: {'removed' if done else 'would remove'} {line}" for line in removed]
        for_root = ", for root" if may_become_root(hostvars[host]) else ""
        if kept:
            lines.append(f"{host}: {'kept' if done else 'would keep'}{for_root}: {', '.join(kept)}")
        if left:
            lines.append(f"{host}: left alone, not made by setup.yml: {', '.join(left)}")
    if kept_anywhere:
        lines.append(
            "Runs and the tracker's records are kept, and the next setup.yml takes them up again. "
            "To remove them too, add: -e reset_checkpoints=true"
        )
    lines.append("setup.yml installs no system packages, so none is removed.")
    others = [host for host in fleet if host not in hosts]
    if others:
        lines += _others(hosts, [host for host in hosts if host in fleet], others)
    elif on_controller:
        lines.append(
            f"On this machine stays what was made here; to remove it: rm -r {' '.join(on_controller)}"
        )
    if not done and anything:
        lines.append("Nothing was changed; what is counted as changed below is what would be.")
        active = {host: hostvars[host].get("run_remove_active") or [] for host in hosts}
        lines += _refused(active, force, [host for host in hosts if host in fleet or not fleet])
        lines.append(f"To do it, {CONFIRM}")
    return lines


def _others(released: Sequence[str], members: Sequence[str], others: Sequence[str]) -> list[str]:
    """What remains to do for the hosts that stay in the fleet.

    members: the released hosts that are still in the inventory.
    """
    lines = []
    if members:
        lines.append(f"Remove {', '.join(members)} from coordinator and workers in the inventory.")
    lines.append(
        f"The firewall rules of {', '.join(others)} for {', '.join(released)} are removed by the next setup: "
        "ansible-playbook setup.yml"
    )
    return lines


def _refused(active: Mapping[str, Sequence[str]], force: bool, reached: Sequence[str]) -> list[str]:
    """Lines about active runs: whether the reset would refuse or end them.

    active: runs by host. reached: the hosts on which stop.yml can run.
    """
    runs = list(dict.fromkeys(run for up in active.values() for run in up))
    if not runs:
        return []
    where = ", ".join(host for host, up in active.items() if up)
    what = f"{'Runs are' if len(runs) > 1 else 'A run is'} active on {where} ({', '.join(runs)})"
    if force:
        return [f"{what}: it would be ended, and nothing of it saved."]
    by_reset = "et the reset end it, which saves nothing: -e reset_force=true"
    if not any(active[host] for host in reached):
        return [f"{what}, so it would be refused. L{by_reset}"]
    stops = " and ".join(f"ansible-playbook stop.yml -e run_id={run}" for run in runs)
    return [f"{what}, so it would be refused. First, which saves: {stops}", f"Or l{by_reset}"]
