"""A host that is set up while an elastic run trains on two others joins it, if it has the memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .continued import check_losses
from .lab import Fleet
from .test_elastic import ELASTIC, LAST, MODEL, RUN_DIR, RUN_ID, STEPS, Worker
from .three import Three

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]
UNIT = f"nanofleet-{RUN_ID}"
# The run lasts as long as the test.
SLOWER = {"total_batch_size": 8 * 3072, "save_every": 20, "keep_checkpoints": 1000}


@pytest.fixture
def home(three: Three, tmp_path: Path) -> Iterator[Fleet]:
    """Two of three hosts are a fleet, whose inventory gets the third one in the test.

    They serve no fleet afterwards; other modules make a fleet of two of them.
    """
    assert three.home.inventory is not None
    listed = tmp_path / "home" / "hosts.yml"
    listed.parent.mkdir()
    listed.write_text(three.home.inventory.read_text())
    fleet = Fleet(three.home.workdir, listed)
    yield fleet
    fleet.play("reset.yml", reset_confirm=True)


def test_a_new_host_joins_by_its_setup(three: Three, home: Fleet, dataset: Path, tmp_path: Path) -> None:
    worker = Worker(three)
    home.play("setup.yml", data_dir=dataset)
    home.play("train.yml", run_id=RUN_ID, data_dir=dataset, **{**MODEL, **ELASTIC, **SLOWER})
    assert home.inventory is not None
    assert three.all.inventory is not None
    listed, line = three.all.inventory.read_text(), f"ansible_host: {three.addresses[LAST - 1]}\n"
    small = f"{line}      fleet_memory: 500M\n"
    home.inventory.write_text(listed.replace(line, small))
    worker.has_ranks(2)
    refused = " ".join(home.play("setup.yml", fails=True, data_dir=dataset).stdout.split())
    assert f"1 finding; the active run was not changed. NF401 {three.name(LAST)} Depth 1 needs" in refused
    assert "the setting fleet_memory allows 0.5 GiB" in refused
    worker.has_ranks(2)

    home.inventory.write_text(listed)
    printed = " ".join(home.play("setup.yml", data_dir=dataset).stdout.split())
    assert f"Starting {three.name(LAST)} for the run {RUN_ID}, which trains on the others." in printed
    worker.has_ranks(3)
    address = three.addresses[LAST - 1]
    for host in (1, 2):
        assert address in three.inside(host, f"systemctl show -p IPAddressAllow {UNIT}")
        assert address in three.inside(host, f"cat /etc/nanofleet/{RUN_ID}.sh"), "after a boot too"

    worker.kill_rank()  # its unit starts the next one
    worker.has_ranks(2)
    worker.has_ranks(3)
    worker.podman("restart", "--time", "30")
    worker.has_ranks(2)
    worker.has_ranks(3)
    shown = " ".join(home.play("status.yml").stdout.split())
    assert three.name(LAST) in shown
    assert "no run directory" not in shown

    home.play("stop.yml", run_id=RUN_ID, leave=three.name(LAST))
    worker.has_ranks(2)
    again = home.play("setup.yml", data_dir=dataset).stdout
    assert "for the run" not in again, "a host that has left stays away"
    joined = " ".join(home.play("train.yml", run_id=RUN_ID).stdout.split())
    assert f"{three.name(LAST)} will join it" in joined
    worker.has_ranks(3)
    assert "is active at step" in " ".join(home.play("train.yml", run_id=RUN_ID).stdout.split())

    home.play("stop.yml", run_id=RUN_ID)
    last = int(json.loads(three.inside(1, f"cat {RUN_DIR}/outcome.json"))["step"])
    assert last < STEPS
    for host in (1, 2, LAST):
        assert three.inside(host, f"systemctl is-active {UNIT} || true") == "inactive"
        assert three.inside(host, f"ls -d /run/systemd/system.control/{UNIT}* 2>/dev/null || true") == ""
        assert three.inside(host, "ls /etc/nanofleet 2>/dev/null || true") == ""
    resumed = " ".join(home.play("train.yml", run_id=RUN_ID, steps=STEPS).stdout.split())
    assert f"on {', '.join(three.name(host) for host in (1, 2, LAST))}" in resumed
    worker.has_ranks(3)
    home.play("stop.yml", run_id=RUN_ID)

    lines = map(json.loads, three.inside(1, f"cat {RUN_DIR}/metrics.jsonl").splitlines())
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == list(range(1, max(losses) + 1))
    (tmp_path / "checkpoints").mkdir()
    command = ["podman", "cp", f"{three.name(1)}:{RUN_DIR}/checkpoints/.", str(tmp_path / "checkpoints")]
    subprocess.run(command, check=True)
    check_losses(tmp_path, dataset, {1: losses}, run_id=RUN_ID, sync="exact", **SLOWER)
