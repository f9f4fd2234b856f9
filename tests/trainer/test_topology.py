"""The topology of several kinds of machines, from their files in /sys, and the candidates there.

The trees are written from the layout that Linux shows on these machines (numbers of CPUs, siblings,
clocks); only `cloud VM` was recorded on the machine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from trainer.host import cores, topology
from trainer.host.topology import Topology, cpu_list, parse_cpu_list, read_topology

CPU = "sys/devices/system/cpu/cpu{}"
Files = dict[str, str]


def cpu(number: int, core: int, siblings: str, socket: int = 0, khz: int = 0, capacity: int = 0) -> Files:
    folder = CPU.format(number)
    files = {
        f"{folder}/topology/core_id": str(core),
        f"{folder}/topology/physical_package_id": str(socket),
        f"{folder}/topology/thread_siblings_list": siblings,
    }
    files |= {f"{folder}/cpufreq/cpuinfo_max_freq": str(khz)} if khz else {}
    return files | ({f"{folder}/cpu_capacity": str(capacity)} if capacity else {})


def merged(parts: Iterable[Files], **nodes: str) -> Files:
    files = {f"sys/devices/system/node/{name}/cpulist": cpus for name, cpus in nodes.items()}
    for part in parts:
        files |= part
    return files


def intel_hybrid(performance: int, efficiency: int, khz: tuple[int, int], favoured: int = 0) -> Files:
    """Performance cores with two threads first, then efficiency cores, as Alder and Raptor Lake list them."""
    threads = 2 * performance
    fast = (
        cpu(n, 4 * (n // 2), f"{n & ~1}-{n | 1}", khz=favoured if favoured and n // 2 in (4, 5) else khz[0])
        for n in range(threads)
    )
    slow = (
        cpu(n, 2 * threads + n - threads, str(n), khz=khz[1]) for n in range(threads, threads + efficiency)
    )
    files = merged([*fast, *slow], node0=f"0-{threads + efficiency - 1}")
    files["sys/devices/cpu_core/cpus"] = f"0-{threads - 1}"
    files["sys/devices/cpu_atom/cpus"] = f"{threads}-{threads + efficiency - 1}"
    return files


def without_hybrid_lists(files: Files) -> Files:
    """As an older kernel shows them: only the clocks differ."""
    return {name: text for name, text in files.items() if "cpu_core" not in name and "cpu_atom" not in name}


I9_13900KF = intel_hybrid(8, 16, (5_500_000, 4_300_000), favoured=5_800_000)
I5_12450H = intel_hybrid(4, 4, (4_400_000, 3_300_000))
RYZEN_5800X = merged((cpu(n, n % 8, f"{n % 8},{n % 8 + 8}", khz=4_850_000) for n in range(16)), node0="0-15")
TWO_XEONS = merged(
    (cpu(n, n % 8, f"{n % 16},{n % 16 + 16}", socket=n % 16 // 8, khz=3_700_000) for n in range(32)),
    node0="0-7,16-23",
    node1="8-15,24-31",
)
EPYC_NPS4 = merged((cpu(n, n, str(n), khz=3_500_000) for n in range(32)), **{
    f"node{k}": f"{8 * k}-{8 * k + 7}" for k in range(4)
})  # fmt: skip
RK3588 = merged((cpu(n, n % 4, str(n), capacity=530 if n < 4 else 1024) for n in range(8)), node0="0-7")
RASPBERRY_PI_5 = merged(cpu(n, n, str(n), khz=2_400_000) for n in range(4))
VM_WITH_QUOTA = merged((cpu(n, n, str(n)) for n in range(4)), node0="0-3") | {
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/cpu.max": "150000 100000",
}
WSL2 = merged(cpu(n, n // 2, f"{n & ~1}-{n | 1}") for n in range(32))  # a 13900KF: no clocks, no kinds
CLOUD_VM = merged((cpu(n, n, str(n)) for n in range(2)), node0="0-1")

Reader = Callable[[Files, int], Topology]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    def reader(files: Files, count: int) -> Topology:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        quota = cores.cpu_quota(tmp_path)
        monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
        return read_topology(tmp_path, range(count))

    return reader


@pytest.mark.parametrize(
    ("files", "count", "description", "candidates"),
    [
        pytest.param(
            I9_13900KF, 32, "8 performance and 16 efficiency cores, 32 logical CPUs",
            {
                "performance cores": "0,2,4,6,8,10,12,14",
                "performance cores with SMT": "0-15",
                "all physical cores": "0,2,4,6,8,10,12,14,16-31",
                "all logical CPUs": "0-31",
            },
            id="i9-13900KF",
        ),
        pytest.param(
            without_hybrid_lists(I9_13900KF), 32, "8 performance and 16 efficiency cores, 32 logical CPUs",
            {
                "performance cores": "0,2,4,6,8,10,12,14",
                "performance cores with SMT": "0-15",
                "all physical cores": "0,2,4,6,8,10,12,14,16-31",
                "all logical CPUs": "0-31",
            },
            id="i9-13900KF, older kernel",
        ),
        pytest.param(
            I5_12450H, 12, "4 performance and 4 efficiency cores, 12 logical CPUs",
            {
                "performance cores": "0,2,4,6",
                "performance cores with SMT": "0-7",
                "all physical cores": "0,2,4,6,8-11",
                "all logical CPUs": "0-11",
            },
            id="i5-12450H",
        ),
        pytest.param(
            RYZEN_5800X, 16, "8 cores, 16 logical CPUs",
            {"all physical cores": "0-7", "all logical CPUs": "0-15"},
            id="SMT desktop",
        ),
        pytest.param(
            TWO_XEONS, 32, "16 cores, 2 sockets, 2 NUMA nodes, 32 logical CPUs",
            {"socket 0": "0-7", "all physical cores": "0-15", "all logical CPUs": "0-31"},
            id="two sockets",
        ),
        pytest.param(
            EPYC_NPS4, 32, "32 cores, 4 NUMA nodes, 32 logical CPUs",
            {"NUMA node 0": "0-7", "all logical CPUs": "0-31"},
            id="four nodes of one socket",
        ),
        pytest.param(
            RK3588, 8, "4 performance and 4 efficiency cores, 8 logical CPUs",
            {"performance cores": "4-7", "all logical CPUs": "0-7"},
            id="ARM big.LITTLE",
        ),
        pytest.param(
            RASPBERRY_PI_5, 4, "4 cores, 4 logical CPUs", {"all logical CPUs": "0-3"}, id="Raspberry Pi 5"
        ),
        pytest.param(
            VM_WITH_QUOTA, 4, "4 cores, 4 logical CPUs", {"all logical CPUs": "0-1"}, id="VM with a quota"
        ),
        pytest.param(
            WSL2, 32, "16 cores, 32 logical CPUs",
            {"all physical cores": ",".join(map(str, range(0, 32, 2))), "all logical CPUs": "0-31"},
            id="WSL2",
        ),
        pytest.param(CLOUD_VM, 2, "2 cores, 2 logical CPUs", {"all logical CPUs": "0-1"}, id="cloud VM"),
        pytest.param({}, 4, "4 cores, 4 logical CPUs", {"all logical CPUs": "0-3"}, id="no /sys"),
    ],
)  # fmt: skip
def test_the_candidates_of_a_machine(
    files: Files, count: int, description: str, candidates: dict[str, str], read: Reader
) -> None:
    found = read(files, count)
    assert found.describe() == description
    assert {each.name: cpu_list(each.cpus) for each in found.candidates()} == candidates


def test_a_process_pinned_to_efficiency_cores_has_one_kind_of_core(tmp_path: Path, read: Reader) -> None:
    read(I5_12450H, 12)
    pinned = read_topology(tmp_path, {8, 9, 10, 11})
    assert pinned.describe() == "4 cores, 4 logical CPUs"
    assert [each.name for each in pinned.candidates()] == ["all logical CPUs"]


def test_arm_clusters_that_number_their_cores_alike_are_different_cores(read: Reader) -> None:
    assert len({each.core for each in read(RK3588, 8).cpus}) == 8


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5", {5}), ("many", set()), ("0-", {0})]
)
def test_the_list_format_of_the_kernel(text: str, numbers: set[int]) -> None:
    assert parse_cpu_list(text) == numbers
    assert parse_cpu_list(cpu_list(numbers)) == numbers


def test_this_machine_has_a_candidate_within_its_affinity() -> None:
    here = topology.read_topology()
    assert here.candidates()
    assert all(each.cpus <= {cpu.number for cpu in here.cpus} for each in here.candidates())
