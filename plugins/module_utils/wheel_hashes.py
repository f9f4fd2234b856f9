"""Reads the sha256 of the pinned wheels that are committed in requirements/hashes.txt.

    numpy==2.4.6 \\
        --hash=sha256:4f0c... \\
        --hash=sha256:91ab...
    torch==2.13.0+cpu ; python_version == "3.11" and platform_machine == "x86_64" \\
        --hash=sha256:c02d...

scripts/lock.py writes the file. An entry with a marker holds only for hosts that the marker matches.
"""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_lock import Wheel, normal
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

Hashes = dict[tuple[str, Version], set[str]]

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)")


def read_hashes(path: Path, markers: dict[str, str]) -> Hashes:
    """The entries whose marker matches `markers`: {(name, version): sha256 of each of its files}.

    Raises ValueError for a line that is not a pinned package with hashes.
    """
    found: Hashes = {}
    text = re.sub(r"(?m)^\s*#.*$", "", path.read_text(encoding="utf-8")).replace("\\\n", " ")
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
                f"{path}: {head[:80]!r} is not a pinned package (NAME==VERSION) with hashes. The file is "
                "out of date or was edited. Fix: make lock"
            )
        if requirement.marker is None or requirement.marker.evaluate({**markers, "extra": ""}):
            found.setdefault((normal(requirement.name), version), set()).update(hashes)
    return found


def judge(wheels: list[Wheel], hashes: Hashes) -> tuple[list[Wheel], list[Wheel]]:
    """(wheels that differ from the committed hashes, wheels without a committed hash)."""
    known = [(wheel, hashes.get((wheel.name, Version(wheel.version)))) for wheel in wheels]
    altered = [wheel for wheel, allowed in known if allowed is not None and wheel.sha256 not in allowed]
    return altered, [wheel for wheel, allowed in known if allowed is None]
