"""The coordinator of an elastic run is lost: the other hosts elect another one, and it joins that one later.

Each host has an address of its own on the loopback interface, and a run directory of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import losses, train_here
from elastic_run import CALM, SLOW, STEPS, ElasticRun, check_losses

pytestmark = pytest.mark.processes
SLOWER = "slow 1 0.15"  # so that a rank that returns finds the run active


class FailoverRun(ElasticRun):
    """A run whose hosts elect their coordinator."""

    def launch(self, rank: int) -> dict[str, str]:
        addresses = [f"127.0.0.{host + 1}" for host in range(self.world_size)]
        return {"NANOFLEET_RANKS": " ".join([f"{rank} {self.world_size} 127.0.0.1:{self.port}", *addresses])}

    def term(self, rank: int) -> int:
        return int(json.loads((self.run_dir(rank) / "term.json").read_text())["term"])


class PairsRun(FailoverRun):
    """A run on hosts with two ranks each, such as one for each NUMA node: 0 and 1 on host-1, and so on."""

    def launch(self, rank: int) -> dict[str, str]:
        host, local_rank = divmod(rank, 2)
        addresses = [f"127.0.0.{number + 1}" for number in range(self.world_size // 2)]
        fleet = [f"{2 * host} {self.world_size} 127.0.0.1:{self.port}", *addresses]
        return {
            "NANOFLEET_HOST": f"host-{host + 1}",
            "NANOFLEET_RANKS": " ".join(fleet),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": "2",
        }

    def run_dir(self, rank: int) -> Path:
        return self.folder / f"host-{rank // 2 + 1}"

    def outcome(self, rank: int) -> str:
        """Wait for the end of a rank; returns its outcome."""
        self.processes[rank].wait(timeout=120)
        name = f"outcome-{rank}.json" if rank % 2 else "outcome.json"
        return str(json.loads((self.run_dir(rank) / name).read_text())["outcome"])


Begin = Callable[..., FailoverRun]


@pytest.fixture
def failover(data_dir: Path, tmp_path: Path) -> Iterator[Begin]:
    runs: list[FailoverRun] = []

    def begin(
        world_size: int, kind: type[FailoverRun] = FailoverRun, faults: Sequence[str] = (), **settings: Any
    ) -> FailoverRun:
        runs.append(kind(data_dir, tmp_path, world_size, **settings))
        for rank in range(world_size):
            runs[-1].start(rank, faults[rank] if faults else SLOW)
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train_here(data_dir, run_dir, **CALM, num_iterations=STEPS)
    return losses(run_dir)


def test_the_others_elect_a_coordinator_and_the_former_one_joins_it(
    failover: Begin, undisturbed: list[float]
) -> None:
    run = failover(3, snapshot_seconds=1)
    run.reach(25)
    assert [run.term(rank) for rank in range(3)] == [0, 0, 0]
    run.lose(0)
    run.leader = 1
    run.has_ranks(2)
    assert run.term(1) == run.term(2) == 1
    assert run.term(0) == 0
    assert "in the memory of this host" in run.log(1)
    assert run.log(1).count("Importing torch") <= 1  # in the same processes
    assert run.log(2).count("Importing torch") <= 1
    run.start(0, SLOWER)
    run.has_ranks(3)
    assert run.term(0) == 1
    for rank in (1, 0, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
    for rank in (0, 1, 2):  # each host has the figures of all steps
        run.leader = rank
        check_losses(run, undisturbed)
        assert run.changes(rank)[-1] == run.changes(1)[-1], "the one that has joined too"
    assert [ranks for _, ranks in run.changes(1)] == [2, 3]


@pytest.mark.slow
def test_coordinators_that_leave_in_order_cost_no_step(failover: Begin, undisturbed: list[float]) -> None:
    run = failover(3, snapshot_seconds=1000)
    run.reach(15)
    for leaving, next_one in ((0, 1), (1, 2)):
        run.processes[leaving].send_signal(signal.SIGTERM)
        run.leader = next_one
        assert run.has_ranks(2) < 10
        assert "continue the run without this one" in run.finish(leaving)["reason"]
        run.start(leaving, SLOWER)
        run.has_ranks(3)
        assert run.open_files(2).count("train.bin") == 1, "the trainer of the last term is still there"
    for rank in (0, 1, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
        assert "trained again" not in run.log(rank)
        run.leader = rank
        check_losses(run, undisturbed)


@pytest.mark.parametrize(
    "fault", ["exit_evaluate 20 0", pytest.param("exit_save 20 0", marks=pytest.mark.slow)]
)
def test_a_coordinator_that_is_lost_in_an_evaluation_or_a_save_is_replaced(
    failover: Begin, undisturbed: list[float], fault: str
) -> None:
    run = failover(3, faults=[fault, SLOW, SLOW], eval_every=20, save_every=20, snapshot_seconds=0.2)
    assert run.processes[0].wait(timeout=90) == 9
    run.leader = 1
    run.has_ranks(2)
    for rank in (1, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
        assert (run.run_dir(1) / "checkpoints" / f"step_{STEPS:06}").is_dir()
        run.leader = rank
        check_losses(run, undisturbed)


def test_a_minority_does_not_train(failover: Begin, undisturbed: list[float]) -> None:
    """Both others are lost: the coordinator waits, and continues when one of them is back."""
    run = failover(3, snapshot_seconds=1)
    run.reach(15)
    run.processes[1].kill()
    run.processes[2].kill()
    time.sleep(3)
    step = int(run.status()["step"])
    time.sleep(4)
    assert int(run.status()["step"]) == step
    run.start(2)
    run.reach(step + 5)
    assert "The ranks continue after step" in run.log(0)
    assert run.term(2) == 0
    run.start(1)
    run.has_ranks(3)
    assert run.finish()["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


def test_a_host_that_was_added_follows_each_coordinator_and_has_no_vote(
    failover: Begin, undisturbed: list[float]
) -> None:
    run = failover(3, snapshot_seconds=1)
    run.reach(15)
    run.start(3)
    run.has_ranks(4)
    run.lose(0)
    run.leader = 1
    run.reach(40)
    run.has_ranks(3)
    assert run.log(3).count("Importing torch") <= 1  # in the same process
    run.lose(2)
    time.sleep(3)
    step = int(run.status()["step"])
    time.sleep(4)
    assert int(run.status()["step"]) == step, "host-2 and the added host are no majority of three"
    run.start(2)
    run.has_ranks(3)
    for rank in (1, 2, 3):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
    for rank in (1, 3):
        run.leader = rank
        check_losses(run, undisturbed)


def test_all_hosts_lose_power_and_the_disk_of_the_coordinator(
    failover: Begin, undisturbed: list[float]
) -> None:
    """The two that return elect one of them, which has a copy of the newest checkpoint.

    Checkpoints that are due by time are written from the copies of the state in memory.
    """
    run = failover(3, snapshot_seconds=1, save_minutes=0.05)
    run.reach(35)
    assert "Saved checkpoints/step_" in run.log(0)
    for process in run.processes.values():
        process.kill()
        process.wait()
    shutil.rmtree(run.run_dir(0))
    for rank in (1, 2):
        run.start(rank)
    run.leader = 1
    run.reach(40)
    assert "Resuming from the checkpoint of step" in run.log(1)
    for rank in (1, 2):
        assert run.finish(rank)["outcome"] == "finished", run.log(rank)
    check_losses(run, undisturbed)


def test_of_two_hosts_the_one_that_is_left_continues_if_it_may(
    failover: Begin, undisturbed: list[float]
) -> None:
    run = failover(2, snapshot_seconds=1, coordinator_failover="true")
    run.reach(25)
    run.processes[0].send_signal(signal.SIGSTOP)
    run.leader = 1
    run.reach(30)
    run.processes[0].send_signal(signal.SIGCONT)  # it finds that it was replaced
    run.has_ranks(2)
    assert run.finish()["outcome"] == "finished", run.log(1)
    assert run.finish(0)["outcome"] == "finished", run.log(0)
    check_losses(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["exact", "local"])
def test_hosts_with_two_ranks_each_elect_a_coordinator(failover: Begin, data_dir: Path, sync: str) -> None:
    """The copies are on the first rank of the next host, which alone votes for it and keeps its files."""
    run = failover(6, PairsRun, total_batch_size=192, snapshot_seconds=1, sync=sync)
    assert isinstance(run, PairsRun)
    run.reach(25)
    assert [run.term(rank) for rank in (0, 2, 4)] == [0, 0, 0]
    for rank in (0, 1):  # torchrun ends the other ranks of a host when one has ended
        run.lose(rank)
    run.leader = 2
    run.has_ranks(4)
    assert [run.term(rank) for rank in (0, 2, 4)] == [0, 1, 1]
    statuses = [sorted(path.name for path in run.run_dir(rank).glob("heartbeat-*")) for rank in (2, 4)]
    assert statuses == [["heartbeat-0.json", "heartbeat-1.json"], ["heartbeat-2.json", "heartbeat-3.json"]]
    for rank in (2, 3, 4, 5):
        assert run.log(rank).count("Importing torch") <= 1  # in the same processes
    for rank in (0, 1):
        run.start(rank, SLOWER)
    run.has_ranks(6)
    (run.folder / "hurry").touch()
    assert {rank: run.outcome(rank) for rank in range(6)} == dict.fromkeys(range(6), "finished")
    if sync == "exact":
        run_dir = run.folder / "undisturbed"
        train_here(data_dir, run_dir, **CALM, num_iterations=STEPS, total_batch_size=192)
    expected = losses(run_dir if sync == "exact" else run.run_dir(2))
    for rank in (0, 2, 4) if sync == "exact" else (0, 4):
        run.leader = rank
        check_losses(run, expected)


def test_the_coordinator_leaves_in_order_with_both_of_its_ranks(
    failover: Begin, undisturbed: list[float]
) -> None:
    run = failover(4, PairsRun, snapshot_seconds=1000, coordinator_failover="true")
    assert isinstance(run, PairsRun)
    run.reach(15)
    for rank in (0, 1):
        run.processes[rank].send_signal(signal.SIGTERM)
    run.leader = 2
    assert run.has_ranks(2) < 10
    for rank in (0, 1):
        assert run.outcome(rank) == "stopped"
        assert "continue the run without this one" in run.log(rank)
    for rank in (0, 1):
        run.start(rank, SLOWER)
    run.has_ranks(4)
    (run.folder / "hurry").touch()
    assert {rank: run.outcome(rank) for rank in range(4)} == dict.fromkeys(range(4), "finished")
    for rank in (0, 2):
        assert "trained again" not in run.log(rank)
        run.leader = rank
        check_losses(run, undisturbed)


def test_a_host_with_another_secret_takes_no_part(failover: Begin) -> None:
    run = failover(3)
    run.reach(10)
    run.processes[2].send_signal(signal.SIGTERM)
    run.finish(2)
    run.start(2, secret=b"\x02" * 32)
    time.sleep(8)
    assert run.processes[2].poll() is None
    assert "No coordinator is elected" in run.log(2) or "gets no answer from host-1" in run.log(2)
    assert run.status()["world_size"] == 2
