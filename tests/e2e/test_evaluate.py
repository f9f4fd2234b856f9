"""A checkpoint is evaluated by all hosts as by one process, continues, and brings its results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import LAB, ROOT, Fleet
from .test_serve import TINY

pytestmark = pytest.mark.lab

HOSTS = (f"{LAB}-1", f"{LAB}-2")
STATE = "/var/lib/nanofleet"
BUNDLE = ROOT / "tests" / "fixtures" / "core"
RUN = "evaluated"


@pytest.fixture(scope="module")
def trained(fleet: Fleet, dataset: Path) -> Iterator[str]:
    """A run of six steps; the bundle is in the data directory that setup.yml sends."""
    fleet.play("setup.yml", data_dir=dataset)  # the bundle is the only thing that is new
    shutil.copytree(BUNDLE, dataset / "core")
    fleet.play("setup.yml", data_dir=dataset)
    fleet.play("train.yml", run_id=RUN, steps=6, checkpoint_copies=1, **TINY)
    fleet.play("playbooks/watch.yml", run_id=RUN)
    yield RUN
    shutil.rmtree(dataset / "core")
    for host in HOSTS:
        fleet.on(host, f"rm -rf {STATE}/data/core {STATE}/core {STATE}/runs/{RUN} {STATE}/runs/eval:{RUN}")


def results(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / RUN / "eval" / "step_000006" / "eval.json").read_text())["parts"])


def test_setup_sends_the_bundle_and_verifies_it(fleet: Fleet, dataset: Path, trained: str) -> None:
    assert fleet.play("setup.yml", data_dir=dataset).changed() == 0
    there = f"cd {STATE}/data/core && find . -type f | sort | xargs sha256sum"
    here = subprocess.run(
        there.split("&& ")[1], shell=True, cwd=BUNDLE, capture_output=True, text=True, check=True
    )
    assert fleet.on(HOSTS[1], there).split() == here.stdout.split()
    fleet.on(HOSTS[1], f"sh -c 'echo >> {STATE}/data/core/core.yaml'")
    fleet.play("setup.yml", data_dir=dataset)
    assert fleet.on(HOSTS[1], there).split() == here.stdout.split()
    held = fleet.on(HOSTS[0], "ss -Hltn sport = :29500")
    assert held == "", "setup.yml stopped the listener on the host where nothing differed"


def test_two_hosts_find_what_one_process_finds(
    fleet: Fleet, dataset: Path, trained: str, tmp_path: Path
) -> None:
    printed = fleet.play("eval.yml", run_id=RUN, fetch_to=tmp_path).stdout
    assert "evaluated by 2 ranks" in printed
    found = results(tmp_path)
    assert (tmp_path / RUN / "eval" / "step_000006" / "core.csv").read_text().startswith("Task")
    assert fleet.on(HOSTS[1], f"ls {STATE}/runs/{RUN}/checkpoints 2>/dev/null || true") == "", "rank 0 has it"
    fleet.play("fetch.yml", run_id=RUN, fetch_to=tmp_path)
    checkpoint = tmp_path / RUN / HOSTS[0] / "checkpoints" / "step_000006"
    command = [sys.executable, "-m", "trainer", "eval", "--checkpoint", str(checkpoint), "--bpb", "--sample"]
    command += ["--data-dir", str(dataset), "--core", str(BUNDLE), "--out", str(tmp_path / "alone")]
    subprocess.run(command, cwd=ROOT, check=True)
    alone = json.loads((tmp_path / "alone" / "eval.json").read_text())["parts"]
    assert found["core"] == alone["core"]
    assert found["sample"] == alone["sample"]
    assert found["bpb"]["val_bpb"] == pytest.approx(alone["bpb"]["val_bpb"], rel=1e-6)


@pytest.mark.slow
def test_finished_tasks_are_kept_and_another_limit_is_another_evaluation(
    fleet: Fleet, trained: str, tmp_path: Path
) -> None:
    fleet.play("eval.yml", run_id=RUN, fetch_to=tmp_path)
    printed = fleet.play("eval.yml", run_id=RUN, fetch_to=tmp_path).stdout
    assert "were finished before" in printed
    fleet.play("eval.yml", run_id=RUN, fetch_to=tmp_path, core_max_per_task=4, core=BUNDLE)
    assert results(tmp_path)["core"]["max_per_task"] == 4


def test_what_cannot_be_evaluated_is_refused(fleet: Fleet, trained: str, tmp_path: Path) -> None:
    printed = " ".join(
        fleet.play("eval.yml", fails=True, run_id=RUN, checkpoint="step_000004").stdout.split()
    )
    assert f"NF450: The coordinator, {HOSTS[0]}, has no checkpoint step_000004 of the run {RUN}" in printed
    assert "-e checkpoint=step_000006" in printed
    printed = " ".join(fleet.play("eval.yml", fails=True, run_id=RUN, core=tmp_path).stdout.split())
    assert f"NF617: There is no CORE bundle in {tmp_path}" in printed
    fleet.on(HOSTS[1], f"mv {STATE}/data/core /tmp/core")
    try:
        printed = " ".join(fleet.play("eval.yml", fails=True, run_id=RUN).stdout.split())
    finally:
        fleet.on(HOSTS[1], f"mv /tmp/core {STATE}/data/core")
    assert f"NF452: The CORE bundle in {STATE}/data/core" in printed
    assert f"not the same on all hosts; it is missing on {HOSTS[1]}." in printed
