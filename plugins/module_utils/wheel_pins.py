"""Selects the pinned packages that a host needs, by the environment markers of the host.

pip evaluates markers for the machine on which it runs, even if it downloads for another one: a controller on
macOS or with another Python would select other packages. Every version is pinned, so following Requires-Dist
needs no resolver.
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
    """A package that a host needs: its name, the extras, and the specifier of its versions."""

    name: str
    extras: frozenset[str]
    versions: str

    def exact(self) -> str:
        """The version in `==VERSION`; empty if the specifier has no exact version."""
        only = [each for each in SpecifierSet(self.versions) if each.operator == "=="]
        return only[0].version if only and not only[0].version.endswith(".*") else ""

    def allows(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def read_pins(path: Path) -> dict[str, str]:
    """{normalised name: version} of a file with `name==version` lines. Raises ValueError."""
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
    """The marker environment (PEP 508) of a Linux host with this Python (such as 3.11) and architecture."""
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
    """The requirements in `lines` that hold for these markers and extras."""
    for line in lines:
        requirement = Requirement(line)
        worlds = [{**markers, "extra": extra} for extra in ["", *extras]]
        if requirement.marker is None or any(requirement.marker.evaluate(world) for world in worlds):
            yield Need(normal(requirement.name), frozenset(requirement.extras), str(requirement.specifier))


def requires_of(wheel: Path) -> list[str]:
    """The Requires-Dist lines in the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
