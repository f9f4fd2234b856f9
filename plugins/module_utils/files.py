# SPDX-License-Identifier: MIT
"""Writing a text file as root, in one step. Standard library only."""

from __future__ import annotations

import os
import tempfile


def write_whole(path: str, text: str) -> None:
    """Write a text file with mode 0644 and make its folder if it is missing.

    The text goes to a temporary file beside it, is flushed to disk (fsync), and is renamed to `path`.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".nanofleet-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
