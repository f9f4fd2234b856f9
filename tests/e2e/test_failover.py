"""An elastic run on three hosts whose coordinator is killed, leaves, loses power, and is rebooted.

The tracker is on one of these hosts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.elastic_lab import RANK, RUNS, Lab

from .elastic_status import Run, elastic_lab
from .test_elastic import undisturbed

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

HOSTS, STEPS, RUN_ID = 3, 4000, "failover"
RUN_DIR = f"{RUNS}/{RUN_ID}"
# Few steps: from 1,000 on, training has amplified rounding to more than the tolerance.
SETTINGS = {"steps": STEPS, "total_batch_size": 12288, "save_every": 20, "tracker": "mlflow"}
TRACKER_HOST = 1  # which is the coordinator at first
TRACKED = """
import json, sqlite3
server = sqlite3.connect("file:/var/lib/nanofleet/mlflow/mlflow.db?mode=ro", uri=True)
rows = server.execute("select run_uuid, step, value from metrics where key = 'train/step_loss'").fetchall()
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def lab(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, set up, on which an elastic run trains."""
    workdir = tmp_path_factory.mktemp("runner")
    with elastic_lab(workdir, "fail", HOSTS, dataset, RUN_ID, **SETTINGS) as lab:
        yield lab


def test_the_run_continues_whatever_happens_to_its_coordinator(lab: Lab) -> None:
    run = Run(lab, STEPS)
    assert run.trains(HOSTS) == 1, "a run begins on its first host"
    assert run.term(1) == 0

    lab.inside(1, f"kill -9 $({RANK})")  # its unit starts the next one
    first = run.trains(HOSTS)
    assert run.term(first) > 0

    lab.play("stop.yml", run_id=RUN_ID, leave=lab.host(first))
    second = run.trains(HOSTS - 1, without=first)
    lab.play("train.yml", run_id=RUN_ID)
    assert run.trains(HOSTS) == second, "who joins does not become the coordinator"

    lab.podman("kill", lab.host(second))
    third = run.trains(HOSTS - 1, without=second)
    lab.podman("start", lab.host(second))
    assert run.trains(HOSTS) == third

    lab.podman("restart", "--time", "30", lab.host(third))
    run.trains(HOSTS)

    lab.podman("kill", lab.host(TRACKER_HOST))
    run.trains(HOSTS - 1, without=TRACKER_HOST)
    lab.podman("start", lab.host(TRACKER_HOST))
    run.trains(HOSTS)

    for host in range(1, HOSTS + 1):
        lab.podman("kill", lab.host(host))
    for host in range(1, HOSTS + 1):
        lab.podman("start", lab.host(host))
    run.trains(HOSTS)
    assert len({run.term(host) for host in range(1, HOSTS + 1)}) == 1
    newest = max(run.steps())
    lab.wait(lambda: max(step for _, step, _ in tracked_by(lab)) >= newest, "the tracker has caught up")


def tracked_by(lab: Lab) -> list[tuple[str, int, float]]:
    """(MLflow run, step, loss) of all steps that the server has."""
    return json.loads(lab.inside(TRACKER_HOST, f"python3 -c {shlex.quote(TRACKED)}"))


def test_there_is_one_history(lab: Lab, dataset: Path, tmp_path: Path) -> None:
    """All losses are those of an undisturbed run, and each host that trained to the end has all of them."""
    lab.play("stop.yml", run_id=RUN_ID)
    expected: list[float] = []
    for host in range(1, HOSTS + 1):
        lines = map(json.loads, lab.inside(host, f"cat {RUN_DIR}/metrics.jsonl").splitlines())
        losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        last, _ = losses[-1]
        assert [step for step, _ in losses] == list(range(1, last + 1)), f"host {host}"
        if not expected:
            run = {"num_iterations": STEPS, "total_batch_size": SETTINGS["total_batch_size"]}
            expected = undisturbed(dataset, tmp_path / "run", last + HOSTS, **run)
        for step, loss in losses:
            assert loss == pytest.approx(expected[step - 1], rel=1e-10), f"step {step} on host {host}"


def test_the_tracker_has_all_steps_although_its_host_was_off(lab: Lab) -> None:
    metrics = lab.inside(TRACKER_HOST, f"cat {RUN_DIR}/metrics.jsonl").splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, metrics) if "loss" in line}
    tracked = tracked_by(lab)
    assert len({run for run, _, _ in tracked}) == 1, "one run on the server for all coordinators"
    assert {step for _, step, _ in tracked} == set(losses)
    for _, step, loss in tracked:
        assert loss == pytest.approx(losses[step], rel=1e-10), f"step {step}"
