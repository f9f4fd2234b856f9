"""The cores of this host that a process may use: its CPU affinity and the CPU quota of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = "proc/self/cgroup"
UNIFIED = (
    "sys/fs/cgroup",
    "sys/fs/cgroup/unified",
)  # where version 2 is mounted, the second beside version 1
CPU_CONTROLLER = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")


def usable_cores() -> int:
    """The number of cores that this process may use: its CPU affinity, limited to its CPU quota."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return at_most_quota(there)


def at_most_quota(threads: int) -> int:
    """`threads`, limited to the CPU quota. A quota is rounded to whole cores, and is 1 at least."""
    quota = cpu_quota()
    return threads if quota is None else max(1, min(threads, int(quota + 0.5)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPU quota of this process in cores (seconds of CPU per second); None without a quota.

    A container or a parent control group may set one, so the smallest on the path counts. `root` is the root
    of the file system.
    """
    try:
        lines = (root / CGROUP).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            quotas += [quota for folder in _groups(root, UNIFIED, path) for quota in _unified(folder)]
        elif "cpu" in controllers.split(","):
            quotas += [quota for folder in _groups(root, CPU_CONTROLLER, path) for quota in _legacy(folder)]
    return min(quotas, default=None)


def _groups(root: Path, mounts: tuple[str, ...], path: str) -> Iterator[Path]:
    """Yield the folder of the control group `path` and of all its parents, under each of `mounts`.

    In a container, `path` may be a path of the host that does not exist there; the mount itself is then the
    group.
    """
    parts = [part for part in path.split("/") if part]
    for mount in mounts:
        for length in range(len(parts), -1, -1):
            if ".." not in parts[:length]:
                yield root.joinpath(mount, *parts[:length])


def _unified(group: Path) -> Iterator[float]:
    """Yield the quota of a control group (version 2) in cores; nothing without a quota.

    cpu.max is "150000 100000" (quota and period in microseconds) or "max 100000" (no quota).
    """
    try:
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


def _legacy(group: Path) -> Iterator[float]:
    """Yield the quota of a control group (version 1) in cores; nothing if cpu.cfs_quota_us is -1."""
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:
            yield quota / period
    except (OSError, ValueError, ZeroDivisionError):
        return
