"""A cut network between four hosts of an elastic run: no part without the coordinator trains on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic import RUNS, Lab

from .lab import LAB, Fleet
from .test_elastic import ELASTIC, MODEL, undisturbed

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

HOSTS, STEPS, RUN_ID = 4, 4000, "partitions"
RUN_DIR = f"{RUNS}/{RUN_ID}"
CUT_SECONDS = 10.0  # in which the coordinator's side must train, and the other must not

# What is cut: (from, to) of packets that are dropped; the ranks that train then; what it is called.
BOTH = [(a, b) for side in ((1, 2), (3, 4)) for a in side for b in range(1, HOSTS + 1) if b not in side]
ALONE = [pair for other in range(2, HOSTS + 1) for pair in ((1, other), (other, 1))]
CUTS = [
    pytest.param(BOTH, 2, id="halves"),
    pytest.param([(3, 1)], 3, id="one-way"),
    pytest.param(ALONE, 1, id="the-coordinator-reaches-nobody"),
]


@pytest.fixture(scope="module")
def four(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Four hosts, set up, on which an elastic run trains."""
    lab = Lab(f"{LAB}-four", HOSTS, dataset, RUN_ID)
    playbooks = Fleet(tmp_path_factory.mktemp("runner"), None)
    try:
        playbooks.play("lab.yml", lab_state="up", lab_name=lab.name, lab_hosts=HOSTS)
        lab.play("setup.yml", data_dir=dataset)
        settings = {**MODEL, **ELASTIC, "steps": STEPS, "total_batch_size": 4096, "save_every": 50}
        lab.play("train.yml", run_id=RUN_ID, data_dir=dataset, checkpoint_copies=HOSTS, **settings)
        yield lab
    finally:
        playbooks.play("lab.yml", lab_state="down", lab_name=lab.name)


def addresses(lab: Lab) -> list[str]:
    shown = (lab.inside(host, "ip -4 -o address show eth0") for host in range(1, HOSTS + 1))
    return [line.split()[3].partition("/")[0] for line in shown]


def drop(lab: Lab, cut: list[tuple[int, int]], action: str) -> None:
    """Insert (I) or delete (D) the rules that drop the packets of a cut, each at the host that receives."""
    sources = addresses(lab)
    for source, target in cut:
        lab.inside(target, f"iptables -{action} INPUT -s {sources[source - 1]} -j DROP")


def status(lab: Lab) -> dict[str, int]:
    """Of the coordinator: ranks that train, and the step they have made (-1: none yet)."""
    found = json.loads(lab.inside(1, f"cat {RUN_DIR}/heartbeat-0.json"))
    return {"ranks": found["world_size"], "step": found["step"] if found.get("loss") is not None else -1}


def wait_for_ranks(lab: Lab, count: int, seconds: float = 240) -> int:
    """Wait until that many ranks have made a step together; returns it."""
    end, since = time.monotonic() + seconds, None
    while time.monotonic() < end:
        now = status(lab)
        if now["ranks"] != count or now["step"] < 0:
            since = None
        elif since is None:
            since = now["step"]
        elif now["step"] > since:
            assert now["step"] < STEPS, "the run has finished before"
            return now["step"]
        time.sleep(0.25)
    raise AssertionError(f"not {count} ranks within {seconds:.0f} s, but {status(lab)}")


def saved(lab: Lab, host: int) -> dict[int, dict[str, Any]]:
    """Step -> meta.json of each checkpoint on a host."""
    text = lab.inside(host, f"cat {RUN_DIR}/checkpoints/step_*/meta.json 2>/dev/null | tr -d '\\n' || true")
    metas = [json.loads(each) for each in text.replace("}{", "}\n{").splitlines()]
    return {meta["step"]: meta for meta in metas}


@pytest.mark.parametrize(("cut", "ranks"), CUTS)
def test_only_the_side_of_the_coordinator_trains(four: Lab, cut: list[tuple[int, int]], ranks: int) -> None:
    wait_for_ranks(four, HOSTS)
    drop(four, cut, "I")
    try:
        first = wait_for_ranks(four, ranks)
        before = {host: saved(four, host) for host in (3, 4)}
        time.sleep(CUT_SECONDS)
        assert status(four)["step"] > first
        if ranks < 3:
            assert {host: saved(four, host) for host in (3, 4)} == before, "a host that is cut off has saved"
        for host in range(2, HOSTS + 1):
            assert four.inside(host, f"ls {RUN_DIR}/metrics.jsonl 2>/dev/null || true") == ""
    finally:
        drop(four, cut, "D")
    wait_for_ranks(four, HOSTS)


def test_there_is_one_history(four: Lab, dataset: Path, tmp_path: Path) -> None:
    """All losses are those of an undisturbed run, and equal checkpoints of the hosts have equal weights."""
    four.play("stop.yml", run_id=RUN_ID)
    lines = map(json.loads, four.inside(1, f"cat {RUN_DIR}/metrics.jsonl").splitlines())
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    steps = [step for step, _ in losses]
    assert set(steps) == set(range(1, max(steps) + 1))
    run = {"total_batch_size": 4096, "num_iterations": STEPS}
    expected = undisturbed(dataset, tmp_path / "run", max(steps), **run)
    for step, loss in losses:
        assert loss == pytest.approx(expected[step - 1], rel=1e-10), f"step {step}"

    kept = [saved(four, host) for host in range(1, HOSTS + 1)]
    assert kept[0]
    assert any(kept[1:]), "no host has a copy"
    for metas in kept:
        for step, meta in metas.items():
            assert meta["loss"] == pytest.approx(expected[step - 1], rel=1e-10)
            # A step that was trained again by other ranks has other last digits.
            if steps.count(step) == 1 and step in kept[0]:
                assert meta["sha256"] == kept[0][step]["sha256"]
