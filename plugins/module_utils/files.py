# SPDX-License-Identifier: MIT
"""Reads files that may be missing, and writes files atomically. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_text(path: str, strip: bool = True) -> str:
    """The text of a file; "" if it cannot be read. strip: whether white space at both ends is removed."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip() if strip else file.read()
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


def sha256_of(path: str | Path, size: int | None = None) -> str:
    """The sha256 of the first `size` bytes of a file, as 64 hex digits. size: None for the whole file.

    Raises OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        if size is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(min(1 << 20, size)):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def write_whole(path: str, text: str, mode: int = 0o644, gid: int = -1) -> None:
    """Write a text to the file `path` atomically: temporary file, fsync, os.replace.

    path: has a folder, such as ./run.json; the folder is created if it is missing. mode: the permission bits
    of the file. gid: number of its group; -1: that of this process. Raises OSError if the file cannot be
    written; an existing file is then unchanged.
    """
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o755)  # whatever the umask is
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".nanofleet-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchown(file.fileno(), -1, gid)
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
