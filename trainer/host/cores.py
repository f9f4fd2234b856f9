"""The cores of this host that a process may use: its CPU affinity and the CPU quota of its control groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = "proc/self/cgroup"
UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")  # mounts of version 2; the second one beside version 1
CPU_CONTROLLER = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")  # mounts of version 1


def usable_cores() -> int:
    """The number of cores that this process may use: its CPU affinity, limited to its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return at_most_quota(cores)


def at_most_quota(threads: int) -> int:
    """The number `threads`, or the CPU quota of this process if that is lower.

    A quota is rounded to whole cores, and is at least 1.
    """
    quota = cpu_quota()
    return threads if quota is None else max(1, min(threads, int(quota + 0.5)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPU quota of this process in cores (seconds of CPU per second); None without a quota.

    The control group of the process and each of its parents may set a quota; the smallest of these counts.
    root: the root of the file system.
    """
    try:
        lines = (root / CGROUP).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    quotas: list[float] = []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or "cpu" in controllers.split(","):
            mounts, files = (
                (CPU_CONTROLLER, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
                if controllers
                else (UNIFIED, ("cpu.max",))
            )
            quotas += [quota for folder in _groups(root, mounts, path) for quota in _quota(folder, files)]
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


def _quota(group: Path, files: tuple[str, ...]) -> Iterator[float]:
    """Yield the quota of the control group `group` in cores; nothing without a quota.

    files: names of the files that contain quota and period, in microseconds: one file in cgroup version 2,
    two files in version 1. A group without a quota has the quota "max" in version 2, and -1 in version 1.
    """
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = " ".join((group / name).read_text(encoding="utf-8") for name in files).split()
        if int(quota) > 0:
            yield int(quota) / int(period)
