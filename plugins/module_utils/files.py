# SPDX-License-Identifier: MIT
"""Reading files that may be missing, and writing one whole. Standard library only."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any


def read_text(path: str) -> str:
    """The text of a file without leading and trailing blanks; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def load_json(path: str) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file cannot be read or holds no object."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_whole(path: str, text: str, mode: int = 0o644) -> None:
    """Write a file whole: to a temporary file, to the disk (fsync), then os.replace. Creates its folder."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".nanofleet-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
