"""Folders on the controller that nanofleet uses, and the default name of a fleet.

Relative paths of settings and labs start at the checkout; with an installed collection, at the directory in
which the command is typed. Wheelhouses and the doctor's reports are in the checkout; with an installed
collection, in the user's cache. Used on the controller only.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

USUAL = {"hosts", "inventory", "inventories", "main", "all", "fleet"}
"""Usual names of files and folders, which do not identify a fleet."""
LONGEST = 40


def checkout_of(path: str) -> Path | None:
    """The checkout that contains `path`, with links resolved; None in an installed collection.

    A checkout has galaxy.yml; an installed collection has MANIFEST.json instead.
    """
    folder = Path(path).resolve()
    for each in (folder, *folder.parents):
        if (each / "galaxy.yml").is_file():
            return each
        if (each / "MANIFEST.json").is_file():
            return None
    return None


def project_folder(path: str) -> str:
    """The checkout that contains a playbook or role.

    path: of the playbook or role. If it is in an installed collection, the result is the directory in which
    the command is typed.
    """
    return str(checkout_of(path) or os.environ.get("PWD") or os.getcwd())


def cache_folder(path: str) -> tuple[str, bool]:
    """The folder for files that can be created again, such as wheels.

    Returns (folder, whether it is permanent).

    path: the path of a playbook or role. The folder is the checkout; for an installed collection it is
    $XDG_CACHE_HOME/nanofleet or ~/.cache/nanofleet. If this folder cannot be written (a container without a
    home), the result is a temporary folder of this user, which is not permanent. Raises PermissionError if
    the temporary folder belongs to another user, or other users may write to it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = checkout_of(path) or Path(cache) / "nanofleet"
    # A home that does not exist is not made.
    known = next(each for each in (folder, *folder.parents[:2], Path("/")) if each.is_dir())
    if known != Path("/") and os.access(known, os.W_OK):
        return str(folder), True
    temporary = Path(tempfile.gettempdir()) / f"nanofleet-{os.getuid()}"
    temporary.mkdir(mode=0o700, exist_ok=True)
    status = temporary.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} cannot be written, and {temporary} belongs to someone else. Make the checkout "
            "writable; with an installed collection, set XDG_CACHE_HOME to a folder that you can write."
        )
    return str(temporary), False


def fleet_id(inventory_file: Any) -> str:
    """The default name of a fleet: the name of its inventory file, or of a folder above that file.

    The name of the file is used without extension. Names that many inventories have, such as hosts or
    inventory (USUAL), and the name `ssh` are skipped. inventory/home/hosts.yml and inventory/home.yml both
    give `home`. If every name is skipped, the fleet is called `fleet`.
    """
    path = Path(str(inventory_file or ""))
    stem = path.name.split(".")[0] if path.suffix else path.name
    for name in [stem, *(folder.name for folder in path.parents)]:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:LONGEST]
        if plain and plain.lower() not in USUAL | {"ssh"}:
            return plain
    return "fleet"
