"""Checkpoints go to upstream nanochat and come back bitwise."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch
import upstream
from conftest import losses, train_here
from nanochat_base import (
    CONFIG,
    IDS,
    MODEL,
    SHAPE,
    base_directory,
    bitwise,
    encoding_of,
    everything,
    export,
    step_dir,
    take_in,
    type_in,
    weights_of,
)

from trainer.checkpoint import storage
from trainer.config import ConfigError
from trainer.data.tokenizer import Tokenizer
from trainer.interchange.layout import find_pair
from trainer.model.gpt import GPT
from trainer.outcome import Final


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    return step_dir(tmp_path_factory.mktemp("ours"), data_dir / "tokenizer")


@pytest.fixture(scope="module")
def encoding(data_dir: Path) -> tiktoken.Encoding:
    return encoding_of(Tokenizer.load(data_dir / "tokenizer"))


@pytest.fixture
def base(tmp_path: Path, data_dir: Path) -> Path:
    return base_directory(tmp_path / "nanochat", data_dir)


# -- there, and back ---------------------------------------------------------------------------------------


def test_upstream_loads_what_is_exported(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(ours, tmp_path / "base") == 0
    printed = capsys.readouterr().out
    assert (
        f"NANOCHAT_BASE_DIR={tmp_path / 'base'} python -m scripts.base_eval --model-tag d3 --step 100"
        in printed
    )
    loaded = upstream.load_model(tmp_path / "base")
    assert (loaded.tag, loaded.step, loaded.config) == ("d3", 100, SHAPE)
    assert bitwise(loaded.weights, weights_of(100))
    assert sorted(loaded.meta["model_config"]) == sorted(SHAPE.__dict__)
    # What upstream's fine-tuning inherits from the meta file:
    assert [loaded.meta[name] for name in ("device_batch_size", "max_seq_len", "total_batch_size")] == [
        2,
        32,
        160,
    ]
    assert loaded.meta["user_config"]["matrix_lr"] == CONFIG.matrix_lr
    tokenizer = Tokenizer.load(ours / "tokenizer")
    assert type(loaded.encoding) is tiktoken.Encoding
    text = "erb arl 1234567 <|bos|> naïve 日本\r\n\r\n"
    assert loaded.encoding.encode_ordinary(text) == tokenizer.encode(text)
    assert loaded.encoding.encode_single_token("<|bos|>") == tokenizer.bos_id
    assert loaded.token_bytes.dtype == torch.int32
    assert loaded.token_bytes.tolist() == tokenizer.token_bytes.tolist()
    assert sorted(everything(tmp_path / "base")) == [
        "base_checkpoints/d3/meta_000100.json",
        "base_checkpoints/d3/model_000100.pt",
        "tokenizer/token_bytes.pt",
        "tokenizer/tokenizer.pkl",
    ]


def test_out_and_back_is_bitwise(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(ours, tmp_path / "base", "--model-tag", "mine") == 0
    assert take_in(tmp_path / "base", "--run-dir", tmp_path / "run") == 0
    back = tmp_path / "run" / "checkpoints" / "step_000100"
    state = storage.load(back)
    assert bitwise(state.model, weights_of(100))
    assert (back / "tokenizer" / "tokenizer.json").read_bytes() == (
        ours / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    for name in (
        "num_iterations",
        "matrix_lr",
        "warmup_steps",
        "total_batch_size",
        "n_kv_head",
        "aspect_ratio",
    ):
        assert state.meta["config"][name] == getattr(CONFIG, name), name
    assert state.meta["model_config"] == MODEL.__dict__
    capsys.readouterr()
    texts = []
    for path in (ours, back):
        assert type_in("sample", "--checkpoint", path, "--prompt", "erb", "--max-tokens", 20) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_in_and_out_again_is_bitwise(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert take_in(base, "--run-dir", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "optimizer state is not imported" in printed
    assert "--depth 3 --aspect-ratio 16 --head-dim 16 --n-kv-head 1 --sequence-len 32 " in printed
    assert export(tmp_path / "run" / "checkpoints" / "step_000005", tmp_path / "again") == 0
    assert bitwise(upstream.load_model(tmp_path / "again").weights, weights_of(5))
    pkl = Path("tokenizer", "tokenizer.pkl")
    assert (base / pkl).read_bytes() == (tmp_path / "again" / pkl).read_bytes()


def test_the_model_computes_the_same_there_and_here(base: Path, tmp_path: Path) -> None:
    model = GPT(MODEL)
    model.load_state_dict(upstream.load_model(base).weights)
    assert take_in(base / "base_checkpoints" / "d3", "--run-dir", tmp_path / "run") == 0
    taken, _ = storage.load_model(tmp_path / "run" / "checkpoints" / "step_000005")
    with torch.no_grad():
        assert torch.equal(model(IDS), taken(IDS))


def test_weights_of_a_gpu_run_come_in_as_float32(
    base: Path, encoding: tiktoken.Encoding, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = weights_of(6)
    in_bf16 = [name for name in weights if "wte" in name or "value_embeds" in name]
    weights |= {name: weights[name].bfloat16() for name in in_bf16}
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    upstream.save(base, "d3", 6, compiled, SHAPE, encoding)
    assert take_in(base, "--run-dir", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert (
        "transformer.wte.weight, value_embeds.0.weight, value_embeds.2.weight were converted from bfloat16"
        in printed
    )
    assert "the values are the same" in printed
    state = storage.load(tmp_path / "run" / "checkpoints" / "step_000006")
    assert bitwise(state.model, {name: tensor.float() for name, tensor in weights.items()})
    assert bitwise({n: state.model[n].bfloat16() for n in in_bf16}, {n: weights[n] for n in in_bf16})


def test_a_float64_run_is_rounded_and_reports_it(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = step_dir(tmp_path / "ours", data_dir / "tokenizer", torch.float64)
    assert export(path, tmp_path / "base") == 0
    assert "float64 values are rounded" in capsys.readouterr().out
    exact = weights_of(100, torch.float64)
    assert bitwise(upstream.load_model(tmp_path / "base").weights, {n: t.float() for n, t in exact.items()})


# -- what is there already ---------------------------------------------------------------------------------


def test_exporting_again_changes_nothing_and_never_replaces_unasked(
    ours: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    assert export(ours, base) == 0
    before = everything(base)
    capsys.readouterr()
    assert export(ours, base) == 0
    assert "wrote" not in capsys.readouterr().out
    assert everything(base) == before

    other = step_dir(tmp_path / "other", data_dir / "tokenizer", step=7)
    shutil.move(other, other.with_name("step_000100"))
    meta = other.with_name("step_000100") / "meta.json"
    meta.write_text(meta.read_text().replace('"step": 7', '"step": 100'))
    assert export(meta.parent, base) == 2
    assert "exists and differs from the export. Give another --model-tag" in capsys.readouterr().err
    assert everything(base) == before
    assert export(meta.parent, base, "--model-tag", "d3-other") == 0
    assert before.items() <= everything(base).items()
    assert export(meta.parent, base, "--overwrite") == 0
    assert bitwise(upstream.load_model(base, "d3").weights, weights_of(7))


def test_other_token_bytes_are_refused_or_replaced(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    assert export(ours, base) == 0
    path = base / "tokenizer" / "token_bytes.pt"
    right = torch.load(path)
    torch.save(right.to(torch.int32), path, _use_new_zipfile_serialization=False)  # as another torch would
    assert export(ours, base) == 0
    torch.save(right + 1, path)
    assert export(ours, base) == 2
    assert "exists and differs from the export. Give another --out" in capsys.readouterr().err
    assert export(ours, base, "--overwrite") == 0
    assert torch.equal(torch.load(path), right)


def test_another_tokenizer_is_not_put_beside_models_that_need_theirs(
    ours: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pkl = base / "tokenizer" / "tokenizer.pkl"
    assert export(ours, base) == 0  # the same tokenizer, pickled by upstream
    other = upstream.train_tokenizer(["some other text of other words " * 9], 270)
    pkl.write_bytes(pickle.dumps(other))
    before = everything(base)
    assert export(ours, base, "--model-tag", "d9") == 2
    assert "is another tokenizer than the checkpoint's" in capsys.readouterr().err
    pkl.write_bytes(b"garbage")
    assert export(ours, base, "--model-tag", "d9") == 2
    assert "give another --out, or --overwrite" in capsys.readouterr().err
    pkl.write_bytes(pickle.dumps(other))
    assert everything(base) == before
    assert export(ours, base, "--model-tag", "d9", "--overwrite") == 0
    assert upstream.load_model(base, "d9").encoding.n_vocab == 300


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_an_export_that_breaks_off_leaves_no_checkpoint_to_be_found(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    real, calls = os.replace, []

    def full_disk(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) > fails_at:
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        assert export(ours, tmp_path / "base") == 2
    left = everything(tmp_path / "base")
    assert not [name for name in left if "model_" in name or "exporting" in name]
    assert export(ours, tmp_path / "base") == 0
    assert bitwise(upstream.load_model(tmp_path / "base").weights, weights_of(100))


def test_importing_again_changes_nothing_and_a_run_keeps_its_checkpoints(
    base: Path, encoding: tiktoken.Encoding, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert take_in(base, "--run-dir", tmp_path / "run") == 0
    before = everything(tmp_path / "run")
    assert take_in(base, "--run-dir", tmp_path / "run") == 0
    assert "already; unchanged" in capsys.readouterr().out
    upstream.save(base, "d3", 9, weights_of(9), SHAPE, encoding)
    assert take_in(base, "--run-dir", tmp_path / "run") == 2
    assert "has checkpoints already (step_000005): give another --run-dir" in capsys.readouterr().err
    assert everything(tmp_path / "run") == before


# -- which one ---------------------------------------------------------------------------------------------


def test_the_deepest_model_and_the_last_step_are_taken_unless_asked(
    base: Path, encoding: tiktoken.Encoding, tmp_path: Path
) -> None:
    upstream.save(base, "d12", 5, weights_of(5), SHAPE, encoding)
    upstream.save(base, "d12", 1_000_000, weights_of(6), SHAPE, encoding)
    upstream.save(base, "other", 7, weights_of(7), SHAPE, encoding)
    (base / "base_checkpoints" / "d12" / "model_000009_backup.pt").write_bytes(b"")
    folder = base / "base_checkpoints"
    deepest = find_pair(base)
    assert (deepest.folder, deepest.step) == (folder / "d12", 1_000_000)
    (folder / "d12" / "model_000009_backup.pt").unlink()
    loaded = upstream.load_model(base)
    assert (loaded.tag, loaded.step) == ("d12", 1_000_000)
    assert find_pair(base, step=5).step == 5
    assert find_pair(base, "other").step == 7
    assert find_pair(folder / "d3").step == 5
    assert find_pair(folder / "d12" / "model_000005.pt").step == 5
    with pytest.raises(ConfigError, match="is of step 5: remove --step 6"):
        find_pair(folder / "d12" / "model_000005.pt", step=6)
    for asked, printed in (
        ({"model_tag": "d4"}, "no model d4 in .*, only d12, d3, other"),
        ({"step": 6}, "no step 6 in .*d12, only 5, 1000000"),
    ):
        with pytest.raises(ConfigError, match=printed):
            find_pair(base, **asked)
    with pytest.raises(ConfigError, match="not named like the checkpoints of nanochat"):
        find_pair(folder / "d3" / "meta_000005.json")
    with pytest.raises(ConfigError, match="There is no file or folder"):
        find_pair(tmp_path / "none")
    with pytest.raises(ConfigError, match="There is no checkpoint in"):
        find_pair(tmp_path)


def test_a_tokenizer_elsewhere_is_given_by_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tmp_path / "deep" / "down" / "the" / "tree" / "here"
    shutil.copytree(base / "base_checkpoints" / "d3", pair)
    assert take_in(pair, "--run-dir", tmp_path / "run") == 2
    assert "or the tokenizer with --tokenizer FILE" in capsys.readouterr().err
    pkl = base / "tokenizer" / "tokenizer.pkl"
    assert take_in(pair, "--run-dir", tmp_path / "run", "--tokenizer", pkl) == 0


# -- a run on it -------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_an_imported_checkpoint(base: Path, data_dir: Path, tmp_path: Path) -> None:
    assert take_in(base, "--run-dir", tmp_path / "run") == 0
    config = storage.read_meta(tmp_path / "run" / "checkpoints" / "step_000005")["config"]
    assert (config["num_iterations"], config["total_batch_size"], config["matrix_lr"]) == (8, 128, 0.03)
    attempt = train_here(data_dir, tmp_path / "run", **config)
    assert len(losses(tmp_path / "run")) == 3
    assert "All 8 steps done" in json.loads((tmp_path / "run" / "outcome.json").read_text())["reason"]
    assert attempt is not None


def test_a_new_run_begins_with_imported_weights(
    ours: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tmp_path / "trained"
    train_here(data_dir, trained, num_iterations=6)
    assert export(trained / "checkpoints" / "step_000006", tmp_path / "base") == 0
    for run_dir in (tmp_path / "more", tmp_path / "wrong"):
        assert take_in(tmp_path / "base", "--run-dir", run_dir, "--restart") == 0
    train_here(data_dir, tmp_path / "more", num_iterations=2, seed=7, total_batch_size=64)
    assert "Starting with the weights of nanochat's d2, step 6." in capsys.readouterr().out
    assert losses(tmp_path / "more")[0] < losses(trained)[3] < losses(trained)[0]
    with pytest.raises(Final, match="are of another model: n_layer is 2 in the checkpoint and 3 in the run"):
        train_here(data_dir, tmp_path / "wrong", depth=3, aspect_ratio=16)


def test_a_data_directory_takes_upstreams_tokenizer(
    base: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert take_in(base, "--data-dir", tmp_path / "data") == 0
    data = tmp_path / "data"
    assert f"prepare --source FOLDER --out {data} --tokenizer {data}/tokenizer" in capsys.readouterr().out
    assert take_in(base, "--data-dir", tmp_path / "data") == 0
    assert Tokenizer.load(tmp_path / "data" / "tokenizer") == Tokenizer.load(data_dir / "tokenizer")
    other = upstream.train_tokenizer(["some other text of other words " * 9], 270)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(other))
    capsys.readouterr()
    assert take_in(base, "--data-dir", tmp_path / "data") == 2
    assert "differs from the tokenizer to import. Give another --data-dir" in capsys.readouterr().err


def test_a_base_directory_is_adopted_as_it_is(
    base: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data_dir / "shards", base / "base_data_climbmix")
    before = everything(base)
    for printed in ("2 shards", "nothing has changed"):
        assert take_in(base, "--data-dir", tmp_path / "data", "--run-dir", tmp_path / "run") == 0
        assert printed in capsys.readouterr().out
    assert everything(base) == before
    for path in (base / "base_data_climbmix").iterdir():
        assert (tmp_path / "data" / "shards" / path.name).read_bytes() == path.read_bytes()
    config = storage.read_meta(tmp_path / "run" / "checkpoints" / "step_000005")["config"]
    train_here(tmp_path / "data", tmp_path / "run", **config)
    assert len(losses(tmp_path / "run")) == 3
    other = upstream.train_tokenizer(["some other text of other words " * 9], 270)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(other))
    capsys.readouterr()
    assert take_in(base, "--data-dir", tmp_path / "data") == 2
    assert "differs from the tokenizer to import. Give another --data-dir" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    program = "import sys, trainer.__main__ as m; m.make_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
