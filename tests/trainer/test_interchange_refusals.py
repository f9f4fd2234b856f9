"""What is wrong with a checkpoint is reported in a sentence, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nanochat_base import (
    base_directory,
    export,
    step_dir,
    take_in,
)

from trainer.config import ConfigError
from trainer.interchange.meta import run_config
from trainer.model.gpt import GPTConfig


@pytest.fixture
def base(tmp_path: Path, data_dir: Path) -> Path:
    return base_directory(tmp_path / "nanochat", data_dir)


def edit_meta(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "meta_000005.json"
        meta = json.loads(path.read_text())
        change(meta)
        path.write_text(json.dumps(meta))

    return edit


def edit_model(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model_000005.pt"
        weights = torch.load(path)
        change(weights)
        torch.save(weights, path)

    return edit


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("loaded",)


def cut(share: float) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model_000005.pt"
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return edit


OLD = ("smear_gate.weight", "smear_lambda", "backout_lambda", "resid_lambdas", "x0_lambdas")


@pytest.mark.parametrize(
    ("damage", "printed"),
    [
        (lambda folder: (folder / "meta_000005.json").unlink(), r"has no meta_000005\.json beside it"),
        (lambda folder: (folder / "meta_000005.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "meta_000005.json").write_text("[]"), "no model_config"),
        (edit_meta(lambda meta: meta.pop("model_config")), "no model_config"),
        (edit_meta(lambda meta: meta["model_config"].update(n_expert=4)), "has unknown fields .n_expert."),
        (edit_meta(lambda meta: meta["model_config"].pop("window_pattern")), "lacks window_pattern.*older"),
        (edit_meta(lambda meta: meta["model_config"].update(n_layer="3")), "'3' for n_layer, .*whole number"),
        (edit_meta(lambda meta: meta["model_config"].update(n_layer=True)), "True for n_layer"),
        (edit_meta(lambda meta: meta["model_config"].update(n_layer=10**12)), "1000000000000 for n_layer"),
        (
            edit_meta(lambda meta: meta["model_config"].update(n_layer=10**9)),
            "too few for a model of 10000000",
        ),
        (edit_meta(lambda meta: meta["model_config"].update(n_head=5)), "does not make 5 heads"),
        (edit_meta(lambda meta: meta["model_config"].update(window_pattern="SXL")), "made of S and L"),
        (
            edit_meta(lambda meta: meta["model_config"].update(vocab_size=299)),
            "299 tokens, and the tokenizer",
        ),
        (
            edit_meta(lambda meta: meta["model_config"].update(n_kv_head=3)),
            r"transformer\.h\.0\.attn\.c_k\.weight is \(16, 48\), not \(48, 48\).* and 6 more",
        ),
        (
            edit_model(lambda weights: [weights.pop(name) for name in OLD]),
            "lacks resid_lambdas, .* and 1 more .models of older versions",
        ),
        (edit_model(lambda weights: weights.update(extra=torch.zeros(1))), "holds extra, which the model"),
        (
            edit_model(lambda weights: weights.update(smear_lambda=torch.zeros(1, dtype=torch.int32))),
            "holds smear_lambda as int32",
        ),
        (edit_model(lambda weights: weights.update(evil=Evil())), "refuses it with weights_only=True"),
        (edit_model(lambda weights: weights.update(note="hello")), "is not a state dict"),
        (lambda folder: torch.save([1, 2], folder / "model_000005.pt"), "is not a state dict"),
        (cut(0), r"cannot be loaded \(EOFError: it ends too early\)"),
        (cut(0.5), r"cannot be loaded \(RuntimeError: "),
        (cut(0.999), "cannot be loaded|cannot be read"),
        (lambda folder: (folder / "model_000005.pt").write_bytes(b"hello, this is text"), "damaged"),
    ],
)
def test_what_is_wrong_is_reported_and_nothing_is_written(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    printed: str,
) -> None:
    damage(base / "base_checkpoints" / "d3")
    assert take_in(base, "--run-dir", tmp_path / "run") == 2
    shown = capsys.readouterr()
    with pytest.raises(ConfigError, match=printed):
        raise ConfigError(shown.err)
    assert str(base) in shown.err
    assert len(shown.err.splitlines()) == 1
    assert "loaded" not in shown.out
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_of_ours_is_not_exported(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = step_dir(tmp_path / "ours", data_dir / "tokenizer")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert export(path, tmp_path / "base") == 2
    printed = capsys.readouterr().err
    assert "model.safetensors is damaged" in printed
    assert "Use another checkpoint, or a copy of this one (ansible-playbook fetch.yml)." in printed
    assert export(tmp_path / "none", tmp_path / "base") == 2
    assert export(path, tmp_path / "base", "--model-tag", "../../up") == 2
    assert not (tmp_path / "base").exists()
    assert take_in(tmp_path) == 2
    assert "There is no target" in capsys.readouterr().err


def test_the_knobs_of_a_model_give_that_model() -> None:
    for depth, width, head, kv in ((20, 1280, 128, 10), (12, 768, 64, 12), (5, 384, 128, 1), (7, 48, 16, 3)):
        model = GPTConfig(2048, 32768, depth, width // head, kv, width, "SL")
        config = run_config(
            model, {"user_config": {"num_iterations": -1, "matrix_lr": -5, "warmup_steps": "x"}}
        )
        assert model == GPTConfig.from_depth(
            config.depth,
            32768,
            config.sequence_len,
            config.aspect_ratio,
            config.head_dim,
            config.n_kv_head,
            config.window_pattern,
        )
        assert (config.num_iterations, config.matrix_lr, config.total_batch_size) == (0, 0.02, 4096)
    assert run_config(model, {"total_batch_size": 524288}).total_batch_size == 524288
    for steps, flops, expected in (
        (-1, 1e15, (0, 1e15)),
        (7, 1e15, (7, 0)),
        (-1, -1.0, (0, 0)),
        (7, -1.0, (7, 0)),
    ):
        config = run_config(model, {"user_config": {"num_iterations": steps, "target_flops": flops}})
        assert (config.num_iterations, config.target_flops) == expected
    with pytest.raises(ConfigError, match="40 layers, heads of the width 8 and the width 64"):
        run_config(GPTConfig(n_layer=40, n_head=8, n_kv_head=8, n_embd=64), {})
