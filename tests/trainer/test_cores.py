"""How many threads a host is good for: affinity, and the CPU quotas of control groups, as trees of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.host import cores, facts
from trainer.host.cores import cpu_quota, usable_cores
from trainer.host.facts import host_facts
from trainer.host.numerics import limit_threads, thread_count

ROOT = Path(__file__).parents[2]
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"
UNIT = "/system.slice/nanofleet-x.service"


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v1(folder: str, quota: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {f"{V2}/cpu.max": "max 100000"}, None),
        ("0::/", {f"{V2}/cpu.max": "150000 100000"}, 1.5),  # a container
        (f"0::{UNIT}", {f"{V2}{UNIT}/cpu.max": "200000 100000"}, 2.0),
        (
            f"0::{UNIT}",
            {f"{V2}{UNIT}/cpu.max": "max 100000", f"{V2}/system.slice/cpu.max": "50000 50000"},
            1.0,
        ),
        (f"0::{UNIT}", {f"{V2}{UNIT}/cpu.max": "300000 100000", f"{V2}/cpu.max": "100000 100000"}, 1.0),
        ("0::/other", {f"{V2}{UNIT}/cpu.max": "100000 100000"}, None),  # another group's
        ("0::/../../host.slice", {f"{V2}/cpu.max": "250000 100000", "cpu.max": "1 100000"}, 2.5),
        (f"4:cpu,cpuacct:{UNIT}\n0::{UNIT}", v1(f"{V1}{UNIT}", 150000), 1.5),
        (f"4:cpu,cpuacct:{UNIT}", v1(f"{V1}{UNIT}", -1) | v1(f"{V1}/system.slice", 300000), 3.0),
        ("4:cpu:/docker/1f", v1("sys/fs/cgroup/cpu", 50000), 0.5),  # mounted without the host's path
        ("2:cpuset:/\n1:name=systemd:/", v1(V1, 100000), None),
        ("0::/", {f"{V2}/cpu.max": "many"}, None),
        ("nonsense", {f"{V2}/cpu.max": "1 0"}, None),
    ],
)
def test_the_least_quota_on_the_path_counts(
    cgroup: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(tree(tmp_path, cgroup, files)) == quota


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, 8), (0.2, 1), (1.0, 1), (1.4, 1), (1.5, 2), (3.9, 4), (7.6, 8), (64.0, 8)],
)
def test_threads_keep_within_the_quota(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the unit of a run was given, from the cores of the host alone."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for module in (cores, facts):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    assert usable_cores() == expected
    shown = min(expected, quota or 8)
    assert host_facts()["cores"] == ("8" if shown == 8 else f"{shown:g} of 8")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert thread_count(0, 1) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # as launch sets it for two ranks on 8 cores
    assert thread_count(0, 2) == max(1, expected // 2)
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    limit_threads()
    assert threads[-1] == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_count(0, 1) == expected
    assert thread_count(0, 2) == max(1, expected // 2)
    assert thread_count(16, 1) == 16, "a setting is a setting"


@pytest.mark.parametrize(("ranks", "outcome"), [("1", "stopped"), ("2", "retryable")])
def test_sigterm_is_heeded_where_its_sender_is_unknown(ranks: str, outcome: str, tmp_path: Path) -> None:
    """macOS has no sigwaitinfo: a rank that has others beside it takes the signal for torchrun's."""
    program = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "del signal.sigwaitinfo\n"
        "from trainer.host.rank_env import RankEnv\n"
        "from trainer.host.logger import RunLogger\n"
        "from trainer.health.attempt import Attempt, handle_sigterm\n"
        "attempt = Attempt(Path(sys.argv[1]), RankEnv())\n"
        "attempt.begin()\n"
        "handle_sigterm(attempt, RunLogger(RankEnv()))\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": ranks},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    rank.send_signal(signal.SIGTERM)
    printed, _ = rank.communicate(timeout=20)
    assert rank.returncode == 128 + signal.SIGTERM
    assert printed.startswith(f"[rank 0] {outcome}: ")


def test_nothing_starts_a_thread_before_sigterm_is_blocked() -> None:
    """numpy and torch start threads as they are imported, and SIGTERM would end the process through one."""
    program = (
        "import sys, trainer.__main__, trainer.bench.text, trainer.host.logger, trainer.health.attempt\n"
        "trainer.__main__.make_parser()\n"
        "print([name for name in ('numpy', 'torch', 'pyarrow') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
