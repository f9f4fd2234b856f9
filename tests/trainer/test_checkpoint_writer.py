"""Saving beside the training: the moment of the call is written, and all ranks report a failure."""

from __future__ import annotations

import errno
import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY, Rank, Start, losses, train_here

from trainer.checkpoint import storage, writer
from trainer.checkpoint.storage import State
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import RunConfig
from trainer.model.gpt import GPT, GPTConfig

MODEL = GPTConfig.from_depth(1, 300, 32, aspect_ratio=32, head_dim=32)


def state_at(step: int, model: GPT, **meta: object) -> State:
    momentum = {"lm_head.weight": {"exp_avg": torch.full((2, 2), float(step))}}
    described = {"step": step, "config": RunConfig.from_strings(TINY).to_dict(), "hashes": {}}
    return State({**described, "model_config": MODEL.__dict__, **meta}, dict(model.state_dict()), momentum)


def test_the_copy_is_of_the_moment(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights change as soon as save returns; the file holds what they were."""
    model = GPT(MODEL)
    model.init_weights()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    written, real_save = threading.Event(), storage.save

    def slow_save(*arguments: object) -> Path:
        assert written.wait(60)
        return real_save(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer.storage, "save", slow_save)
    printed: list[str] = []
    saver = CheckpointWriter(tmp_path / "checkpoints", data_dir / "tokenizer", 2, printed.append)
    saver.save(state_at(1, model))
    assert saver.busy
    assert saver.saved is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    written.set()
    saver.wait()
    assert not saver.busy
    assert saver.saved is not None
    assert "in the background" in printed[0]
    loaded = storage.load(saver.saved)
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in before.items())
    assert loaded.optim["lm_head.weight"]["exp_avg"].tolist() == [[1, 1], [1, 1]]

    saver.save(state_at(2, model), last=True)  # into the same buffers, or without them
    assert saver.wait()
    assert saver.saved.name == "step_000002"
    assert torch.equal(storage.load(saver.saved).model["lm_head.weight"], model.lm_head.weight)


def test_a_state_that_is_made_later_is_written_without_a_pause(tmp_path: Path, data_dir: Path) -> None:
    model, ready, printed = GPT(MODEL), threading.Event(), []
    model.init_weights()
    state = state_at(3, model)

    def make() -> State:
        assert ready.wait(60)
        return state

    saver = CheckpointWriter(tmp_path / "checkpoints", data_dir / "tokenizer", 2, printed.append)
    saver.save_later(3, writer.nbytes(state), make)
    assert saver.busy
    ready.set()
    assert saver.wait()
    assert saver.saved is not None
    assert saver.saved.name == "step_000003"
    assert not saver._copies, "the tensors are not copied"
    assert torch.equal(storage.load(saver.saved).model["lm_head.weight"], model.lm_head.weight)
    assert "in the background, after a pause of 0.00 s" in printed[0]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path, data_dir: Path) -> None:
    model = GPT(MODEL)
    model.init_weights()
    saver = CheckpointWriter(tmp_path / "checkpoints", data_dir / "tokenizer", 2, lambda text: None)
    for step, bpb in [(1, 2.0), (2, 1.5), (3, None), (4, 1.7), (5, None), (6, None)]:
        evaluated = {"val_bpb": bpb or 1.0, "val_bpb_step": step if bpb else step - 1}
        saver.save(state_at(step, model, **evaluated), last=True)
        saver.wait()
    kept = [path.name for path in storage.checkpoints(saver.folder)]
    assert kept == ["step_000006", "step_000005", "step_000002"]
    assert storage.best(saver.folder) == saver.folder / "step_000002"


def test_a_checkpoint_that_cannot_be_written_ends_the_run_on_all_ranks(start: Start) -> None:
    """A file stands where rank 0's checkpoints go: the thread that writes finds out, all ranks report it."""
    ranks = start(2, name="full", num_iterations=100_000, save_every=2)
    ranks[0].run_dir.mkdir(exist_ok=True)
    (ranks[0].run_dir / "checkpoints").touch()
    for rank in ranks:
        code, printed = rank.wait()
        assert code == 1, printed
        assert rank.outcome()["outcome"] == "final"
        assert "rank 0 (host-1): The checkpoint of step 2 cannot be written to" in rank.outcome()["reason"]
        assert "Traceback" not in printed


def test_saves_by_minutes_and_samples_on_the_way(data_dir: Path, tmp_path: Path) -> None:
    """A thousandth of a second between saves: one at each step at which the one before is written."""
    attempt = train_here(
        data_dir, tmp_path, num_iterations=12, save_minutes=1e-5, keep_checkpoints=20, sample_every=4
    )
    saved = [path.name for path in storage.checkpoints(tmp_path / "checkpoints")]
    assert saved[0] == "step_000012"
    assert len(saved) >= 3
    outcome = json.loads(attempt.path.read_text())
    assert outcome["checkpoint"] == "checkpoints/step_000012"
    assert len(losses(tmp_path)) == 12


def test_a_second_attempt_at_a_finished_run_has_its_outcome(data_dir: Path, tmp_path: Path) -> None:
    """With nothing left to do, and so no text written again."""
    outcomes = [json.loads(train_here(data_dir, tmp_path).path.read_text()) for _ in range(2)]
    kept = ("outcome", "step", "loss", "val_bpb", "checkpoint", "sample")
    first, second = ({name: outcome[name] for name in kept} for outcome in outcomes)
    assert first == second
    assert first["sample"]


def test_without_saving_on_the_way_there_is_one_at_the_end(data_dir: Path, tmp_path: Path) -> None:
    train_here(data_dir, tmp_path, save_minutes=0, eval_every=2)
    assert [path.name for path in storage.checkpoints(tmp_path / "checkpoints")] == ["step_000006"]


def test_a_step_draws_no_random_numbers(data_dir: Path, tmp_path: Path) -> None:
    """So there is no generator's state to keep: rows come from (seed, step), samples from their own."""
    train_here(data_dir, tmp_path / "short", num_iterations=1, eval_every=1)
    short = torch.get_rng_state()
    train_here(data_dir, tmp_path / "long", num_iterations=5, eval_every=1, sample_every=1)
    assert torch.equal(torch.get_rng_state(), short)


# -- an end while the last checkpoint is written -----------------------------------------------------------

WRITE_SECONDS = 7.0  # longer than the grace that a peer's end leaves, and than the search for its cause
SLOW_DISK = f"write 6 {WRITE_SECONDS}"


def wait_for_the_last_write(rank: Rank) -> None:
    """Until rank 0 has written a part of the checkpoint of step 6."""
    deadline = time.monotonic() + 60
    while not (rank.run_dir / "checkpoints/.step_000006.tmp/model.safetensors").exists():
        assert rank.process.poll() is None, rank.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("sync", ["exact", "local"])
def test_a_worker_ends_while_rank_0_writes_the_last_checkpoint(start: Start, sync: str, end: int) -> None:
    """Nothing was saved before: the checkpoint is whole, and the next attempt has nothing left to do."""
    settings = {"save_minutes": 0, "sync": sync}
    ranks = start(2, faults=[SLOW_DISK, "none 0 0"], **settings)
    wait_for_the_last_write(ranks[0])
    ranks[1].process.send_signal(end)
    ranks[1].wait(10)
    code, printed = ranks[0].wait(60)
    assert code == 75, printed
    outcome = ranks[0].outcome()
    assert (outcome["outcome"], outcome["checkpoint"]) == ("retryable", "checkpoints/step_000006"), outcome
    assert storage.load(ranks[0].run_dir / outcome["checkpoint"]).step == 6
    for rank in start(2, **settings):
        code, printed = rank.wait()
        assert code == 0, printed
        assert "Resuming from the checkpoint of step 6." in printed
        assert rank.outcome()["outcome"] == "finished"


def test_a_stop_that_was_asked_for_stays_one_though_a_worker_is_lost(start: Start) -> None:
    """While rank 0 writes: without that it would start again by itself, and train on."""
    ranks = start(2, num_iterations=100_000, faults=[f"write 0 {WRITE_SECONDS}", "none 0 0"])
    ranks[0].reach_step(2)
    (ranks[0].run_dir / "stop").touch()
    deadline = time.monotonic() + 30
    while not list((ranks[0].run_dir / "checkpoints").glob(".step_*.tmp/model.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks[1].process.kill()
    code, printed = ranks[0].wait(60)
    assert code == 0, printed
    outcome = ranks[0].outcome()
    assert (outcome["outcome"], outcome["settled"]) == ("stopped", True), outcome
    assert outcome["checkpoint"] == f"checkpoints/step_{outcome['step']:06d}"
    assert storage.load(ranks[0].run_dir / outcome["checkpoint"]).step == outcome["step"]


def test_sigterm_lets_the_last_checkpoint_be_completed(start: Start) -> None:
    (rank,) = start(1, save_minutes=0, faults=["write 6 3"])
    wait_for_the_last_write(rank)
    rank.process.terminate()
    code, printed = rank.wait(30)
    assert storage.load(rank.run_dir / "checkpoints/step_000006").step == 6
    outcome = rank.outcome()
    assert outcome["checkpoint"] == "checkpoints/step_000006"
    assert (code, outcome["outcome"]) in ((128 + signal.SIGTERM, "stopped"), (0, "finished")), printed
    assert "continues from the newest checkpoint" not in outcome["reason"], "it is that of the last step"


def test_a_disk_that_stands_still_is_a_problem_and_no_endless_wait(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stands_still = GPT(MODEL), threading.Event()
    monkeypatch.setattr(writer.storage, "save", lambda folder, *_: stands_still.wait(30) and folder)
    monkeypatch.setattr(writer, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(writer, "SETTLE_SECONDS", 0.2)
    saver = CheckpointWriter(tmp_path / "checkpoints", data_dir / "tokenizer", 2, lambda text: None)
    saver.save(state_at(1, model), last=True)
    assert not saver.wait(0.01)
    assert saver.busy
    assert saver.problem is None
    assert not saver.wait()
    assert not saver.busy
    assert "The checkpoint of step 1 is not written to" in str(saver.problem)
    assert "less than 10 MB/s" in str(saver.problem)
    saver.save(state_at(2, model))  # nothing is written into what the disk may still read
    assert saver.saved is None
    stands_still.set()


def test_the_last_checkpoint_waits_for_room_that_was_lost_while_it_was_written(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a quota of the user is full, of which the free space of the disk shows nothing."""
    model, sound, calls, printed = GPT(MODEL), storage.save, [], []
    model.init_weights()
    for step in (1, 2):
        sound(tmp_path / "checkpoints", state_at(step, model), data_dir / "tokenizer", 9)

    def full_at_first(*arguments: object) -> Path:
        calls.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")))
        if len(calls) == 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return sound(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer.storage, "save", full_at_first)
    monkeypatch.setattr(writer, "CHECK_SECONDS", 0.1)
    saver = CheckpointWriter(tmp_path / "checkpoints", data_dir / "tokenizer", 9, printed.append)
    saver.save(state_at(3, model), last=True)
    assert saver.wait()
    assert (saver.problem, saver.shortage) == (None, None)
    assert calls == [["step_000001", "step_000002"], ["step_000002"]], "older ones are deleted"
    assert printed[0].startswith("warning: The checkpoint of step 3 was not saved")
    assert printed[1].startswith("Saved checkpoints/step_000003")
