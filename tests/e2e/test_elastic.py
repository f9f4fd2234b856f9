"""An elastic run on three hosts: a worker is killed, frozen, stopped and rebooted while the others train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .lab import ROOT
from .three import NAME, Three

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]

RUN_ID, STEPS, LAST = "elastic", 1500, 3
RUN_DIR = f"/var/lib/nanofleet/runs/{RUN_ID}"
MODEL = {
    "depth": 1, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "total_batch_size": 3072,
    "device_batch_size": 8, "warmup_steps": 1, "eval_tokens": 1024, "eval_every": 0, "sample_every": 0,
    "save_minutes": 0, "dtype": "float64", "tracker": "none",
    # With the default rates, one rank and three differ by 1e-3 after 700 of these steps, without any change:
    # training amplifies the last digit. With a tenth of them, by 1e-12 after all.
    "matrix_lr": 0.002, "embedding_lr": 0.02, "unembedding_lr": 0.0005, "scalar_lr": 0.02,
}  # fmt: skip
LONGER = {"total_batch_size": 6144}  # longer steps; with more steps, training would amplify the last digit
ELASTIC = {"elastic": True, "snapshot_seconds": 5, "sync": "exact", "steps": STEPS, "doctor": "never"}


class Worker:
    """The last host of the lab, to which everything happens, and what rank 0 reports of the run."""

    def __init__(self, three: Three) -> None:
        self.three = three

    def podman(self, *words: str) -> None:
        environment = {**os.environ, "CONTAINERS_CONF": str(ROOT / ".lab" / NAME / "containers.conf")}
        command = ["podman", *words, self.three.name(LAST)]
        subprocess.run(command, env=environment, check=True, capture_output=True)

    def kill_rank(self) -> None:
        pids = self.three.inside(LAST, "pgrep -u nanofleet -f -- '-u -m trainer train'").split()
        assert len(pids) == 1, pids
        self.three.inside(LAST, f"kill -9 {pids[0]}")

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.three.inside(1, f"cat {RUN_DIR}/heartbeat-0.json")))

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = 240) -> float:
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {what}"
            time.sleep(0.25)
        return time.monotonic() - began

    def has_ranks(self, count: int) -> None:
        """Wait until that many ranks train, and have made a step together."""

        def trains() -> bool:
            status = self.status()
            assert status["step"] < STEPS, f"the run has finished before {count} ranks trained"
            return bool(status["world_size"] == count and status.get("loss") is not None)

        self.wait(trains, f"{count} ranks")
        step = self.status()["step"]
        self.wait(lambda: self.status()["step"] > step, "a step")


def is_shown(three: Three, host: int, command: str, expected: str) -> bool:
    return three.inside(host, command) == expected


def undisturbed(data_dir: Path, run_dir: Path, last: int = STEPS, **others: object) -> list[float]:
    """The losses of one rank on this machine, to the step `last`. others: settings other than MODEL's."""
    command = [
        sys.executable,
        "-m",
        "trainer",
        "train",
        "--data-dir",
        str(data_dir),
        "--run-dir",
        str(run_dir),
    ]
    for name, value in {**MODEL, "num_iterations": STEPS, **others}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    losses: list[float] = []
    while len(losses) < last:
        ended = process.poll() is not None  # before the file is read, which then is complete
        text = (run_dir / "metrics.jsonl").read_text() if (run_dir / "metrics.jsonl").exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        losses = [line["loss"] for line in lines if "loss" in line]
        assert not ended or len(losses) >= last, f"it ended after {len(losses)} steps"
        time.sleep(0.5)
    process.kill()
    process.wait()
    return losses


@pytest.fixture
def all_three(three: Three) -> Iterator[Three]:
    """The three hosts, which serve no fleet afterwards; other modules make a fleet of two of them."""
    yield three
    three.all.play("reset.yml", reset_confirm=True, reset_force=True)


def test_a_worker_leaves_and_returns_in_every_way(all_three: Three, dataset: Path, tmp_path: Path) -> None:
    three = all_three
    worker = Worker(three)
    three.all.play("setup.yml", data_dir=dataset)
    three.all.play("train.yml", run_id=RUN_ID, data_dir=dataset, **{**MODEL, **ELASTIC, **LONGER})

    worker.kill_rank()  # its unit starts the next one
    worker.has_ranks(2)
    worker.has_ranks(3)

    worker.podman("pause")
    worker.has_ranks(2)
    worker.podman("unpause")
    worker.has_ranks(3)

    again = f"cat {RUN_DIR}/train.log | grep -c 'trained again' || true"
    before = three.inside(1, again)
    left = three.all.play("stop.yml", run_id=RUN_ID, leave=three.name(LAST)).stdout
    assert f"{three.name(LAST)} left the run {RUN_ID}, which continues on" in " ".join(left.split())
    worker.has_ranks(2)
    assert three.inside(LAST, "ls /etc/nanofleet 2>/dev/null || true") == "", "it stays away after a boot"
    joined = three.all.play("train.yml", run_id=RUN_ID).stdout
    assert f"{three.name(LAST)} will join it" in " ".join(joined.split())
    worker.has_ranks(3)

    three.inside(LAST, f"systemctl stop nanofleet-{RUN_ID}")
    worker.has_ranks(2)
    three.inside(LAST, f"systemctl start nanofleet@{RUN_ID}")
    worker.has_ranks(3)

    sleeps = "-p Requires=sleep.target -p After=sleep.target sleep 8"  # as systemd-suspend.service
    three.inside(LAST, f"systemd-run --quiet --no-block {sleeps}")
    worker.has_ranks(2)
    worker.has_ranks(3)

    worker.podman("restart", "--time", "30")
    worker.has_ranks(3)
    assert three.inside(1, again) == before, "no step is lost when a host leaves in order"

    outcome = f"cat {RUN_DIR}/outcome.json 2>/dev/null || echo '{{}}'"
    worker.wait(lambda: json.loads(three.inside(1, outcome)).get("outcome") == "finished", "the end", 1800)
    expected = undisturbed(dataset, tmp_path / "run", **LONGER)
    lines = map(json.loads, three.inside(1, f"cat {RUN_DIR}/metrics.jsonl").splitlines())
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    for step, loss in found:
        assert loss == pytest.approx(expected[step - 1], rel=1e-10), f"step {step}"

    units = "systemctl list-units --plain --no-legend 'nanofleet-*.service' | grep -v tracker"
    ended = f"! systemctl is-active -q nanofleet-{RUN_ID} && echo ended || true"
    for host in (1, 2, LAST):
        worker.wait(partial(is_shown, three, host, ended, "ended"), f"the end on host {host}", 60)
        assert three.inside(host, f"{units} || true") == ""
        assert three.inside(host, "pgrep -u nanofleet -af 'trainer [t]rain' || true") == ""
        assert three.inside(host, "ls /etc/nanofleet 2>/dev/null || true") == "", "nothing returns at a boot"
        assert 29500 not in three.listeners(host)
        three.inside(host, f"rm -r {RUN_DIR}")
