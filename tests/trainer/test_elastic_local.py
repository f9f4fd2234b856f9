"""Elastic runs with sync=local: the others keep their own parameters when a rank is lost.

The shared parameters are compared after every step, so ranks that differ in one bit end the run.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_run import SLOW, STEPS, ElasticRun
from test_failover import SLOWER, FailoverRun

pytestmark = pytest.mark.processes
LOCAL = {"sync": "local", "local_steps": 5, "digest_every": 1}

Begin = Callable[..., ElasticRun]


@pytest.fixture
def begin(data_dir: Path, tmp_path: Path) -> Iterator[Begin]:
    runs: list[ElasticRun] = []

    def begin(
        world_size: int, kind: type[ElasticRun] = ElasticRun, faults: Mapping[int, str] = {}, **settings: Any
    ) -> ElasticRun:
        runs.append(kind(data_dir, tmp_path, world_size, **{**LOCAL, **settings}))
        for rank in range(world_size):
            runs[-1].start(rank, faults.get(rank, SLOW))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def check_steps(run: ElasticRun) -> None:
    """The coordinator has logged each step once, and the loss has fallen without a jump."""
    lines = map(json.loads, (run.run_dir(run.leader) / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    last = [loss for _, loss in found]
    assert all(after < before + 0.5 for before, after in itertools.pairwise(last)), last
    assert last[-1] < last[0] - 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"local_bits": 2, "local_delay": 3},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"local_topk": 64}, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_costs_the_others_no_step_and_joins_again(begin: Begin, settings: dict[str, Any]) -> None:
    run = begin(3, **settings)
    run.reach(13)
    run.lose(2)
    assert run.has_ranks(2) < 10
    run.start(2)
    run.has_ranks(3)
    assert "MB from the coordinator; joining the run" in run.log(2)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.has_ranks(2) < 10
    assert "continue the run without this one" in run.finish(1)["reason"]
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.finish(2)["outcome"] == "finished", run.log(2)
    assert "trained again" not in run.log(0)
    check_steps(run)


@pytest.mark.slow
def test_a_rank_that_is_slow_for_longer_than_the_grace_is_left_behind(begin: Begin) -> None:
    run = begin(3, faults={2: "sleep 20 8"}, local_grace=3)
    run.reach(19)
    assert run.has_ranks(2) < 15
    assert "still computes a step" in run.log(0)
    assert run.finish(2)["outcome"] == "retryable"
    run.start(2)
    run.has_ranks(3)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_steps(run)


@pytest.mark.slow
def test_a_coordinator_that_is_slow_for_longer_than_the_grace_is_replaced(begin: Begin) -> None:
    run = begin(3, FailoverRun, faults={0: "sleep 20 8"}, local_grace=3)
    run.reach(19)
    run.leader = 1
    assert run.has_ranks(2) < 15
    ended = run.finish(0)
    assert ended["outcome"] == "retryable"
    assert "still computes a step" in ended["reason"]
    run.start(0, SLOWER)
    run.has_ranks(3)
    for rank in (1, 0, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
        assert "trained again" not in run.log(rank)
    check_steps(run)


def test_the_others_continue_when_the_coordinator_is_lost(begin: Begin) -> None:
    run = begin(3, FailoverRun)
    run.reach(13)
    run.lose(0)
    run.leader = 1
    run.has_ranks(2)
    assert "in the memory of this host" in run.log(1)
    # A coordinator without a state of its own would continue from this.
    run.wait_until(lambda: any((run.run_dir(2) / "checkpoints").glob("step_*")), "a checkpoint on the third")
    run.start(0, SLOWER)
    run.has_ranks(3)
    for rank in (1, 0, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
        assert "trained again" not in run.log(rank)
    assert "MB from the coordinator" not in run.log(2)
    assert "this rank missed" not in run.log(2)
    check_steps(run)


@pytest.mark.slow
def test_a_rank_that_was_frozen_joins_again_in_the_same_process(begin: Begin) -> None:
    run = begin(3, FailoverRun)
    run.reach(13)
    run.processes[2].send_signal(signal.SIGSTOP)
    run.has_ranks(2)
    run.reach(30)
    run.processes[2].send_signal(signal.SIGCONT)
    run.has_ranks(3)
    for rank in (0, 1, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
    assert run.log(2).count("Importing torch") <= 1
    check_steps(run)
