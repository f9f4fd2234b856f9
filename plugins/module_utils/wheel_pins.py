"""Reads the pinned packages of each kind of host: constraints.txt and requirements/hashes.txt.

    numpy==2.4.6 ; extra == "" or extra == "train" \\
        --hash=sha256:4f0c... \\
        --hash=sha256:91ab...
    torch==2.13.0+cpu ; python_version == "3.11" and platform_machine == "x86_64" and extra == "train" \\
        --hash=sha256:c02d...

scripts/lock.py writes requirements/hashes.txt. The marker of an entry names the hosts and the sets that need
the package: `extra` is an extra of pyproject.toml, "" for the base dependencies, or EXTRA-cuda for the
packages that only torch's CUDA build needs. Only uv has no marker, because every set has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

Hashes = dict[tuple[str, Version], set[str]]

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)")


def read_pins(path: Path) -> dict[str, str]:
    """{normalised name: version} of a file with `name==version` lines.

    Raises ValueError if a line has no `==`.
    """
    pins: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, separator, version = line.partition("==")
            if not separator:
                raise ValueError(f"{path}: {line!r} is not pinned; write name==version.")
            pins[canonicalize_name(name.strip())] = version.strip()
    return pins


def markers_of(python_version: str, architecture: str) -> dict[str, str]:
    """The marker environment (PEP 508) of a Linux host, which decides whether a requirement applies there.

    python_version: such as 3.11; the full version is taken as 3.11.0. architecture: such as x86_64. The key
    `extra` is missing; `holds` adds it.
    """
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


def holds(requirement: Requirement, markers: dict[str, str], extras: Iterable[str] = ("",)) -> bool:
    """Whether the marker of a requirement holds for one of the extras; True without a marker."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**markers, "extra": extra}) for extra in extras)


def read_entries(text: str, name: str) -> Iterator[tuple[Requirement, Version, set[str]]]:
    """(requirement, its version, sha256 of each file) for each entry of a requirements file with hashes.

    text: content of the file. name: the name of the file, for messages. Raises ValueError for a line that is
    not a pinned package with hashes.
    """
    text = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        head, hashes = _HASH.sub("", line).strip(), set(_HASH.findall(line))
        try:
            requirement = Requirement(head)
            (pinned,) = requirement.specifier
            version = Version(pinned.version)
            hashes = hashes if pinned.operator == "==" else set()
        except (InvalidRequirement, ValueError):
            hashes = set()
        if not hashes:
            raise ValueError(
                f"{name}: {head[:80]!r} is not a pinned package (NAME==VERSION) with hashes. The file is "
                "out of date or was edited. Fix: make lock"
            )
        yield requirement, version, hashes


def read_hashes(path: Path, markers: dict[str, str], extras: Iterable[str]) -> Hashes:
    """The packages of these extras on a host: {(normalised name, version): sha256 of each of its files}.

    markers: the result of `markers_of`. torch can have two entries: one for its version, and one for the CPU
    build of that version (+cpu). Raises ValueError for an invalid file.
    """
    found: Hashes = {}
    for requirement, version, hashes in read_entries(path.read_text(encoding="utf-8"), str(path)):
        if requirement.marker is None and requirement.name != "uv":  # else every host would install it
            raise ValueError(f"{path}: {requirement} names no extra. The file is out of date. Fix: make lock")
        if holds(requirement, markers, extras):
            found.setdefault((canonicalize_name(requirement.name), version), set()).update(hashes)
    return found
