"""The cores of this host."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use: its affinity where the system knows one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
