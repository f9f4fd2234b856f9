"""An elastic run to whose three hosts something happens every 45 s, also to the coordinator.

Half an hour in `make test-faults`, and four minutes in `make test`, which compares only the losses around
changes of the members:
    NANOFLEET_FAULTS_MINUTES=3 pytest -s tests/e2e/test_soak.py  # a fourth for the hosts to return
NANOFLEET_FAULTS_SEED=2 makes other events happen.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.elastic import CALM_STEPS
from benchmarks.elastic_lab import RANK, RUNS, Lab
from benchmarks.elastic_soak import Soak, disturb, result

from .continued import check_losses
from .elastic_status import elastic_lab

MINUTES = float(os.environ.get("NANOFLEET_FAULTS_MINUTES", "30"))
WHOLE_MINUTES = 30.0  # from that on, all losses are compared
LONG_MINUTES, LEAST_GOODPUT = 25.0, 0.9
SEED = int(os.environ.get("NANOFLEET_FAULTS_SEED", "1"))
AGAIN = 8  # steps that may be trained again after a loss: copies are made every 2 s
HOSTS, STEPS, RUN_ID = 3, 100_000, "soak"
CPU_SHARE = 0.5  # of its core for each host: else one that starts would slow down another one
SETTINGS = {
    "steps": STEPS,
    "total_batch_size": 24576,
    "save_minutes": 0.12,
    "keep_checkpoints": 1000,
    "snapshot_seconds": "auto",
}

pytestmark = [
    pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300 * MINUTES + 3600),
]  # fmt: skip


@pytest.fixture
def lab(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, set up, on which an elastic run trains."""
    workdir = tmp_path_factory.mktemp("runner")
    with elastic_lab(workdir, "soak", HOSTS, dataset, RUN_ID, CPU_SHARE, **SETTINGS) as lab:
        yield lab


def test_a_disturbed_run_has_the_losses_of_an_undisturbed_one(
    lab: Lab, dataset: Path, tmp_path: Path
) -> None:
    for host in range(1, HOSTS + 1):
        limits = "{{.HostConfig.CpuQuota}} {{.HostConfig.CpuPeriod}}"
        quota, period = map(int, lab.podman("inspect", "--format", limits, lab.host(host)).split())
        assert quota == CPU_SHARE * period
    lab.wait(lambda: len(lab.steps) > CALM_STEPS, "the first steps")
    fetched, ended = tmp_path / "checkpoints", threading.Event()
    fetched.mkdir()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch_checkpoints, lab, fetched, ended)
        try:
            soak = disturb(lab, MINUTES, SEED, lambda line: print(line, flush=True))
        finally:
            ended.set()
        fetching.result()
    print(found := result(lab, soak), flush=True)
    if MINUTES >= LONG_MINUTES:  # a few events make a large difference in less
        assert found["goodput"] >= LEAST_GOODPUT
    lab.play("stop.yml", run_id=RUN_ID)
    fetch(lab, fetched)
    losses: dict[int, dict[int, float]] = {}
    for host in range(1, HOSTS + 1):
        assert lab.inside(host, f"{RANK} || true") == ""
        assert lab.inside(host, f"systemctl is-active nanofleet-{RUN_ID} || true").strip() == "inactive"
        lines = map(json.loads, lab.inside(host, f"cat {RUNS}/{RUN_ID}/metrics.jsonl").splitlines())
        losses[host] = {line["step"]: line["loss"] for line in lines if "loss" in line}
        assert list(losses[host]) == list(range(1, len(losses[host]) + 1)), f"host {host}: no step is missing"

    run = {"num_iterations": STEPS, "total_batch_size": SETTINGS["total_batch_size"]}
    near = None if MINUTES >= WHOLE_MINUTES else changed_steps(lab, soak)
    check_losses(tmp_path, dataset, losses, near, run_id=RUN_ID, sync="exact", **run)


def changed_steps(lab: Lab, soak: Soak) -> set[int]:
    """The steps around each change of the members: those that may be trained again, and the next one."""
    changes = [at for at, _ in lab.changes if soak.began < at <= soak.ended]
    assert changes
    last = [max(step for when, step in lab.steps if when <= at) for at in changes]
    return {near for step in last for near in range(step - AGAIN, step + 2)}


def fetch_checkpoints(lab: Lab, folder: Path, ended: threading.Event) -> None:
    """Fetch the checkpoints of all hosts again and again: a host removes those that its coordinator lacks."""
    while not ended.wait(5):
        fetch(lab, folder)


def fetch(lab: Lab, folder: Path) -> None:
    """Fetch the checkpoints of all hosts that are on; one that is removed meanwhile is left out."""
    new = folder / "new"
    for host in range(1, HOSTS + 1):
        with contextlib.suppress(SystemExit, OSError):
            for path in (lab.run_dir(host) / "checkpoints").glob("step_*"):
                if not (folder / path.name).exists():
                    shutil.rmtree(new, ignore_errors=True)
                    shutil.copytree(path, new)
                    new.rename(folder / path.name)
