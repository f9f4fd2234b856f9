"""A preset is settings by name: what is typed beside it goes before it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, flags

from trainer.config import HORIZON, RunConfig
from trainer.presets import LENGTHS, PRESETS, PresetError, apply_preset

ROOT = Path(__file__).resolve().parents[2]


def test_every_preset_is_a_configuration() -> None:
    for preset in PRESETS.values():
        assert preset.help
        RunConfig.from_strings(preset.settings)


def test_smoke_is_ten_steps_that_two_hosts_share() -> None:
    smoke = RunConfig.from_strings(apply_preset("smoke", {}))
    assert (smoke.depth, smoke.head_dim, smoke.sequence_len, smoke.device_batch_size) == (4, 64, 512, 2)
    assert smoke.total_batch_size == 2 * smoke.device_batch_size * smoke.sequence_len
    assert (smoke.num_iterations, smoke.eval_every, smoke.sample_every, smoke.tracker) == (10, 5, 10, "none")


def test_what_is_given_goes_before_the_preset_and_that_before_what_is_stored() -> None:
    applied = apply_preset("smoke", {"depth": 6}, {"depth": 12, "head_dim": 128, "seed": 7, "steps": 99})
    assert applied == {**PRESETS["smoke"].settings, "depth": 6, "seed": 7}
    assert apply_preset("", {"depth": 6}, {"depth": 12, "seed": 7}) == {"depth": 6, "seed": 7}


@pytest.mark.parametrize("length", [{"target_flops": 1e12}, {"target_param_data_ratio": 2}, {"steps": 3}])
def test_a_given_length_replaces_that_of_the_preset(length: dict[str, float]) -> None:
    assert "num_iterations" not in apply_preset("smoke", length)


def test_the_lengths_are_the_settings_of_the_horizon() -> None:
    assert {*RunConfig.field_names(HORIZON), "steps"} == LENGTHS


def test_an_unknown_preset_is_refused_with_all_of_them() -> None:
    with pytest.raises(PresetError, match="preset is 'smoked': it takes smoke"):
        apply_preset("smoked", {})


def train(data_dir: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", "train", "--data-dir", str(data_dir)]
    command += ["--run-dir", str(run_dir), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_unknown_preset_ends_the_trainer_before_it_starts(tmp_path: Path) -> None:
    done = train(tmp_path, tmp_path / "run", "--preset", "smoked")
    assert done.returncode not in (0, 1)
    assert "preset is 'smoked': it takes smoke." in done.stdout + done.stderr
    done = train(tmp_path, tmp_path / "run", "--preset", "smoke", "--run-file", "run.json")
    assert "--run-file already contains all settings" in done.stdout + done.stderr


@pytest.mark.processes
def test_the_trainer_trains_the_preset(data_dir: Path, tmp_path: Path) -> None:
    """The settings that make the model small here are given, so they go before those of the preset."""
    names = ("aspect_ratio", "head_dim", "sequence_len", "total_batch_size", "eval_tokens", "threads")
    small = flags({"depth": 2, "dtype": "float32", **{name: TINY[name] for name in names}})
    done = train(data_dir, tmp_path / "run", "--preset", "smoke", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    assert [line["step"] for line in lines if "val_bpb" in line] == [5, 10]
    assert [path.name for path in (tmp_path / "run" / "samples").iterdir()] == ["step_000010.txt"]
