"""Stage sft: settings, beginning, the loss over the assistant's tokens, one rank and several."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Start, losses, train_here

from trainer.__main__ import main, parse, run_file_from
from trainer.checkpoint import storage
from trainer.checkpoint.fine_tuning import initial_state
from trainer.config import ConfigError, RunConfig, RunFile
from trainer.data import DataError
from trainer.data.dataset import Dataset
from trainer.data.loader import batch_rows, count_targets, read_batch
from trainer.health.attempt import Attempt
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPTConfig
from trainer.optim import lr_schedule
from trainer.stages import parent_of, sft_settings

MANY = ["run", "model", "host", "step", "loss", "data", "rank", "token"]


@pytest.fixture(scope="session")
def base(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a base run."""
    run_dir = tmp_path_factory.mktemp("base") / "run"
    train_here(data_dir, run_dir)
    return run_dir / "checkpoints" / "step_000006"


@pytest.fixture(scope="session")
def chats(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of very different lengths: some rows are mostly padding."""
    folder = tmp_path_factory.mktemp("chats")
    draw = random.Random(3)
    lines = []
    for number in range(60):
        question = " ".join(draw.choices(MANY, k=1 + number % 3))
        answer = " ".join(draw.choices(MANY, k=1 if number % 4 else 6))
        lines.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["conversations", "--conversations", str(folder / "chats.jsonl"), "--val-fraction", "0.1"]
    assert main([*command, "--data-dir", str(data_dir), "--out", str(folder / "out")]) == 0
    return folder / "out"


def settings_of(base: Path, **given: Any) -> dict[str, Any]:
    return sft_settings(
        storage.read_meta(base), {"tracker": "none", "threads": 1, "digest_every": 1, **given}
    )


def fine_tune(base: Path, chats: Path, run_dir: Path, resumes: bool = False, **given: Any) -> Attempt:
    from trainer.train import Trainer

    attempt, env = Attempt(run_dir, RankEnv()), RankEnv()
    attempt.begin()
    run_file = RunFile("sft", RunConfig.from_strings(settings_of(base, **given)))
    try:
        reason = Trainer(
            run_file, chats, run_dir, env, attempt, RunLogger(env), None if resumes else base
        ).run()
        attempt.end("finished", reason)
    except Exception as error:
        attempt.end("final", str(error))
        raise
    finally:
        torch.set_flush_denormal(False)
    return attempt


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def arguments(*options: str) -> argparse.Namespace:
    return parse(["train", "--data-dir", "d", "--run-dir", "r", *options])


# -- settings ----------------------------------------------------------------------------------------------


def test_settings_come_from_the_base_run_unless_they_are_set(base: Path) -> None:
    config = run_file_from(
        arguments("--stage", "sft", "--from-checkpoint", str(base), "--matrix-lr", "0.5", "--seed", "7")
    ).config
    assert (config.depth, config.sequence_len, config.total_batch_size) == (2, 32, 160)
    assert (config.embedding_lr, config.matrix_lr, config.seed) == (10.0, 0.5, 7)
    assert (config.init_lr_frac, config.warmup_steps, config.warmdown_ratio) == (0.8, 0, 0.5)
    assert (config.final_lr_frac, config.weight_decay, config.num_iterations) == (0.0, 0.0, 0)
    assert config.parent.startswith("here/step_000006/")


def test_a_run_of_another_parent_has_another_name(base: Path) -> None:
    config = RunConfig.from_strings(settings_of(base))
    other = RunConfig.from_strings({**settings_of(base), "parent": "other/step_000001/0123456789ab"})
    assert config.default_run_id() != other.default_run_id()


@pytest.mark.parametrize("options", [["--stage", "sft"], ["--from-checkpoint", "somewhere"]])
def test_the_stage_and_the_checkpoint_go_together(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="go together"):
        run_file_from(arguments(*options))


def test_rates_are_those_of_nanochat() -> None:
    assert lr_schedule.sft_muon_momentum(0) == 0.85
    assert lr_schedule.sft_muon_momentum(150) == pytest.approx(0.90)
    assert lr_schedule.sft_muon_momentum(1000) == pytest.approx(0.95)
    multipliers = [lr_schedule.lr_multiplier(step, 10, 0, 0.5, 0.0) for step in range(11)]
    assert multipliers == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])


# -- the beginning -----------------------------------------------------------------------------------------


def test_weights_and_moments_are_those_of_the_checkpoint(base: Path) -> None:
    config = RunConfig.from_strings(settings_of(base))
    saved = storage.load(base)
    model = GPTConfig(**saved.meta["model_config"])
    state = initial_state(base, config, model, {})
    assert state.meta == {"step": 0}
    assert all(torch.equal(state.model[name], tensor) for name, tensor in saved.model.items())
    assert state.optim.keys() == saved.optim.keys()


def test_another_checkpoint_model_or_tokenizer_is_refused(base: Path) -> None:
    config = RunConfig.from_strings(settings_of(base))
    model = GPTConfig(**storage.read_meta(base)["model_config"])
    with pytest.raises(ConfigError, match="--from-checkpoint DIR"):
        initial_state(None, config, model, {})
    other = RunConfig.from_strings({**settings_of(base), "parent": "other/step_000001/0123456789ab"})
    with pytest.raises(ConfigError, match="fine-tunes the checkpoint other/step_000001"):
        initial_state(base, other, model, {})
    with pytest.raises(DataError, match="another tokenizer"):
        initial_state(base, config, model, {"tokenizer": "0"})
    wider = GPTConfig.from_depth(2, model.vocab_size, 32, aspect_ratio=32, head_dim=16)
    with pytest.raises(ConfigError, match="The model of the run differs from that of"):
        initial_state(base, config, wider, {})


def test_documents_and_conversations_are_not_confused(
    base: Path, chats: Path, data_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="stage sft trains on conversations"):
        fine_tune(base, data_dir, tmp_path / "a")
    with pytest.raises(DataError, match="holds conversations"):
        train_here(chats, tmp_path / "b")


def test_a_fine_tuned_model_goes_to_nanochat_and_back(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine_tune(base, chats, tmp_path / "run", num_iterations=1)
    path = tmp_path / "run" / "checkpoints" / "step_000001"
    out = tmp_path / "nanochat"
    assert main(["export", "--checkpoint", str(path), "--to", "nanochat", "--out", str(out)]) == 0
    names = sorted(file.name for file in (out / "chatsft_checkpoints" / "d2").iterdir())
    assert names == ["meta_000001.json", "model_000001.pt"]
    assert not (out / "base_checkpoints").exists()
    back = ["import", "--from-nanochat", str(out), "--stage", "sft", "--run-dir", str(tmp_path / "back")]
    assert main(back) == 0
    typed = f"train --stage sft --from-checkpoint {tmp_path}/back/checkpoints/step_000001 --data-dir CHATS"
    assert typed in capsys.readouterr().out
    fine_tune(tmp_path / "back" / "checkpoints" / "step_000001", chats, tmp_path / "more", num_iterations=1)
    state = storage.load(tmp_path / "back" / "checkpoints" / "step_000001")
    weights = storage.load(path).model
    assert all(torch.equal(state.model[name], tensor) for name, tensor in weights.items())
    config = state.meta["config"]
    assert (config["stage"], config["init_lr_frac"], config["weight_decay"]) == ("sft", 0.8, 0.0)


@pytest.mark.processes
def test_a_run_file_has_all_but_the_path_of_the_checkpoint(base: Path, chats: Path, tmp_path: Path) -> None:
    """What a playbook does: settings and parent in the run file, the path as an option of rank 0."""
    config = RunConfig.from_strings(settings_of(base, num_iterations=1))
    (tmp_path / "run.json").write_text(json.dumps(RunFile("chat", config).to_dict()))
    command = [sys.executable, "-m", "trainer", "train", "--run-file", str(tmp_path / "run.json")]
    command += ["--data-dir", str(chats), "--run-dir", str(tmp_path / "run")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--from-checkpoint DIR" in json.loads((tmp_path / "run" / "outcome.json").read_text())["reason"]
    subprocess.run([*command, "--from-checkpoint", str(base)], cwd=root, capture_output=True, check=True)
    assert len(losses(tmp_path / "run")) == 1


# -- training ----------------------------------------------------------------------------------------------


def test_an_epoch_lowers_the_loss_and_the_run_resumes_bitwise(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    given = {"embedding_lr": 0.3, "unembedding_lr": 0.05, "matrix_lr": 0.05, "save_every": 2}
    fine_tune(base, chats, tmp_path / "whole", **given)
    data = Dataset.open(chats, 32)
    steps = -(-data.info.train_rows // 5)
    curve = losses(tmp_path / "whole")
    assert len(curve) == steps
    assert curve[-1] < curve[0]
    newest = tmp_path / "whole" / "checkpoints" / f"step_{steps:06d}"
    assert storage.read_meta(newest)["config"]["parent"] == parent_of(storage.read_meta(base))
    facts = json.loads((tmp_path / "whole" / "facts.json").read_text())
    assert (facts["tags"]["stage"], facts["tags"]["parent_run"]) == ("sft", "here")
    evaluated = [line for line in lines_of(tmp_path / "whole") if "val_bpb" in line]
    assert evaluated[-1]["val_bpb"] > 0

    fine_tune(base, chats, tmp_path / "part", **given)
    for path in storage.checkpoints(tmp_path / "part" / "checkpoints"):
        if int(path.name[5:]) > steps - 2:
            storage.remove(path)
    fine_tune(base, chats, tmp_path / "part", resumes=True, **given)
    again = storage.load(tmp_path / "part" / "checkpoints" / newest.name)
    assert all(torch.equal(again.model[name], tensor) for name, tensor in storage.load(newest).model.items())


def test_the_loss_is_the_mean_over_the_targets_of_the_global_batch(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    fine_tune(base, chats, tmp_path / "run", num_iterations=1, dtype="float64")
    data = Dataset.open(chats, 32)
    batch = read_batch(data.train, 42, 0, 5)
    model, _ = storage.load_model(base)
    model = model.double()
    tokens = torch.from_numpy(batch.tokens.astype("int64"))
    expected = model(tokens[:, :-1], torch.from_numpy(batch.targets)).item()
    assert losses(tmp_path / "run") == pytest.approx([expected], rel=1e-9)
    assert count_targets(batch.targets) < batch.targets.size / 2


@pytest.mark.processes
@pytest.mark.parametrize(("sync", "shares"), [("dense", "1,3,1"), ("exact", "2,2,1"), ("fast", "1,1,3")])
def test_three_ranks_train_as_one(
    sync: str, shares: str, start: Start, base: Path, chats: Path, tmp_path: Path
) -> None:
    """In float64. A step's ranks have unequal numbers of targets: some rows are mostly padding."""
    given = {"num_iterations": 8, "embedding_lr": 0.3, "unembedding_lr": 0.05, "matrix_lr": 0.05}
    given |= {"dtype": "float64"}
    data = Dataset.open(chats, 32)
    by_row = (read_batch(data.train, 42, 0, 5).targets >= 0).sum(axis=1)
    assert by_row.max() > 1.5 * by_row.min(), batch_rows(42, 0, 5, len(data.train))
    settings = settings_of(base, **given, sync=sync)
    del settings["parent"]
    values = {"from_checkpoint": base, **settings, "shares": shares}
    ranks = start(3, data_dirs=[chats] * 3, **values)
    fine_tune(base, chats, tmp_path / "alone", **given)
    for rank in ranks:
        code, printed = rank.wait()
        assert code == 0, printed
    exact = {"dense": 1e-10, "exact": 1e-10, "fast": 1e-2}[sync]
    assert losses(ranks[0].run_dir) == pytest.approx(losses(tmp_path / "alone"), rel=exact)
    assert len(losses(ranks[0].run_dir)) == given["num_iterations"]


@pytest.mark.processes
def test_local_ranks_weight_by_targets(start: Start, base: Path, chats: Path) -> None:
    """Each rank steps on its own targets; a sync round weights the ranks by them."""
    settings = settings_of(base, sync="local", local_steps=2, local_delay=0, num_iterations=6)
    del settings["parent"]
    values = {**settings, "embedding_lr": 0.3, "unembedding_lr": 0.05, "matrix_lr": 0.05}
    for rank in start(2, data_dirs=[chats] * 2, shares="1,4", from_checkpoint=base, **values):
        code, printed = rank.wait()
        assert code == 0, printed
