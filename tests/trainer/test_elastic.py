"""Elastic runs on real processes: ranks are killed, frozen, ended and started while the others train.

Each case compares every loss with that of a run of one rank without any change.
"""

from __future__ import annotations

import operator
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import losses
from elastic_run import CALM, SLOW, STEPS, ElasticRun, check_losses

from trainer.__main__ import main
from trainer.checkpoint import storage
from trainer.elastic.membership import LOST_STORE_SECONDS

pytestmark = pytest.mark.processes

Begin = Callable[..., ElasticRun]


@pytest.fixture
def elastic(data_dir: Path, tmp_path: Path) -> Iterator[Begin]:
    runs: list[ElasticRun] = []

    def begin(world_size: int, faults: Sequence[str] = (), **settings: Any) -> ElasticRun:
        runs.append(ElasticRun(data_dir, tmp_path, world_size, **settings))
        for rank in range(world_size):
            runs[-1].start(rank, faults[rank] if faults else SLOW)
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def meta(checkpoint: Path) -> dict[str, Any]:
    return storage.read_meta(checkpoint, files=())


@pytest.fixture(scope="module")
def undisturbed(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank that nobody disturbs."""
    from conftest import train_here

    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train_here(data_dir, run_dir, **CALM, num_iterations=STEPS)
    return losses(run_dir)


def test_a_killed_rank_is_left_behind_and_joins_again(elastic: Begin, undisturbed: list[float]) -> None:
    run = elastic(3, snapshot_seconds=1)
    run.reach(15)
    before = [run.resources(rank) for rank in (0, 1)]
    run.lose(2)
    assert run.has_ranks(2) < 10
    run.start(2)
    run.has_ranks(3)
    for rank in (0, 1):  # also of collectives that a live rank has given up: Gloo waits minutes for those
        run.wait_until(
            lambda rank=rank: max(map(operator.sub, run.resources(rank), before[rank])) <= 2,
            f"threads and files of rank {rank} as before",
            seconds=20,
        )
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.finish(2)["outcome"] == "finished"
    assert run.finish(1)["outcome"] == "finished"
    assert run.log(1).count("Importing torch") <= 1
    check_losses(run, undisturbed)


def test_a_host_that_is_added_trains_with_the_others(elastic: Begin, undisturbed: list[float]) -> None:
    """The run started with two hosts. A third joins it, is killed, and joins again."""
    run = elastic(2, snapshot_seconds=1)
    run.reach(15)
    run.start(2)
    run.has_ranks(3)
    run.lose(2)
    assert run.has_ranks(2) < 10
    run.start(2)
    run.has_ranks(3)
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.finish(1)["outcome"] == "finished"
    assert run.finish(2)["outcome"] == "finished", run.log(2)
    check_losses(run, undisturbed)


@pytest.mark.parametrize("sync", ["dense", "fast"])
@pytest.mark.slow
def test_other_modes_continue_too(elastic: Begin, undisturbed: list[float], sync: str) -> None:
    run = elastic(2, snapshot_seconds=1, sync=sync)
    run.reach(15)
    run.processes[1].kill()
    run.has_ranks(1)
    run.start(1)
    run.has_ranks(2)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed, 1e-10 if sync == "dense" else 1e-3)


def test_a_rank_that_is_asked_to_end_leaves_without_a_lost_step(
    elastic: Begin, undisturbed: list[float]
) -> None:
    run = elastic(3, snapshot_seconds=1000)
    run.reach(15)
    run.processes[2].send_signal(signal.SIGTERM)
    assert run.has_ranks(2) < 10
    assert "continue the run without this one" in run.finish(2)["reason"]
    assert "trained again" not in run.log(0)
    run.start(2)
    run.has_ranks(3)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


def test_a_frozen_rank_is_left_behind_and_ends_when_it_wakes(
    elastic: Begin, undisturbed: list[float]
) -> None:
    run = elastic(3, snapshot_seconds=1)
    run.reach(15)
    run.processes[1].send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    assert run.has_ranks(2) < 15
    time.sleep(max(0.0, frozen + LOST_STORE_SECONDS + 1 - time.monotonic()))  # it was not the store
    run.processes[1].send_signal(signal.SIGCONT)
    end = run.finish(1)
    assert (end["outcome"], "continue without" in end["reason"]) == ("retryable", True), end
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


def test_a_rank_that_freezes_while_a_copy_is_sent_does_not_hold_up_the_others(
    elastic: Begin, undisturbed: list[float]
) -> None:
    """Their transfers with it stay in flight, until its connections close at the end of the test."""
    run = elastic(3, (SLOW, SLOW, "snapshot 2 600"), snapshot_seconds=1)
    run.reach(25)
    run.processes[2].send_signal(signal.SIGSTOP)
    assert run.has_ranks(2) < 15
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


def test_the_end_of_the_coordinator_ends_the_others(elastic: Begin) -> None:
    run = elastic(3)
    run.reach(10)
    run.processes[0].kill()
    for rank in (1, 2):
        end = run.finish(rank)
        assert end["outcome"] == "retryable", end


def check_refusal(run: ElasticRun, undisturbed: list[float], *words: str, **different: Any) -> None:
    """A rank that returns with something different is refused in these words; the others do not notice."""
    run.reach(15)
    run.processes[1].send_signal(signal.SIGTERM)
    run.has_ranks(1)
    run.finish(1)
    changes = run.log(0).count("The ranks continue")
    run.start(1, **different)
    end = run.finish(1)
    assert end["outcome"] == "final"
    for word in words:
        assert word in end["reason"], end
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.log(0).count("The ranks continue") == changes
    check_losses(run, undisturbed)


def test_a_rank_that_differs_is_refused(elastic: Begin, undisturbed: list[float]) -> None:
    check_refusal(elastic(2), undisturbed, "config.seed", "host-2", seed=7)


@pytest.mark.slow
def test_a_rank_with_other_data_is_refused(elastic: Begin, undisturbed: list[float], tmp_path: Path) -> None:
    source, other, draw = tmp_path / "text", tmp_path / "data", random.Random(8)
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("".join(draw.choices("abcdefgh .\n", k=2000)))
    assert main(["prepare", "--source", str(source), "--out", str(other), "--vocab-size", "300"]) == 0
    check_refusal(elastic(2), undisturbed, "manifest is", "host-2", data_dir=other)


def test_a_rank_with_another_secret_is_refused(elastic: Begin, undisturbed: list[float]) -> None:
    run = elastic(2)
    check_refusal(run, undisturbed, "the coordinator has another secret", secret=b"\x02" * 32)
    assert run.log(0).count("The host of rank 1 has another secret") == 1


def test_with_fewer_hosts_than_the_minimum_the_run_waits(elastic: Begin, undisturbed: list[float]) -> None:
    run = elastic(2, min_hosts=2, save_every=10)
    run.reach(15)
    run.processes[1].kill()
    end = run.finish()
    assert (end["outcome"], "min_hosts is 2" in end["reason"]) == ("retryable", True), end
    for rank in (0, 1):
        run.start(rank)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


def test_a_rank_that_dies_as_it_joins_costs_seconds(elastic: Begin, undisturbed: list[float]) -> None:
    """Also where the coordinator was alone, and had no process group."""
    run = elastic(2)
    run.reach(15)
    run.processes[1].send_signal(signal.SIGTERM)
    run.has_ranks(1)
    run.finish(1)
    run.start(1, fault="vanish 0 0")
    assert run.processes[1].wait(timeout=60) == 9
    assert run.has_ranks(1) < 20
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


def test_the_model_of_a_failed_step_is_gone_before_the_next_one_is_built(elastic: Begin) -> None:
    run = elastic(3, faults=[SLOW, "parameters 0 0", SLOW])
    run.reach(15)
    run.lose(2)
    run.has_ranks(2)
    assert (run.run_dir(1) / "parameters").read_text().split() == ["0", "0"]


@pytest.mark.parametrize("connection", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rank_that_freezes_as_it_joins_costs_seconds(
    elastic: Begin, undisturbed: list[float], connection: int
) -> None:
    run = elastic(3, faults=[SLOW, f"late {connection} 0.6", SLOW])
    run.reach(10)
    run.processes[2].send_signal(signal.SIGTERM)
    run.has_ranks(2)
    run.finish(2)
    run.start(2, fault=f"halt {connection} 0")
    state = Path(f"/proc/{run.processes[2].pid}/stat")
    run.wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it is frozen")
    step = run.status()["step"]
    assert run.wait_until(lambda: run.status()["step"] > step + 1, "the next steps") < 8
    run.lose(2)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


@pytest.mark.parametrize("sync", ["exact", pytest.param("local", marks=pytest.mark.slow)])
def test_a_rank_that_joins_too_slowly_is_left_out_for_a_while(
    elastic: Begin, undisturbed: list[float], sync: str
) -> None:
    run = elastic(3, join_grace=2, sync=sync)
    run.reach(10)
    run.processes[2].send_signal(signal.SIGTERM)
    run.has_ranks(2)
    run.finish(2)
    run.start(2, fault="receive 0 8")
    run.wait_until(lambda: "with rank 2" in run.log(0), "it is admitted")
    step = run.status()["step"]
    assert run.wait_until(lambda: run.status()["step"] > step + 1, "the next steps") < 6
    outcome = run.finish(2)
    assert outcome["outcome"] == "retryable"
    assert (
        "rank 2 (host-3) has not received the state of the run within 2 s (join_grace)" in outcome["reason"]
    )
    run.start(2)
    reached = int(run.status()["step"])
    run.reach(min(reached + 20, STEPS - 1))
    assert run.status()["world_size"] == 2, "it waits, because it was slow"
    assert run.finish()["outcome"] == "finished", run.log(0)
    if sync == "exact":
        check_losses(run, undisturbed)


def test_a_rank_that_still_computes_when_another_dies_stays(elastic: Begin, undisturbed: list[float]) -> None:
    run = elastic(3, faults=[SLOW, "sleep 21 12", SLOW], snapshot_seconds=1)
    run.reach(20)
    time.sleep(1)
    run.processes[2].kill()
    run.has_ranks(2)
    assert run.processes[1].poll() is None, run.log(1)
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.finish(1)["outcome"] == "finished"
    check_losses(run, undisturbed)


@pytest.mark.parametrize("fault", ["exit_evaluate 20 0", "exit_save 20 0", f"exit_save {STEPS} 0"])
def test_a_rank_that_dies_in_an_evaluation_or_a_save_is_left_behind(
    elastic: Begin, undisturbed: list[float], fault: str
) -> None:
    run = elastic(
        3, faults=["burn 0 0", "burn 0 0", fault], eval_every=20, save_every=20, snapshot_seconds=0.2
    )
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.finish(1)["outcome"] == "finished"
    assert run.processes[2].wait() == 9
    assert "continues without rank 2" in run.log(0)
    assert (run.run_dir(0) / "checkpoints" / f"step_{STEPS:06}").is_dir()
    check_losses(run, undisturbed)


@pytest.mark.parametrize(
    "fault", [pytest.param("late_evaluate 40 6", marks=pytest.mark.slow), "late_save 40 6"]
)
def test_a_rank_that_returns_in_an_evaluation_or_a_save_trains_with_the_others(
    elastic: Begin, undisturbed: list[float], fault: str
) -> None:
    run = elastic(3, faults=[fault, SLOW, SLOW], eval_every=20, save_every=20, keep_checkpoints=20)
    run.reach(15)
    run.processes[2].send_signal(signal.SIGTERM)
    run.has_ranks(2)
    run.finish(2)
    run.reach(40)
    run.start(2)
    run.has_ranks(3)
    admitted = [step for step, ranks in run.changes(0) if ranks == 3][-1]
    assert admitted <= 42, "it has asked while the coordinator evaluated or saved"
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert run.finish(2)["outcome"] == "finished", run.log(2)
    assert meta(run.run_dir(0) / "checkpoints" / "step_000040")["world_size"] == 2
    assert meta(run.run_dir(0) / "checkpoints" / f"step_{STEPS:06}")["world_size"] == 3
    check_losses(run, undisturbed)


@pytest.mark.slow
def test_fixed_shares_hold_for_the_members_that_are_left(elastic: Begin, undisturbed: list[float]) -> None:
    run = elastic(3, shares="1,3,1", save_every=10, keep_checkpoints=20, snapshot_seconds=1)
    run.reach(15)
    run.lose(2)
    run.has_ranks(2)
    run.reach(40)
    run.start(2)
    run.has_ranks(3)
    assert run.finish()["outcome"] == "finished", run.log(0)
    shares = {tuple(meta(path)["shares"]) for path in (run.run_dir(0) / "checkpoints").glob("step_*")}
    assert shares == {(1, 3, 1), (1, 4)}
    check_losses(run, undisturbed)


def test_the_next_member_has_a_copy_of_each_checkpoint(elastic: Begin, undisturbed: list[float]) -> None:
    """The rank that kept the copies is lost: the next one keeps them, and the run resumes from there."""
    run = elastic(3, snapshot_seconds=1, save_every=10)
    run.reach(25)
    run.processes[1].kill()
    run.has_ranks(2)
    run.reach(45)
    run.processes[0].kill()
    run.finish(2)
    assert "Copied step_000020 to host-2" in run.log(0)
    shutil.rmtree(run.run_dir(0) / "checkpoints")
    newest = max(path.name for path in (run.run_dir(2) / "checkpoints").glob("step_*"))
    assert newest >= "step_000030"
    for rank in range(3):
        run.start(rank)
    assert run.finish()["outcome"] == "finished", run.log(0)
    assert f"host-3 has the newest checkpoint, of step {int(newest[5:])}" in run.log(0)
    check_losses(run, undisturbed)


def test_a_run_that_is_stopped_saves_although_a_rank_dies_meanwhile(elastic: Begin) -> None:
    run = elastic(3, faults=[SLOW, SLOW, "exit_save 0 0"], snapshot_seconds=1)
    run.reach(20)
    (run.run_dir(0) / "stop").touch()
    end = run.finish()
    assert end["outcome"] == "stopped", run.log(0)
    assert end["checkpoint"] == f"checkpoints/step_{end['step']:06}"
    assert run.finish(1)["outcome"] == "stopped"


def test_a_rank_that_dies_while_the_others_agree_is_left_behind_too(
    elastic: Begin, undisturbed: list[float]
) -> None:
    run = elastic(3, faults=[SLOW, "exit_change 0 0", SLOW], snapshot_seconds=1)
    run.reach(15)
    run.processes[2].kill()
    assert run.has_ranks(1) < 20
    run.start(1)
    run.start(2)
    run.has_ranks(3)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)
