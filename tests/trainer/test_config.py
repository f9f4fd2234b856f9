"""The knobs of a run: casts, checks in sentences, digest, run file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.config import ConfigError, RunConfig, RunFile
from trainer.host.place import Place
from trainer.plan import duration, make_plan


def test_text_becomes_numbers() -> None:
    config = RunConfig.from_strings(
        {"depth": "4", "matrix_lr": 1, "total_batch_size": "auto", "sync": "dense"}
    )
    assert (config.depth, config.matrix_lr, config.total_batch_size) == (4, 1.0, 0)
    assert config == RunConfig.from_strings(config.to_dict())


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"dept": 4}, "did you mean depth?"),
        ({"zzzz": 4}, "the knobs are depth"),
        ({"depth": "four"}, "depth is 'four': it takes a whole number."),
        ({"depth": 4.5}, "it takes a whole number"),
        ({"depth": True}, "it takes a whole number"),
        ({"depth": None}, "it takes a whole number"),
        ({"depth": 0}, "depth is 0: it must be at least 1."),
        ({"matrix_lr": "nan"}, "it takes a number"),
        ({"matrix_lr": -1}, "it must be above 0"),
        ({"warmdown_ratio": 1.5}, "between 0 and 1"),
        ({"total_batch_size": "foo"}, "it takes a whole number or auto"),
        ({"total_batch_size": 5000}, "multiple of sequence_len (1024); use 4096 or 5120."),
        ({"head_dim": 33}, "must be even"),
        ({"n_kv_head": 3}, "must divide the number of heads, 4 here"),
        ({"window_pattern": "SX"}, "S and L"),
        ({"dtype": "float16"}, "must be auto or float32 or bfloat16 or float64"),
    ],
)
def test_bad_knobs_get_a_sentence(knobs: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        RunConfig.from_strings(knobs)


def test_digest_names_the_run_and_follows_every_knob() -> None:
    config = RunConfig()
    assert config.default_run_id() == f"d8-{config.digest()[:8]}"
    assert config.digest() == RunConfig.from_strings({"depth": "8"}).digest()
    assert config.digest() != RunConfig(seed=1).digest()


def test_run_file_round_trip_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_file = RunFile("d4-x", RunConfig(depth=4), ("a", "b"), "c" * 64, "d" * 64)
    path.write_text(json.dumps(run_file.to_dict()))
    assert RunFile.load(path) == run_file
    for text, said in [
        ("{", "is not JSON"),
        ("[]", "schema 1"),
        ('{"schema": 1, "run_id": "x"}', "lacks its config"),
        ('{"schema": 1, "run_id": "/", "config": {}}', "run_id is '/'"),
        ('{"schema": 1, "run_id": "x", "config": {"depth": -1}}', "depth is -1"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            RunFile.load(path)
        assert said in str(caught.value)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFile.load(tmp_path / "none.json")


def test_configuration_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, trainer.config as c; c.RunConfig().digest(); c.code_digest()"
    code += "; assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_input_ends_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "trainer", "train", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path / "none"), "--depth", "four"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "depth is 'four'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["outcome"] == "final"
    assert "depth is 'four'" in outcome["reason"]
    assert main(["sample", "--checkpoint", str(tmp_path / "none")]) == 2
    assert "There is no checkpoint directory" in capfd.readouterr().err


def test_plan_of_depth_8_has_the_documented_scales() -> None:
    plan = make_plan(RunConfig(), vocab_size=32768, world_size=3)
    assert plan.shares == [2, 1, 1]
    assert plan.scales.lr == pytest.approx(0.0884, abs=5e-5)
    assert 0.28 * plan.scales.weight_decay == pytest.approx(0.064965, abs=5e-7)
    assert make_plan(RunConfig(total_batch_size=0), 32768, 1).total_batch_size == 262_144
    with pytest.raises(ConfigError, match="use 5120 or more"):
        make_plan(RunConfig(), vocab_size=32768, world_size=5)


def test_place_comes_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOFLEET_HOST", "attic")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Place.from_environment() == Place(host="attic")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK is 2 but WORLD_SIZE is 2"):
        Place.from_environment()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="takes a whole number"):
        Place.from_environment()


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 45, 154, 11_100, 190_000)] == ["0s", "45s", "2m34s", "3h05m", "2d04h"]
