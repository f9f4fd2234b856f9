"""The settings of a run: casts, checks in sentences, digest, run file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.__main__ import main
from trainer.bench.report import main as report_bench
from trainer.config import ConfigError, RunConfig, RunFile, parse_shares
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT
from trainer.run_plan import describe_plan, make_plan


def test_text_becomes_numbers() -> None:
    config = RunConfig.from_strings(
        {"depth": "4", "matrix_lr": 1, "total_batch_size": "auto", "threads": "auto", "sync": "dense"}
    )
    assert config.threads == RunConfig().threads
    assert (config.depth, config.matrix_lr, config.total_batch_size) == (4, 1.0, 0)
    assert config == RunConfig.from_strings(config.to_dict())


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({"dept": 4}, "did you mean depth?"),
        ({"zzzz": 4}, "the settings are depth"),
        ({"depth": "four"}, "depth is 'four': it takes a whole number."),
        ({"depth": 4.5}, "it takes a whole number"),
        ({"depth": True}, "it takes a whole number"),
        ({"depth": None}, "it takes a whole number"),
        ({"depth": 0}, "depth is 0: it must be at least 1."),
        ({"matrix_lr": "nan"}, "it takes a number"),
        ({"matrix_lr": -1}, "it must be above 0"),
        ({"warmdown_ratio": 1.5}, "between 0 and 1"),
        ({"total_batch_size": "foo"}, "it takes a whole number or auto"),
        ({"threads": "all"}, "threads is 'all': it takes a whole number or auto."),
        ({"total_batch_size": 5000}, "multiple of sequence_len (1024); use 4096 or 5120."),
        ({"head_dim": 33}, "must be even"),
        ({"n_kv_head": 3}, "must divide the number of heads, 4 here"),
        ({"window_pattern": "SX"}, "S and L"),
        ({"dtype": "float16"}, "must be auto or float32 or bfloat16 or float64"),
        ({"tracker_experiment": ""}, "tracker_experiment is '': it takes 1 to 250 letters"),
        ({"tracker_experiment": "x" * 251}, "it takes 1 to 250 letters"),
        ({"tracker_experiment": "a\nb"}, "it takes 1 to 250 letters"),
        ({"tracker_experiment": "d{dept}"}, "and {depth} for the depth"),
        ({"keep_checkpoints": 0}, "must be at least 1"),
        ({"num_iterations": 5, "target_flops": 1e12}, "Leave one of them out."),
    ],
)
def test_bad_knobs_get_a_sentence(settings: dict[str, object], printed: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(printed)):
        RunConfig.from_strings(settings)


def test_the_experiment_is_named_by_depth_and_is_no_part_of_the_run() -> None:
    assert RunConfig(depth=4).experiment == "nanochat-d4"
    assert RunConfig(depth=4, tracker_experiment="/lab/d{depth} of {depth}").experiment == "/lab/d4 of 4"
    assert RunConfig(tracker_experiment="mine").digest() == RunConfig().digest()
    assert RunConfig.resumed({}, {"depth": 4}).experiment == "nanochat-d4", "a new run"
    assert RunConfig.resumed({"depth": 4}, {}).experiment == "nanofleet", "a run of an earlier release"


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
    for text, printed in [
        ("{", "is not JSON"),
        ("[]", "holds no settings"),
        (
            '{"run_id": "x", "config": {}}',
            "has None as its schema (format version), which must be a whole number",
        ),
        ('{"schema": 1, "run_id": "x"}', "lacks its config"),
        ('{"schema": 1, "run_id": "/", "config": {}}', "run_id is '/'"),
        ('{"schema": 1, "run_id": "x", "config": {"depth": -1}}', "depth is -1"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            RunFile.load(path)
        assert printed in str(caught.value)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFile.load(tmp_path / "none.json")


def test_configuration_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, trainer.config as c, trainer.code_digest as f; c.RunConfig().digest(); f.code_digest()"
    )
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


def test_numbers_of_the_command_line_are_finite_and_not_negative(capfd: pytest.CaptureFixture[str]) -> None:
    sample = ["sample", "--checkpoint", "c", "--temperature"]
    track = ["track", "--run-dir", "r", "--patience"]
    for arguments in ([*sample, "nan"], [*sample, "inf"], [*sample, "-1"], [*track, "nan"], [*track, "x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert f"{arguments[-1]!r} is no number from 0" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        report_bench(["folder", "--out", "out", "--link-mbit", "nan"])
    for arguments, printed in (
        ([*sample, "1e-300"], "--temperature is 1e-300: it takes 0, or 0.001 or more."),
        ([*sample, "1", "--seed", str(2**64)], f"--seed is {2**64}: it takes a whole number from 0"),
        ([*sample, "1", "--max-tokens", "0"], "--max-tokens is 0"),
    ):
        assert main(arguments) == 2
        assert printed in capfd.readouterr().err


def test_a_misspelt_option_is_reported_with_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--data-dir", "d", "--run-dir", "r"]
    for arguments, printed in (
        ([*train, "--dept", "4"], "--dept is no option of train: did you mean --depth?"),
        (["sample", "--checkpoint", "c", "--promt=x"], "did you mean --prompt?"),
        ([*train, "--zzz"], "python -m trainer train --help lists them."),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert printed in capfd.readouterr().err


def test_plan_of_depth_8_has_the_documented_scales() -> None:
    plan = make_plan(RunConfig(), vocab_size=32768, world_size=3)
    assert plan.shares == [2, 1, 1]
    assert plan.scales.lr == pytest.approx(0.0884, abs=5e-5)
    assert 0.28 * plan.scales.weight_decay == pytest.approx(0.064965, abs=5e-7)
    assert make_plan(RunConfig(total_batch_size=0), 32768, 1).total_batch_size == 262_144
    with pytest.raises(ConfigError, match="use 5120 or more"):
        make_plan(RunConfig(), vocab_size=32768, world_size=5)


def test_the_horizon_is_asked_for_in_steps_flops_or_data() -> None:
    def steps(**settings: object) -> int:
        return make_plan(RunConfig.from_strings(settings), vocab_size=32768, world_size=1).num_iterations

    assert steps() == 5000
    assert steps(num_iterations=7) == 7
    assert steps(num_iterations=0) == (12 * 41_943_232) // 4096
    assert steps(target_param_data_ratio=6) == (6 * 41_943_232) // 4096  # the default steps give way
    assert steps(target_flops=5.605e15) == 5000
    assert steps(target_flops=5.605e15, total_batch_size=16384) == 1250
    assert steps(target_flops=1) == 1
    loaded = RunConfig.from_strings(RunConfig.from_strings({"target_flops": 1e15}).to_dict())
    assert (loaded.num_iterations, loaded.target_flops) == (0, 1e15)


def test_shares_are_checked_against_the_step() -> None:
    assert make_plan(RunConfig(), 32768, 2, shares=[3, 1]).shares == [3, 1]
    for shares in ([2, 1], [4], [2, 1, 1]):
        with pytest.raises(ConfigError, match=r"must be 2 number\(s\), one a rank, that add up to the"):
            make_plan(RunConfig(), 32768, 2, shares=shares)
    assert parse_shares("3, 2") == (3, 2)
    assert parse_shares("") == parse_shares([]) == ()
    with pytest.raises(ConfigError, match="rows per rank such as 3,2"):
        parse_shares("3;2")
    with pytest.raises(ConfigError, match="each rank takes 1 row of a step or more"):
        RunFile("run", RunConfig(), shares=(4, 0))


def test_what_depth_8_shows_before_step_0() -> None:
    config = RunConfig()
    plan = make_plan(config, vocab_size=32768, world_size=2)
    with torch.device("meta"):
        model = GPT(plan.model)
    printed = describe_plan(
        plan, config, model, train_rows=5000, micro_batches=[config.device_batch_size] * len(plan.shares)
    )
    for expected in (
        "total                   125,829,354",
        "value_embeds             67,108,864",
        "transformer_matrices     25,166,016",
        "273,679,632 FLOPs per token, 5.605e+15 in all",
        "5,000 steps of 4,096 tokens = 20,480,000 tokens; 2 rows a rank in 1 micro-batch",
        "0.488 tokens per scaling parameter",
        "learning rates 0.0884, Muon's weight decay 0.064965, AdamW's width 1.224745",
        "warning: the model will be undertrained; 12 tokens per scaling parameter would take 122,880 steps",
        "the data have 5,120,000 tokens, so the run reads them 4.0 times",
    ):
        assert expected in printed
    long = RunConfig.from_strings({"target_param_data_ratio": 12})
    plan = make_plan(long, vocab_size=32768, world_size=3)
    printed = describe_plan(
        plan, long, model, train_rows=1_000_000, micro_batches=[long.device_batch_size] * len(plan.shares)
    )
    assert "warning" not in printed
    assert "reads them" not in printed
    assert "2/1/1 rows a rank in 1 micro-batch" in printed


def test_place_comes_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOFLEET_HOST", "attic")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert RankEnv.from_environment() == RankEnv(host="attic")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK is 2 .* from 0 to 1, because WORLD_SIZE is 2"):
        RankEnv.from_environment()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="takes a whole number"):
        RankEnv.from_environment()
