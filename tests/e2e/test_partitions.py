"""A cut network between four hosts of an elastic run: no part without a majority trains on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic_lab import RUNS, Lab
from trainer.elastic.agreement import QUORUM_SECONDS

from .elastic_status import Run, elastic_lab
from .test_elastic import undisturbed

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

HOSTS, STEPS, RUN_ID = 4, 4000, "partitions"
RUN_DIR = f"{RUNS}/{RUN_ID}"
# Few steps: from 1,000 on, training has amplified rounding to more than the tolerance.
SETTINGS = {"steps": STEPS, "total_batch_size": 16384, "save_every": 20, "checkpoint_copies": HOSTS}
CUT_SECONDS = 10.0  # in which the side with the majority must train, and the other must not

# What is cut: (from, to) of packets that are dropped. Host 1 is the coordinator.
HALVES = [(a, b) for side in ((1, 2), (3, 4)) for a in side for b in range(1, HOSTS + 1) if b not in side]


@pytest.fixture(scope="module")
def four(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Four hosts, set up, on which an elastic run trains."""
    workdir = tmp_path_factory.mktemp("runner")
    with elastic_lab(workdir, "four", HOSTS, dataset, RUN_ID, **SETTINGS) as lab:
        yield lab


def addresses(lab: Lab) -> list[str]:
    shown = (lab.inside(host, "ip -4 -o address show eth0") for host in range(1, HOSTS + 1))
    return [line.split()[3].partition("/")[0] for line in shown]


def drop(lab: Lab, cut: list[tuple[int, int]], action: str) -> None:
    """Insert (I) or delete (D) the rules that drop the packets of a cut, each at the host that receives."""
    sources = addresses(lab)
    for source, target in cut:
        lab.inside(target, f"iptables -{action} INPUT -s {sources[source - 1]} -j DROP")


def saved(lab: Lab, host: int) -> dict[int, dict[str, Any]]:
    """Step -> meta.json of each checkpoint on a host."""
    text = lab.inside(host, f"cat {RUN_DIR}/checkpoints/step_*/meta.json 2>/dev/null | tr -d '\\n' || true")
    metas = [json.loads(each) for each in text.replace("}{", "}\n{").splitlines()]
    return {meta["step"]: meta for meta in metas}


@contextmanager
def dropped(lab: Lab, cut: list[tuple[int, int]]) -> Iterator[None]:
    """Context in which the packets of a cut are dropped."""
    drop(lab, cut, "I")
    try:
        yield
    finally:
        drop(lab, cut, "D")


@pytest.mark.parametrize("one_way", [(3, 1), (1, 3)], ids=["to the coordinator", "from the coordinator"])
def test_a_worker_whose_packets_are_lost_one_way_is_left_behind(four: Lab, one_way: tuple[int, int]) -> None:
    run = Run(four, STEPS)
    first = run.trains(HOSTS)
    assert first == 1, "a run begins on its first host"
    with dropped(four, [one_way]):
        assert run.trains(HOSTS - 1) == first
    assert run.trains(HOSTS) == first


def test_no_half_trains(four: Lab) -> None:
    """Also for so long that the coordinator gives up: then nobody coordinates until the cut ends."""
    run = Run(four, STEPS)
    run.trains(HOSTS)
    with dropped(four, HALVES):
        time.sleep(10)
        reached = max(run.steps())
        assert run.is_still(CUT_SECONDS)
        time.sleep(QUORUM_SECONDS)
        assert run.is_still(CUT_SECONDS)
        # A host that has lost its coordinator saves its copy of an earlier step.
        assert all(step <= reached for host in run.hosts for step in saved(four, host))
    run.trains(HOSTS)


def test_a_coordinator_that_reaches_nobody_is_replaced(four: Lab) -> None:
    run = Run(four, STEPS)
    before = run.trains(HOSTS)
    alone = [pair for other in run.hosts if other != before for pair in ((before, other), (other, before))]
    with dropped(four, alone):
        elected = run.trains(HOSTS - 1, without=before)
        own, kept = run.steps()[before - 1], saved(four, before)
        time.sleep(CUT_SECONDS)
        assert run.steps()[before - 1] == own, "it trains alone"
        assert saved(four, before) == kept, "it saves alone"
        assert run.term(elected) > run.term(before)
    assert run.trains(HOSTS) == elected
    assert len({run.term(host) for host in run.hosts}) == 1


def test_there_is_one_history(four: Lab, dataset: Path, tmp_path: Path) -> None:
    """All losses are those of an undisturbed run, and equal checkpoints of the hosts have equal weights."""
    four.play("stop.yml", run_id=RUN_ID)
    found = [four.inside(host, f"cat {RUN_DIR}/metrics.jsonl").splitlines() for host in range(1, HOSTS + 1)]
    by_host = [[line for line in map(json.loads, lines) if "loss" in line] for lines in found]
    losses = [(line["step"], line["loss"]) for lines in by_host for line in lines]
    steps = [line["step"] for line in max(by_host, key=lambda lines: int(lines[-1]["step"]))]
    assert steps == list(range(1, len(steps) + 1))
    run = {"total_batch_size": SETTINGS["total_batch_size"], "num_iterations": STEPS}
    expected = undisturbed(dataset, tmp_path / "run", max(steps), **run)
    for step, loss in losses:
        assert loss == pytest.approx(expected[step - 1], rel=1e-10), f"step {step}"

    kept = [saved(four, host) for host in range(1, HOSTS + 1)]
    assert sum(map(bool, kept)) > 1, "no host has a copy"
    for metas in kept:
        for step, meta in metas.items():
            assert meta["loss"] == pytest.approx(expected[step - 1], rel=1e-10)
    # All hosts keep copies of the checkpoints: they have one history.
    copies = {step: [metas[step] for metas in kept if step in metas] for metas in kept for step in metas}
    assert max(map(len, copies.values())) > 1, "no checkpoint has a copy; that of a stop has none"
    for step, metas_of_step in copies.items():
        for key in ("sha256", "terms"):
            assert len({json.dumps(meta[key], sort_keys=True) for meta in metas_of_step}) == 1, (step, key)
