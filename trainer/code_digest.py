"""The digest that identifies the version of the trainer's code. Only the standard library is imported."""

from __future__ import annotations

import hashlib
from pathlib import Path


def code_digest() -> str:
    """SHA-256 (hex) of all Python files of the package trainer: it identifies the trainer's version."""
    root = Path(__file__).resolve().parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
