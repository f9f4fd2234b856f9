# SPDX-License-Identifier: MIT
"""The range of the kernel's ephemeral ports, and the sysctl file that sets it. Standard library only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import user_name
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import listening, numbers, tables

KEY = "net.ipv4.ip_local_port_range"
PROC = "/proc/sys/net/ipv4"
KERNELS_RANGE = "32768 60999"
FOLDERS = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")
BEFORE = re.compile(r"^# before: (\d+) (\d+)$", re.MULTILINE)
SETTING = re.compile(r"^\s*-?\s*net[./]ipv4[./]ip_local_port_range\s*=\s*(\d+)\s+(\d+)\s*$", re.MULTILINE)


def content(low: int, high: int, before: str, fleet: str = "") -> str:
    """The text of the fleet's sysctl file, which sets the range from low to high.

    before: the former range, as LOW HIGH, which the file records. fleet: name of the fleet, for a comment.
    """
    return (
        f"# The ports of nanofleet's ranks, open to the other hosts of {f'the fleet {fleet}'.strip()}.\n"
        "# setup.yml wrote this file; reset.yml removes it and restores the former range.\n"
        f"# before: {before}\n{KEY} = {low} {high}\n"
    )


def setting(text: str) -> str:
    """The last range that a sysctl file sets, as LOW HIGH; "" if it sets none. text: content of the file."""
    return " ".join((SETTING.findall(text) or [()])[-1])


def remembered(text: str) -> str:
    """The range that the host had before the fleet's, as LOW HIGH.

    text: content of the fleet's sysctl file, which records that range. If an older release wrote the file and
    recorded none, the result is the kernel's default.
    """
    return " ".join((BEFORE.findall(text) or [KERNELS_RANGE.split()])[0])


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
    """The number of ports from low to high that the kernel does not reserve.

    reserved: the value of ip_local_reserved_ports, such as 8080,9000-9010.
    """
    return len({*range(low, high + 1)} - {*numbers(reserved)})


def listeners(texts: list[str], low: int, high: int) -> list[tuple[int, int]]:
    """(port, uid) of each listener on a port from low to high, except on loopback. uid: of its owner.

    texts: the result of `tables`.
    """
    found = {(each.port, each.uid) for each in listening(texts) if not each.loopback}
    return sorted((port, uid) for port, uid in found if low <= port <= high)


class Change(NamedTuple):
    """A change of this host's range of ephemeral ports. Ranges are texts such as "32768 60999".

    text, wanted: the text of the fleet's sysctl file now and after the change, "" for no file.
    now, target: the range in force now and after the change.
    before: the range that the host had before the fleet's.
    """

    text: str
    wanted: str
    now: str
    target: str
    before: str

    @property
    def changed(self) -> bool:
        """Whether the change alters the file or the range in force."""
        return self.text != self.wanted or self.now != self.target


def change_to(path: str, low: int, high: int, fleet: str = "") -> Change:
    """The change that makes this host use the range from low to high.

    path: of the fleet's sysctl file. fleet: name of the fleet, for a comment in the file. This function
    changes nothing.
    """
    now, text = _present(path)
    # The fleet's file records the former range; without the file, the present range is the former one.
    before = remembered(text) if setting(text) else now
    return Change(text, content(low, high, before, fleet), now, f"{low} {high}", before)


def change_back(path: str) -> Change:
    """The change that removes the fleet's sysctl file and restores the range that the host had before.

    A range in force that is not the fleet's is kept, because somebody else has set it. path: of the fleet's
    sysctl file. This function changes nothing.
    """
    now, text = _present(path)
    ours = setting(text)
    before = remembered(text) if ours else now
    # A range that somebody has set since then is kept: only the fleet's own range is replaced.
    return Change(text, "", now, before if ours and now == ours else now, before)


def _present(path: str) -> tuple[str, str]:
    now = " ".join(read_text(f"{PROC}/ip_local_port_range").split())
    return now, Path(path).read_text() if os.path.exists(path) else ""


def hindrances(path: str, low: int, high: int, user: str) -> dict[str, Any]:
    """Conditions on this host that can hinder a run whose port range is from low to high, as a dict.

    path: of the fleet's sysctl file. user: the service user. Keys of the result:
    usable: number of ports of the range that are not reserved. reserved: value of ip_local_reserved_ports.
    overriding: files that set the range and are read at boot after `path`, as `FILE (LOW HIGH)`.
    listeners: [{"port", "user"}] of the listeners in the range that do not belong to `user`, except on
    loopback.
    """
    reserved = read_text(f"{PROC}/ip_local_reserved_ports")
    found = [{"port": port, "user": user_name(uid)} for port, uid in listeners(tables(), low, high)]
    return {
        "usable": usable(low, high, reserved),
        "reserved": reserved,
        "overriding": overriding(path, sysctl_files()),
        "listeners": [entry for entry in found if entry["user"] != user],
    }
