"""What a run keeps when it is resumed, and what may change: identity, horizon, runtime settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Start, losses, train_here

from trainer.checkpoint import compatibility, storage
from trainer.config import HORIZON, IDENTITY, RUNTIME, ConfigError, RunConfig
from trainer.optim.lr_schedule import describe_extension
from trainer.outcome import Final

SETTINGS = {"dtype": "float64", "save_minutes": 0, "eval_every": 0, "digest_every": 0}
OTHERS = {
    "device_batch_size": 1,
    "threads": 2,
    "recompute": "layers",
    "elastic": "false",
    "min_hosts": 2,
    "snapshot_seconds": 30.0,
    "local_grace": 20.0,
    "join_grace": 30.0,
    "coordinator_failover": "true",
    "eval_every": 3,
    "eval_tokens": 64,
    "core_metric_every": 5,
    "core_metric_max_per_task": 10,
    "sample_every": 4,
    "save_every": 2,
    "save_minutes": 1.5,
    "keep_checkpoints": 1,
    "checkpoint_copies": 3,
    "device": "cpu",
    "digest_every": 2,
    "tracker": "none",
    "tracker_experiment": "mine",
}


def events(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().out


def test_the_digest_is_of_the_identity_alone() -> None:
    config = RunConfig()
    assert all(getattr(config, name) != other for name, other in OTHERS.items())
    assert RunConfig(**OTHERS).digest() == config.digest()
    assert RunConfig(num_iterations=6000).default_run_id() == config.default_run_id()
    texts = {"window_pattern": "L", "dtype": "float32", "sync": "exact", "sync_allow": "fast"}
    texts |= {"stage": "sft", "parent": "other/step_000001/0123456789ab"}
    for name in RunConfig.field_names(IDENTITY):
        value = getattr(config, name)
        other = texts.get(name) or {"local_bits": 4, "head_dim": 64}.get(name) or value / 2
        other = other or (0.5 if isinstance(value, float) else 2)
        changed = RunConfig(**{name: other})
        assert changed.digest() != config.digest(), name
    sections = [RunConfig.field_names(section) for section in (IDENTITY, HORIZON, RUNTIME)]
    assert sorted(sum(sections, ())) == sorted(RunConfig.field_names())
    assert set(OTHERS) == set(RunConfig.field_names(RUNTIME))


def test_an_asked_horizon_replaces_the_one_before_as_a_whole() -> None:
    saved = RunConfig.from_strings({"depth": 4, "target_flops": 1e15, "save_minutes": 5}).to_dict()
    resumed = RunConfig.resumed(saved, {"num_iterations": "6000"})
    assert (resumed.num_iterations, resumed.target_flops) == (6000, 0)
    assert (resumed.depth, resumed.save_minutes) == (4, 5)
    resumed = RunConfig.resumed(RunConfig().to_dict(), {"target_param_data_ratio": 20})
    assert (resumed.num_iterations, resumed.target_param_data_ratio) == (0, 20)
    assert RunConfig.resumed(saved, {"seed": 1}).target_flops == 1e15


def test_every_runtime_setting_may_change_when_a_run_is_resumed(
    data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(data_dir, tmp_path / "alone", **SETTINGS, num_iterations=12)
    train_here(data_dir, tmp_path / "run", **SETTINGS, num_iterations=12, save_every=7)
    for path in (tmp_path / "run" / "checkpoints").glob("step_000012"):
        path.rename(tmp_path / "away")
    capfd.readouterr()
    without_bundle = {"core_metric_every": 0}
    train_here(data_dir, tmp_path / "run", **{**SETTINGS, **OTHERS, **without_bundle}, num_iterations=12)
    printed = events(capfd)
    assert "Resuming from the checkpoint of step 7." in printed
    for change in ("device_batch_size was 2, now 1", "save_minutes was 0.0, now 1.5", "threads was 1, now 2"):
        assert change in printed
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)


@pytest.mark.parametrize(("name", "value"), [("seed", 43), ("matrix_lr", 0.7), ("sync", "exact")])
def test_the_identity_may_not_change(data_dir: Path, tmp_path: Path, name: str, value: Any) -> None:
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=2)
    with pytest.raises(Final, match=rf"another configuration: {name} was .*, now {value!r}\. "):
        train_here(data_dir, tmp_path, **{**SETTINGS, name: value}, num_iterations=2)


def test_a_finished_run_is_extended(
    data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=6)
    first = losses(tmp_path)
    capfd.readouterr()
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=10)
    printed = events(capfd)
    assert "from 6 to 10 steps. The learning rates fall after step 5 instead of step 3." in printed
    assert "Step 7 has 0.68 times the full learning rates; step 6 had 0.29 times." in printed
    assert "The 3 steps that were already trained at lower rates are not repeated." in printed
    assert losses(tmp_path)[:6] == first
    assert len(losses(tmp_path)) == 10
    meta = json.loads((tmp_path / "checkpoints/step_000010/meta.json").read_text())
    assert (meta["step"], meta["num_iterations"], meta["config"]["num_iterations"]) == (10, 10, 10)


def test_a_run_does_not_become_shorter(data_dir: Path, tmp_path: Path) -> None:
    """Be it that an inventory has another number of steps for all runs."""
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=6, save_every=4)
    (tmp_path / "checkpoints" / "step_000006").rename(tmp_path / "away")
    for steps in (5, 3):
        printed = rf"has 6 steps, of which 4 are done. .* asks for {steps} steps, .* ask for 6 steps or more"
        with pytest.raises(Final, match=printed):
            train_here(data_dir, tmp_path, **SETTINGS, num_iterations=steps)
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=6)


def test_a_run_keeps_the_steps_that_were_derived_from_its_target() -> None:
    """A release may count floating-point operations otherwise."""
    config = RunConfig.from_strings({"target_flops": 1e15})
    meta = {"config": config.to_dict(), "num_iterations": 1000}
    assert compatibility.planned_steps(meta, config, 990) == 1000
    assert compatibility.planned_steps(meta, RunConfig.from_strings({"target_flops": 2e15}), 1980) == 1980
    assert compatibility.planned_steps(meta, RunConfig(num_iterations=990), 990) == 990
    assert compatibility.planned_steps({"config": config.to_dict(), "imported": "x"}, config, 990) == 990
    assert compatibility.planned_steps({"step": 0}, config, 990) == 990


def test_what_an_extension_does_is_reported_where_nothing_is_done_yet() -> None:
    assert describe_extension(0, 5000, 6000) == (
        "The run is extended from 5,000 to 6,000 steps. "
        "The learning rates fall after step 2,101 instead of step 1,751."
    )
    assert describe_extension(50, 100, 200, warmdown_ratio=0.0) == (
        "The run is extended from 100 to 200 steps. Its learning rates do not fall at the end."
    )


def test_checkpoints_of_another_run_are_refused_by_its_name(data_dir: Path, tmp_path: Path) -> None:
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=2)
    path = tmp_path / "checkpoints" / "step_000002" / "meta.json"
    meta = json.loads(path.read_text())
    assert meta["run_id"] == "here"
    path.write_text(json.dumps({**meta, "run_id": "there"}))
    with pytest.raises(
        Final, match=r"checkpoints are of the run there, and this run is here\..* --run-id there"
    ):
        train_here(data_dir, tmp_path, **SETTINGS, num_iterations=2)
    path.write_text(json.dumps({**meta, "run_id": "there", "imported": "nanochat's d2, step 2"}))
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=2)


def test_a_name_by_default_may_be_that_of_another_release(data_dir: Path, tmp_path: Path) -> None:
    """The digest in it changes with the settings that a release has; the identity itself is compared."""
    train_here(data_dir, tmp_path, **SETTINGS, num_iterations=2)
    state = storage.load(tmp_path / "checkpoints" / "step_000002")
    config = RunConfig.from_strings({**TINY, **SETTINGS, "num_iterations": 2})
    state.meta["run_id"] = "d2-01234567"
    compatibility.check_continues(state, config, state.meta["hashes"], "d2-89abcdef")
    with pytest.raises(ConfigError, match="this run is mine"):
        compatibility.check_continues(state, config, state.meta["hashes"], "mine")


@pytest.mark.parametrize("sync", ["dense", "exact"])
def test_a_host_may_have_a_micro_batch_of_its_own(start: Start, sync: str) -> None:
    """Micro-batches of 2 and 2 rows, then of 2 and 1: two and three of them a step, and the same losses."""
    settings = {**SETTINGS, "sync": sync, "shares": "2,3", "num_iterations": 10, "eval_every": 5}
    own = [{}, {"NANOFLEET_DEVICE_BATCH_SIZE": "1"}]
    both, unlike = start(2, name="both", **settings), start(2, name="unlike", env=own, **settings)
    printed = []
    for rank in [*both, *unlike]:
        code, text = rank.wait()
        assert code == 0, text
        printed.append(text)
    assert losses(unlike[0].run_dir) == pytest.approx(losses(both[0].run_dir), rel=1e-10)
    bpb = [json.loads((ranks[0].run_dir / "outcome.json").read_text())["val_bpb"] for ranks in (both, unlike)]
    assert bpb[1] == pytest.approx(bpb[0], rel=1e-10)
    assert "1/2 micro-batches" in printed[0]
    assert "1/3 micro-batches" in printed[2]
    assert "rank 1 (host-2): float64" in printed[2]
    assert ", 1 row a micro-batch" in printed[2]


def test_a_micro_batch_that_is_none_ends_all_ranks_with_a_sentence(start: Start) -> None:
    for rank in start(2, env=[{}, {"NANOFLEET_DEVICE_BATCH_SIZE": "0"}]):
        code, printed = rank.wait(60)
        assert code == 1, printed
        assert (
            "NANOFLEET_DEVICE_BATCH_SIZE is 0 in the environment: it takes a whole number from 1." in printed
        )
        assert "Traceback" not in printed
