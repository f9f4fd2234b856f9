#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: set the range of the kernel's ephemeral ports in a sysctl file, or restore the old one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text, write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import user_name
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import (
    listening,
    numbers,
    tables,
)

KEY = "net.ipv4.ip_local_port_range"
PROC = "/proc/sys/net/ipv4"
DEFAULT = "32768 60999"
"""The kernel's own range."""
FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")
BEFORE = re.compile(r"^# before: (\d+) (\d+)$", re.MULTILINE)
SETTING = re.compile(r"^\s*-?\s*net[./]ipv4[./]ip_local_port_range\s*=\s*(\d+)\s+(\d+)\s*$", re.MULTILINE)


def content(low: int, high: int, before: str, fleet: str = "") -> str:
    """The text of the sysctl file that setup.yml writes.

    low, high: the range that it sets. before: the former range as "LOW HIGH", which it records. fleet: the
    name of the fleet.
    """
    return (
        f"# The ports of nanofleet's ranks, open to the other hosts of {f'the fleet {fleet}'.strip()}.\n"
        "# setup.yml wrote this file; reset.yml removes it and restores the former range.\n"
        f"# before: {before}\n{KEY} = {low} {high}\n"
    )


def setting(text: str) -> str:
    """The range that the text of a sysctl file sets, as "LOW HIGH"; of several the last; "" without one."""
    return " ".join((SETTING.findall(text) or [()])[-1])


def remembered(text: str) -> str:
    """The range before setup.yml as "LOW HIGH", from the text of the sysctl file that setup.yml wrote.

    The kernel's default if an older release wrote the file and recorded none.
    """
    return " ".join((BEFORE.findall(text) or [DEFAULT.split()])[0])


def overriding(path: str, files: dict[str, str]) -> list[str]:
    """The files that set the range and are read after `path` at boot, as `FILE (LOW HIGH)`.

    files: {path: text}. Files are read in the order of their names, whatever folder they are in.
    """
    later = [other for other in files if os.path.basename(other) > os.path.basename(path)]
    return [f"{other} ({setting(files[other])})" for other in sorted(later) if setting(files[other])]


def sysctl_files() -> dict[str, str]:
    """{path: text} of the sysctl files that are read at boot.

    A file in an earlier folder of FOLDERS hides the file of the same name in a later one.
    """
    paths: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        paths |= {path.name: path for path in Path(folder).glob("*.conf")}
    return {str(path): read_text(str(path)) for path in paths.values()}


def usable(low: int, high: int, reserved: str) -> int:
    """The number of ports from low to high that ip_local_reserved_ports (`8080,9000-9010`) leaves."""
    return len({*range(low, high + 1)} - {*numbers(reserved)})


def listeners(tables: list[str], low: int, high: int) -> list[tuple[int, int]]:
    """(port, uid) of each listener on a port from low to high that is not on loopback.

    tables: the texts of /proc/net/tcp and tcp6.
    """
    found = {(each.port, each.uid) for each in listening(tables) if not each.loopback}
    return sorted((port, uid) for port, uid in found if low <= port <= high)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "low": {"type": "int"},
            "high": {"type": "int"},
            "path": {"type": "path", "default": "/etc/sysctl.d/60-nanofleet.conf"},
            "user": {"type": "str", "default": "nanofleet"},
            "fleet": {"type": "str", "default": ""},
        },
        required_if=[("state", "present", ("low", "high"))],
        supports_check_mode=True,
    )
    params = module.params
    path, low, high = params["path"], params["low"], params["high"]
    now = " ".join(read_text(f"{PROC}/ip_local_port_range").split())
    text = Path(path).read_text() if os.path.exists(path) else ""
    present = params["state"] == "present"
    ours = setting(text)
    # The fleet's file records the former range; without the file, the present range is the former one.
    before = remembered(text) if ours else now
    wanted = content(low, high, before, params["fleet"]) if present else ""
    # A range that somebody has set since then is kept: only the fleet's own range is replaced.
    target = f"{low} {high}" if present else before if ours and now == ours else now
    changed = text != wanted or now != target
    if changed and not module.check_mode:
        try:
            if present:
                write_whole(path, wanted)
            elif text:
                os.unlink(path)
            if now != target:
                Path(f"{PROC}/ip_local_port_range").write_text(target)
        except OSError as error:
            command = f"sudo sysctl -w {KEY}='{target}'"
            module.fail_json(msg=f"{KEY} could not be set to {target}: {error}. Try on this host: {command}")
    result = {
        "changed": changed,
        "before": before,
        "diff": {"before": text + f"in force: {now}\n", "after": wanted + f"in force: {target}\n"},
    }
    if present:
        reserved = read_text(f"{PROC}/ip_local_reserved_ports")
        found = [{"port": port, "user": user_name(uid)} for port, uid in listeners(tables(), low, high)]
        result.update(
            usable=usable(low, high, reserved),
            reserved=reserved,
            overriding=overriding(path, sysctl_files()),
            listeners=[entry for entry in found if entry["user"] != params["user"]],
        )
    else:
        restored = [f"{KEY} {now}, which becomes {target} again"] if now != target else []
        result["removed"] = ([path] if text else []) + restored
    module.exit_json(**result)


if __name__ == "__main__":
    main()
