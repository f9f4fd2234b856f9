"""The processors of this host as the kernel lists them, and the sets of them on which a rank could run.

    topology = read_topology()
    for candidate in topology.candidates():
        print(candidate.name, cpu_list(candidate.cpus))

A hybrid processor has performance and efficiency cores, many cores run two threads (SMT), and a machine may
have several sockets and NUMA nodes. Only the processors that this process may use are listed.
Sources: Documentation/ABI/stable/sysfs-devices-system-cpu and Documentation/admin-guide/cputopology.rst of
the Linux kernel; /sys/devices/cpu_core and cpu_atom are the performance-counter devices of Intel's hybrid
processors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.formatting import counted
from trainer.host.cores import at_most_quota

CPU_FOLDER = "sys/devices/system/cpu"
NODE_FOLDER = "sys/devices/system/node"
EFFICIENCY_LIST = "sys/devices/cpu_atom/cpus"
# A core whose capacity or highest clock is below this part of the best core's is an efficiency core. Among
# equal cores, the clocks of the favoured ones differ by a few percent.
EFFICIENCY_BELOW = 0.85


@dataclass(frozen=True)
class Cpu:
    """A logical processor.

    number: its number in the kernel. core: (socket, core id) of its physical core, equal for SMT siblings.
    node: its NUMA node. is_efficient: whether it is on an efficiency core.
    """

    number: int
    core: tuple[int, int]
    node: int = 0
    is_efficient: bool = False

    @property
    def socket(self) -> int:
        """The socket of its physical core."""
        return self.core[0]


@dataclass(frozen=True)
class Candidate:
    """A set of logical processors on which a rank could run, one thread on each.

    name: what the set is, such as "all physical cores". cpus: numbers of the processors.
    """

    name: str
    cpus: frozenset[int]


@dataclass(frozen=True)
class Topology:
    """The logical processors that this process may use.

    cpus: the processors, in the order of their numbers. nodes: {NUMA node: numbers of its processors}.
    """

    cpus: tuple[Cpu, ...]
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def candidates(self) -> list[Candidate]:
        """The sets of logical processors to measure, without duplicates, the smallest first.

        They are: all processors; one processor of each physical core; the performance cores, with and without
        SMT; the cores of one socket; the cores of one NUMA node. A CPU quota limits the size of each set.
        """
        performance = [cpu for cpu in self.cpus if not cpu.is_efficient]
        sets = [("all logical CPUs", self.cpus), ("all physical cores", first_siblings(self.cpus))]
        if len(performance) < len(self.cpus):
            sets.append(("performance cores", first_siblings(performance)))
            sets.append(("performance cores with SMT", performance))
        sockets = {cpu.socket for cpu in self.cpus}
        if len(sockets) > 1:
            of_one = largest([cpu for cpu in self.cpus if cpu.socket == socket] for socket in sockets)
            sets.append((f"socket {of_one[0].socket}", first_siblings(of_one)))
        if len(self.nodes) > max(1, len(sockets)):
            of_one = largest([cpu for cpu in self.cpus if cpu.node == node] for node in self.nodes)
            sets.append((f"NUMA node {of_one[0].node}", first_siblings(of_one)))
        found: dict[frozenset[int], str] = {}
        for name, cpus in sets:
            numbers = sorted(cpu.number for cpu in cpus)
            found.setdefault(frozenset(numbers[: at_most_quota(len(numbers))]), name)
        return [
            Candidate(found[numbers], numbers)
            for numbers in sorted(found, key=lambda n: (len(n), *sorted(n)))
        ]

    def describe(self) -> str:
        """The topology as one line, such as "8 performance and 16 efficiency cores, 32 logical CPUs"."""
        cores = {cpu.core: cpu.is_efficient for cpu in self.cpus}
        slow = sum(cores.values())
        kinds = (
            f"{len(cores) - slow} performance and {slow} efficiency cores"
            if slow
            else counted(len(cores), "core")
        )
        sockets = len({cpu.socket for cpu in self.cpus})
        parts = [kinds, f"{sockets} sockets" if sockets > 1 else ""]
        parts.append(f"{len(self.nodes)} NUMA nodes" if len(self.nodes) > 1 else "")
        parts.append(counted(len(self.cpus), "logical CPU"))
        return ", ".join(part for part in parts if part)


def first_siblings(cpus: Iterable[Cpu]) -> list[Cpu]:
    """One logical processor of each physical core: that with the lowest number."""
    first: dict[tuple[int, int], Cpu] = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.number):
        first.setdefault(cpu.core, cpu)
    return list(first.values())


def largest(groups: Iterable[list[Cpu]]) -> list[Cpu]:
    """The group with the most processors; among groups of equal size, the one with the lowest CPU number.

    groups: lists of processors, each in ascending order of their numbers.
    """
    return min(groups, key=lambda group: (-len(group), group[0].number))


def read_topology(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> Topology:
    """Read the topology under `root`, the root of the file system.

    allowed: numbers of the processors that this process may use; by default its CPU affinity. If the kernel
    does not show the topology (in an emulator, WSL1, a container without /sys, on another system), each
    processor counts as a core of its own.
    """
    if allowed is None:
        have = hasattr(os, "sched_getaffinity")
        allowed = os.sched_getaffinity(0) if have else range(os.cpu_count() or 1)
    numbers = sorted(allowed)
    folder = root / CPU_FOLDER
    listed = parse_cpu_list(_read(root / EFFICIENCY_LIST))
    speeds = {number: _speed(folder / f"cpu{number}") for number in numbers}
    fastest = max(speeds.values(), default=0)
    nodes = {
        int(path.name[4:]): frozenset(parse_cpu_list(_read(path / "cpulist"))) & frozenset(numbers)
        for path in sorted((root / NODE_FOLDER).glob("node[0-9]*"))
    }
    nodes = {node: cpus for node, cpus in nodes.items() if cpus}
    node_of = {number: node for node, cpus in nodes.items() for number in cpus}
    cpus = []
    for number in numbers:
        topology = folder / f"cpu{number}" / "topology"
        core, socket = read_number(topology / "core_id"), read_number(topology / "physical_package_id")
        # ARM kernels number the cores of each cluster from 0, so the siblings decide, where they are shown.
        siblings = parse_cpu_list(_read(topology / "thread_siblings_list"))
        identity = min(siblings) if siblings else number if core is None else core
        efficient = number in listed if listed else speeds[number] < EFFICIENCY_BELOW * fastest
        cpus.append(Cpu(number, (max(0, socket or 0), identity), node_of.get(number, 0), efficient))
    if cpus and all(cpu.is_efficient for cpu in cpus):
        cpus = [Cpu(cpu.number, cpu.core, cpu.node) for cpu in cpus]
    return Topology(tuple(cpus), nodes)


def parse_cpu_list(text: str) -> set[int]:
    """The numbers in `text`, which has the kernel's list format, such as "0-3,8"; empty if it is invalid."""
    numbers: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return numbers


def cpu_list(numbers: Iterable[int]) -> str:
    """The numbers in the kernel's list format: {0, 1, 2, 8} is "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _speed(folder: Path) -> int:
    """The relative speed of a processor: its capacity (ARM), else its highest clock; 0 if unknown."""
    return read_number(folder / "cpu_capacity") or read_number(folder / "cpufreq" / "cpuinfo_max_freq") or 0


def read_number(path: Path) -> int | None:
    """The number in the file `path` of /sys; None if the file is missing or contains no number."""
    try:
        return int(_read(path))
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
