"""Whole runs: under torchrun, stopped and resumed, with ranks that differ, die, diverge or are ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import TINY, Rank, Start, flags, free_port, losses, train_here

from trainer import train
from trainer.__main__ import main
from trainer.distributed.process_group import Collectives, PeerLost
from trainer.health.run_status import RunStatus
from trainer.health.status_record import RankEnd, RunStatusRecord
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final, Stopped
from trainer.train import Trainer

FILES = ("model.safetensors", "optim.pt")


def test_stopped_and_resumed_equals_uninterrupted(
    start: Start, data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bitwise, weights and optimizer state: one run under torchrun in a go, one stopped by the file."""
    whole = tmp_path / "whole"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=0"]
    command += [
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        "--rdzv-id=whole",
        "-m",
        "trainer",
        "train",
    ]
    command += ["--data-dir", str(data_dir), "--run-dir", str(whole), *flags({**TINY, "num_iterations": 24})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    first = start(2, num_iterations=24)
    first[0].reach_step(2)
    (first[0].run_dir / "stop").touch()
    for rank in first:
        code, printed = rank.wait()
        assert code == 0, printed
        assert rank.outcome()["outcome"] == "stopped"
    stopped = first[0].outcome()
    assert 2 <= stopped["step"] < 24
    assert stopped["checkpoint"] == f"checkpoints/step_{stopped['step']:06d}"

    second = start(2, num_iterations=24)
    for rank in second:
        code, printed = rank.wait()
        assert code == 0, printed
        assert f"Resuming from the checkpoint of step {stopped['step']}." in printed
        assert rank.outcome()["outcome"] == "finished"
    printed = torchrun.communicate(timeout=60)[0]
    assert torchrun.returncode == 0, printed

    resumed = second[0].run_dir
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == 24
    hashes = [
        json.loads((run / "checkpoints/step_000024/meta.json").read_text())["sha256"]
        for run in (whole, resumed)
    ]
    assert [hashes[0][name] for name in FILES] == [hashes[1][name] for name in FILES]

    outcome = json.loads((whole / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["step"], outcome["rank"]) == ("finished", 24, 0)
    assert outcome["loss"] < outcome["first_loss"] - 1
    assert outcome["sample"].startswith("The ")
    assert (whole / "sample.txt").read_text().strip() == outcome["sample"].strip()
    beats = [json.loads((whole / f"heartbeat-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(beat["phase"], beat["step"]) for beat in beats] == [("done", 24)] * 2
    lines = [line for line in printed.splitlines() if line.startswith("[rank 0] ")]
    assert any("bits per byte" in line for line in lines)
    assert any("transformer_matrices" in line for line in lines)

    arguments = [
        "sample",
        "--checkpoint",
        str(whole / "checkpoints/step_000024"),
        "--prompt",
        "A",
        "--max-tokens",
        "8",
    ]
    capfd.readouterr()
    assert main(arguments) == 0
    text = capfd.readouterr().out
    assert text.startswith("A")
    assert main(arguments) == 0
    assert capfd.readouterr().out == text


def test_a_second_process_in_a_run_directory_is_refused(start: Start) -> None:
    """And the first one's outcome stays its own."""
    (first,) = start(1, num_iterations=100_000, eval_every=0)  # an evaluation would save a checkpoint
    first.reach_step(1)
    (second,) = start(1, num_iterations=100_000)
    code, printed = second.wait()
    assert code == 2
    assert f"Another process (PID {first.process.pid}) trains as rank 0 in {first.run_dir}." in printed
    assert not (first.run_dir / "outcome.json").exists()
    first.process.kill()
    first.wait()
    (third,) = start(1)
    code, printed = third.wait()
    assert code == 0, printed


@pytest.mark.processes
def test_a_killed_torchrun_leaves_no_rank_behind(data_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=0"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "trainer", "train"]
    command += ["--data-dir", str(data_dir), "--run-dir", str(run_dir), "--run-id", "orphans"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = subprocess.Popen(
        [*command, *flags({**TINY, "num_iterations": 100_000})],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    rank = Rank(torchrun, run_dir)
    rank.reach_step(1)
    ranks = [json.loads((run_dir / f"heartbeat-{n}.json").read_text())["pid"] for n in (0, 1)]
    torchrun.kill()
    torchrun.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline, "a rank continues without torchrun"
        time.sleep(0.05)
    assert rank.outcome()["outcome"] == "retryable"


def test_ranks_that_differ_end_with_a_table(start: Start) -> None:
    ranks = start(2, per_rank=[{"shares": "2,3"}, {"seed": 43, "shares": "3,2"}])
    for rank in ranks:
        code, printed = rank.wait()
        assert code == 1, printed
        assert "config.seed is 42, but rank 1 (host-2) has 43" in printed
        assert "Traceback" not in printed
        assert "config.seed  42" in printed
        assert rank.outcome()["outcome"] == "final"
        assert "\n" not in rank.outcome()["reason"]
        assert re.search(r"\n\[rank \d\]   shares +2,3 +3,2\n", printed)
        assert "run file" not in printed
        assert rank.outcome()["step"] == 0
    beats = [json.loads((rank.run_dir / f"heartbeat-{n}.json").read_text()) for n, rank in enumerate(ranks)]
    assert [beat["phase"] for beat in beats] == ["load", "load"]  # no collective was entered
    arrived = max(beat["entered"] for beat in beats)
    assert max(rank.outcome()["time"] for rank in ranks) - arrived < 10


def test_a_killed_peer_is_named_and_worth_a_retry(start: Start) -> None:
    ranks = start(2, num_iterations=100_000)
    ranks[0].reach_step(2)
    ranks[1].process.kill()
    began = time.monotonic()
    code, printed = ranks[0].wait()
    assert time.monotonic() - began < 60, "it does not wait for a collective's time-out"
    assert code == 75
    outcome = ranks[0].outcome()
    assert outcome["outcome"] == "retryable", printed
    assert "Lost rank 1 (host-2)" in outcome["reason"]
    assert "Traceback" not in printed


def test_a_loss_that_is_no_number_is_final(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Final, match="the run has diverged"):
        train_here(data_dir, tmp_path, num_iterations=50, embedding_lr=1e30, matrix_lr=1e30)
    assert not (tmp_path / "checkpoints").exists()


def test_sigterm_ends_a_rank_with_an_outcome(start: Start) -> None:
    (asked,) = start(1, num_iterations=100_000)
    asked.reach_step(1)
    asked.process.send_signal(signal.SIGTERM)
    code, printed = asked.wait()
    assert code == 128 + signal.SIGTERM
    assert asked.outcome()["outcome"] == "stopped", printed
    assert asked.outcome()["loss"] is not None


def test_heartbeat_states_phase_and_keeps_time(tmp_path: Path) -> None:
    run_status = RunStatus(tmp_path, RankEnv(rank=3, world_size=4, host="attic"), "run")
    for phase in ("data", "forward", "backward", "forward", "backward"):
        run_status.enter(phase)
    run_status.update(step=7, loss=2.5)
    beat = json.loads((tmp_path / "heartbeat-3.json").read_text())
    assert (beat["phase"], beat["step"], beat["host"], beat["pid"]) == ("backward", 7, "attic", os.getpid())
    assert set(run_status.lap()) == {"data", "forward", "backward"}
    with pytest.raises(ValueError, match="not one of the phases"):
        run_status.enter("lunch")
    with pytest.raises(AttributeError):
        run_status.update(los=2.5)


def test_heartbeat_and_message_are_read_as_one_record(tmp_path: Path) -> None:
    """The plugins read the keys of the file."""
    run_status = RunStatus(tmp_path, RankEnv(rank=1, world_size=2, host="attic"), "run")
    run_status.enter("backward")
    run_status.update(step=7, loss=2.5)
    beat = json.loads((tmp_path / "heartbeat-1.json").read_text())
    assert set(beat) == {
        *("run_id", "rank", "world_size", "host", "pid", "phase", "entered", "step", "num_iterations"),
        *("loss", "val_bpb", "tok_per_s", "tok_per_s_average", "step_seconds", "eta_seconds", "sync_share"),
        *("shares", "checkpoint", "cpu", "temperature", "throttled", "stall_seconds", "diagnosis", "warning"),
        "time",
    }
    assert RunStatusRecord.load({**beat, "age": 3.0}).heartbeat() == beat
    end = RankEnd("final", "The disk is full.", False)
    sent = replace(run_status.record(), ended=end)
    received = RunStatusRecord.load(json.loads(json.dumps(sent.message())))
    assert received.message() == sent.message()
    assert (received.ended, received.position, received.loss) == (end, "backward of step 8", None)


def test_a_stop_that_cannot_save_names_the_newest_checkpoint(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Trainer._save

    def save(self: Trainer, last: bool) -> None:
        if self.stopping:
            raise PeerLost("Lost rank 1.")
        sound(self, last)
        self.checkpoint_writer.wait()
        (self.run_dir / "stop").touch()

    monkeypatch.setattr(Trainer, "_save", save)
    with pytest.raises(Stopped) as caught:
        train_here(data_dir, tmp_path / "run", num_iterations=9, save_every=2)
    assert str(caught.value) == (
        "Stopped on request after 3 of 9 steps; a checkpoint of this step could not be saved, and the newest "
        "checkpoint is checkpoints/step_000002."
    )


def test_collectives_of_an_evaluation_wait_for_its_length(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest host waits in its only collective until the slowest one has evaluated its rows."""
    set_to: list[timedelta] = []
    monkeypatch.setattr(Collectives, "set_timeout", lambda _, timeout: set_to.append(timeout))
    monkeypatch.setattr(train, "UNMEASURED_TIMEOUT", timedelta(0))
    monkeypatch.setattr(train, "TIMEOUT_STEPS", 0)
    train_here(data_dir, tmp_path / "run", num_iterations=2)
    assert max(set_to) > timedelta(0)


def test_collectives_of_eval_wait_for_a_host_that_is_ten_times_slower(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a training step there is no duration from which the time-out follows."""
    set_to: list[timedelta] = []
    group = Collectives(RankEnv(), [])
    monkeypatch.setattr(group, "set_timeout", set_to.append)
    group.wait_for_slower(59)
    assert not set_to, "ten minutes are enough"
    group.wait_for_slower(3600)
    assert set_to == [timedelta(hours=10)]
    waited: list[float] = []
    monkeypatch.setattr(Collectives, "wait_for_slower", lambda _, seconds: waited.append(seconds))
    train_here(data_dir, tmp_path / "run", num_iterations=2)
    assert waited, "an evaluation does not wait"
