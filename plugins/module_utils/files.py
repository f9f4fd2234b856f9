# SPDX-License-Identifier: MIT
"""Writing a file of the host's whole. Standard library only."""

from __future__ import annotations

import os
import tempfile


def write_whole(path: str, text: str, mode: int = 0o644) -> None:
    """Into a file beside it, to the disk, and into its place; a missing folder is made."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".nanofleet-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
