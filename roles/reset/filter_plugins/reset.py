"""What reset.yml shows: what each host loses and keeps, and what to type next. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean

ROLES = ("launch", "tracker", "dataset", "network", "runtime")
CONFIRM = "ansible-playbook reset.yml -e reset_confirm=true"


def published(variables: Mapping[str, Any], what: str) -> list[str]:
    """What the roles published as ROLE_removed, ROLE_kept or ROLE_left, each once."""
    return list(dict.fromkeys(line for role in ROLES for line in variables.get(f"{role}_{what}") or []))


def report(
    hosts: Sequence[str], hostvars: Mapping[str, Any], done: bool, on_controller: Sequence[str]
) -> list[str]:
    """Sentences for the screen. done: whether it was done or only said."""
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
        for_root = ", for root" if boolean(hostvars[host].get("ansible_become", True), strict=False) else ""
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
    if on_controller:
        lines.append(
            f"On this machine stays what was made here; to remove it: rm -r {' '.join(on_controller)}"
        )
    if not done and anything:
        lines.append(f"Nothing was changed. To do it, type: {CONFIRM}")
    return lines


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Any]:
        return {"reset_report": report}
