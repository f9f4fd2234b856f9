"""Compares a Python environment, made by the module locked_venv, with the record of its installation."""

from __future__ import annotations

import csv
import hashlib
import os
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json

PRINT_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"  # for python -c
MARKER = "nanofleet-venv.json"
RECORDS = "lib/python*/site-packages/*.dist-info/RECORD"
SCRIPTS = "../../../bin/"
UNHASHED = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


def installed_digest(venv: Path) -> str:
    """sha256 over all RECORD files, which hold the hash of every installed file; "" if nothing is installed.

    Hosts with equal digests have the same packages byte for byte, as far as their installers recorded.
    Scripts in bin/ are left out, because their first line has the path of the environment, which may differ
    by host.
    """
    digest = hashlib.sha256()
    found = sorted(venv.glob(RECORDS))
    for record in found:
        lines = [
            line
            for line in record.read_text(encoding="utf-8").splitlines()
            if not line.split(",")[0].endswith((".pyc", *UNHASHED)) and not line.startswith(SCRIPTS)
        ]
        digest.update(f"{record.parent.name}\n{chr(10).join(sorted(lines))}\n".encode())
    return digest.hexdigest() if found else ""


def damaged(venv: Path) -> list[str]:
    """Installed files that are missing or have another size than recorded, as after a power cut."""
    found = []
    for record in sorted(venv.glob(RECORDS)):
        with record.open(encoding="utf-8", newline="") as lines:
            for name, _, size in csv.reader(lines):
                path = f"{record.parent.parent}/{name}"
                if not name.endswith(".pyc") and (
                    not os.path.exists(path) or (size and os.path.getsize(path) != int(size))
                ):
                    found.append(os.path.normpath(path))
    return found


def read_marker(venv: Path) -> dict[str, Any]:
    """The content of nanofleet-venv.json, which locked_venv writes last in an environment; {} without it."""
    return load_json(str(venv / MARKER)) or {}


def problems_of(venv: Path, digest: str, python: str) -> list[str]:
    """Why an environment has to be made again, as phrases; [] if it is complete.

    Causes: the environment is missing, unfinished, built on another Python, or was changed. venv: its folder.
    digest: of the lock file. python: path of the Python that makes the environment.
    """
    marker = read_marker(venv)
    if not digest or marker.get("digest") != digest or not (venv / "bin" / "python").exists():
        return ["its installation was not finished" if venv.exists() else "it is missing"]
    if marker.get("python") != os.path.realpath(python):
        return [f"it was made on {marker.get('python')}"]
    bad = damaged(venv)
    if bad:
        more = [f"and {len(bad) - 3} more files"] if len(bad) > 3 else []
        return [f"{path} is missing or cut off" for path in bad[:3]] + more
    same = marker.get("installed") == installed_digest(venv)
    return [] if same else ["its packages are not those that were installed"]
