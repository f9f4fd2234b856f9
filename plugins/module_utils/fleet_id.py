"""`inventory_file | fleet_id`: a fleet's name where nobody has set one, from its inventory's.

inventory/home/hosts.yml and inventory/home.yml are the fleet home.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

USUAL = {"hosts", "inventory", "inventories", "main", "all", "fleet"}
"""Names that tell nothing of a fleet."""
LONGEST = 40


def fleet_id(inventory_file: Any) -> str:
    """The stem of the file, or of the nearest folder around it, whose name identifies the fleet."""
    path = Path(str(inventory_file or ""))
    stem = path.name.split(".")[0] if path.suffix else path.name
    for name in [stem, *(folder.name for folder in path.parents)]:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:LONGEST]
        if plain and plain.lower() not in USUAL | {"ssh"}:
            return plain
    return "fleet"
