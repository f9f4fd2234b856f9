"""Which pinned packages a host needs: requirements followed with the host's markers, not the controller's.

pip evaluates environment markers for the machine it runs on even when it downloads for another; a controller
on macOS or on another Python would get another set. Everything is pinned, so following Requires-Dist is all
the resolving there is.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_lock import normal
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


class Need(NamedTuple):
    """A requirement that holds for a host: whose, of what, and which versions would do."""

    name: str
    extras: frozenset[str]
    versions: str

    def exact(self) -> str:
        """The one version that would do; empty where there is more than one."""
        only = [each for each in SpecifierSet(self.versions) if each.operator == "=="]
        return only[0].version if only and not only[0].version.endswith(".*") else ""

    def allows(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def read_pins(path: Path) -> dict[str, str]:
    """`name==version` lines as {normal name: version}."""
    pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, separator, version = line.partition("==")
            if not separator:
                raise ValueError(f"{path}: {line!r} is not pinned; write name==version.")
            pins[normal(name.strip())] = version.strip()
    return pins


def markers_of(python_version: str, architecture: str) -> dict[str, str]:
    """PEP 508's environment of a Linux host, whatever this process runs on."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python_version}.0",
        "os_name": "posix",
        "platform_machine": architecture,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python_version}.0",
        "python_version": python_version,
        "sys_platform": "linux",
    }


def needed(lines: Iterable[str], markers: dict[str, str], extras: Iterable[str] = ()) -> Iterator[Need]:
    """Those requirement lines that hold for these markers and extras."""
    for line in lines:
        requirement = Requirement(line)
        worlds = [{**markers, "extra": extra} for extra in ["", *extras]]
        if requirement.marker is None or any(requirement.marker.evaluate(world) for world in worlds):
            yield Need(normal(requirement.name), frozenset(requirement.extras), str(requirement.specifier))


def requires_of(wheel: Path) -> list[str]:
    """The Requires-Dist lines of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
