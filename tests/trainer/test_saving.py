"""Saving beside the training: what is written is the moment of the call, and trouble is told to all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from conftest import TINY, Start, losses, train_here

from trainer import checkpoint, saving
from trainer.checkpoint import State
from trainer.config import RunConfig
from trainer.model import GPT, GPTConfig
from trainer.saving import Saver

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
    written, real_save = threading.Event(), checkpoint.save

    def slow_save(*arguments: object) -> Path:
        assert written.wait(10)
        return real_save(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saving.checkpoint, "save", slow_save)
    said: list[str] = []
    saver = Saver(tmp_path / "checkpoints", data_dir / "tokenizer", 2, said.append)
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
    assert "beside the training" in said[0]
    loaded = checkpoint.load(saver.saved)
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in before.items())
    assert loaded.optim["lm_head.weight"]["exp_avg"].tolist() == [[1, 1], [1, 1]]

    saver.save(state_at(2, model), last=True)  # into the same buffers, or without them
    assert saver.saved.name == "step_000002"
    assert torch.equal(checkpoint.load(saver.saved).model["lm_head.weight"], model.lm_head.weight)


def test_the_best_is_kept_beside_the_newest(tmp_path: Path, data_dir: Path) -> None:
    model = GPT(MODEL)
    model.init_weights()
    saver = Saver(tmp_path / "checkpoints", data_dir / "tokenizer", 2, lambda text: None)
    for step, bpb in [(1, 2.0), (2, 1.5), (3, None), (4, 1.7), (5, None), (6, None)]:
        evaluated = {"val_bpb": bpb or 1.0, "val_bpb_step": step if bpb else step - 1}
        saver.save(state_at(step, model, **evaluated), last=True)
    kept = [path.name for path in checkpoint.checkpoints(saver.folder)]
    assert kept == ["step_000006", "step_000005", "step_000002"]
    assert checkpoint.best(saver.folder) == saver.folder / "step_000002"


def test_a_checkpoint_that_cannot_be_written_ends_the_run_on_all_ranks(start: Start) -> None:
    """A file stands where rank 0's checkpoints go: the thread that writes finds out, all ranks are told."""
    ranks = start(2, name="full", num_iterations=100_000, save_every=2)
    ranks[0].run_dir.mkdir(exist_ok=True)
    (ranks[0].run_dir / "checkpoints").touch()
    for rank in ranks:
        code, said = rank.wait(60)
        assert code == 1, said
        assert rank.outcome()["outcome"] == "final"
        assert "rank 0 (host-1): The checkpoint of step 2 cannot be written to" in rank.outcome()["reason"]
        assert "Traceback" not in said


def test_saves_by_minutes_and_samples_on_the_way(data_dir: Path, tmp_path: Path) -> None:
    """A thousandth of a second between saves: one at each step at which the one before is written."""
    attempt = train_here(
        data_dir, tmp_path, num_iterations=12, save_minutes=1e-5, keep_checkpoints=20, sample_every=4
    )
    saved = [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")]
    assert saved[0] == "step_000012"
    assert len(saved) >= 3
    outcome = json.loads(attempt.path.read_text())
    assert outcome["checkpoint"] == "checkpoints/step_000012"
    assert len(losses(tmp_path)) == 12


def test_a_second_attempt_at_a_finished_run_has_its_outcome(data_dir: Path, tmp_path: Path) -> None:
    """With nothing left to do, and so no text written anew."""
    outcomes = [json.loads(train_here(data_dir, tmp_path).path.read_text()) for _ in range(2)]
    kept = ("outcome", "step", "loss", "val_bpb", "checkpoint", "sample")
    first, second = ({name: outcome[name] for name in kept} for outcome in outcomes)
    assert first == second
    assert first["sample"]


def test_without_saving_on_the_way_there_is_one_at_the_end(data_dir: Path, tmp_path: Path) -> None:
    train_here(data_dir, tmp_path, save_minutes=0, eval_every=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step_000006"]


def test_a_step_draws_no_random_numbers(data_dir: Path, tmp_path: Path) -> None:
    """So there is no generator's state to keep: rows come from (seed, step), samples from their own."""
    train_here(data_dir, tmp_path / "short", num_iterations=1, eval_every=1)
    short = torch.get_rng_state()
    train_here(data_dir, tmp_path / "long", num_iterations=5, eval_every=1, sample_every=1)
    assert torch.equal(torch.get_rng_state(), short)
