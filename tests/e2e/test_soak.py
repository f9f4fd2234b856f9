"""An elastic run of half an hour to whose three hosts something happens every 45 s, also to the coordinator.

NANOFLEET_FAULTS_MINUTES=6 pytest -s tests/e2e/test_soak.py  # shorter; _SEED: other events
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.elastic import CALM_STEPS, RANK, RUNS, Lab
from benchmarks.elastic_soak import disturb, result

from .elastic_status import elastic_lab
from .test_elastic import undisturbed

MINUTES = float(os.environ.get("NANOFLEET_FAULTS_MINUTES", "30"))
SEED = int(os.environ.get("NANOFLEET_FAULTS_SEED", "1"))
HOSTS, STEPS, RUN_ID = 3, 100_000, "soak"
# The rounding of other members grows with the steps, in the gradients of the same rows.
EXACT_STEPS = 4000

pytestmark = [
    pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240 * MINUTES + 3600),
]  # fmt: skip


@pytest.fixture
def lab(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, set up, on which an elastic run trains."""
    workdir = tmp_path_factory.mktemp("runner")
    with elastic_lab(workdir, "soak", HOSTS, dataset, RUN_ID, steps=STEPS, save_minutes=1) as lab:
        yield lab


def test_a_disturbed_run_has_the_losses_of_an_undisturbed_one(
    lab: Lab, dataset: Path, tmp_path: Path
) -> None:
    lab.wait(lambda: len(lab.steps) > CALM_STEPS, "the first steps")
    soak = disturb(lab, MINUTES, SEED, lambda line: print(line, flush=True))
    found = result(lab, soak)
    print(found, flush=True)
    lab.play("stop.yml", run_id=RUN_ID)
    for host in range(1, HOSTS + 1):
        assert lab.inside(host, f"{RANK} || true") == ""
        assert lab.inside(host, f"systemctl is-active nanofleet-{RUN_ID} || true").strip() == "inactive"

    by_host: dict[int, list[tuple[int, float]]] = {}
    for host in range(1, HOSTS + 1):
        lines = map(json.loads, lab.inside(host, f"cat {RUNS}/{RUN_ID}/metrics.jsonl").splitlines())
        by_host[host] = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        last = max(step for step, _ in by_host[host])
        assert {step for step, _ in by_host[host]} == set(range(1, last + 1)), f"host {host}"
    last = max(step for losses in by_host.values() for step, _ in losses)
    expected = undisturbed(dataset, tmp_path / "run", last, num_iterations=STEPS)
    for host, losses in by_host.items():
        for step, loss in losses:
            tolerance = 1e-10 if step <= EXACT_STEPS else 1e-6
            assert loss == pytest.approx(expected[step - 1], rel=tolerance), f"step {step} on host {host}"
