"""`inventory_file | fleet_id`: the default name of a fleet, derived from the path of its inventory.

inventory/home/hosts.yml and inventory/home.yml both give `home`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

USUAL = {"hosts", "inventory", "inventories", "main", "all", "fleet"}
"""Usual names of files and folders, which do not identify a fleet."""
LONGEST = 40


def fleet_id(inventory_file: Any) -> str:
    """The stem of the inventory file, or of the nearest folder above it, that is not a usual name.

    `fleet` if there is none.
    """
    path = Path(str(inventory_file or ""))
    stem = path.name.split(".")[0] if path.suffix else path.name
    for name in [stem, *(folder.name for folder in path.parents)]:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:LONGEST]
        if plain and plain.lower() not in USUAL | {"ssh"}:
            return plain
    return "fleet"
