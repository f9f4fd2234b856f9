"""CORE during a run: it is logged, changes no bit of the run, and the ranks must have one bundle."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from conftest import Start, losses, train_here
from core_bundles import FIXTURE

from trainer.config import ConfigError
from trainer.data import DataError
from trainer.eval import core
from trainer.eval.core_bundle import read_bundle
from trainer.tracking import tracker
from trainer.train import Trainer

SETTINGS = {"num_iterations": 4, "save_minutes": 0, "core_metric_max_per_task": 5}
QUIET = {"eval_every": 0, "sample_every": 0, "digest_every": 0}


@pytest.fixture(scope="session")
def core_data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset with a bundle."""
    folder = tmp_path_factory.mktemp("core") / "data"
    shutil.copytree(data_dir, folder)
    shutil.copytree(FIXTURE, folder / "core")
    return folder


def core_metrics(run_dir: Path) -> dict[int, float]:
    """The CORE metric by step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["core_metric"] for line in lines if "core_metric" in line}


def weights(run_dir: Path) -> str:
    meta = json.loads((run_dir / "checkpoints" / "step_000004" / "meta.json").read_text())
    return f"{meta['sha256']['model.safetensors']} {meta['sha256']['optim.pt']}"


@pytest.mark.parametrize("sync", ["exact", "local"])
def test_a_run_ends_the_same_with_and_without_core(sync: str, core_data: Path, tmp_path: Path) -> None:
    train_here(core_data, tmp_path / "without", sync=sync, **SETTINGS, **QUIET)
    train_here(core_data, tmp_path / "with", sync=sync, **SETTINGS, **QUIET, core_metric_every=3)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    found = core_metrics(tmp_path / "with")
    assert list(found) == [3, 4]
    tables = sorted(path.name for path in (tmp_path / "with" / "core").iterdir())
    assert tables == ["step_000003.csv", "step_000004.csv"]
    lines = (tmp_path / "with" / "core" / "step_000004.csv").read_text().splitlines()
    assert lines[0].split() == ["Task", ",", "Accuracy", ",", "Centered"]
    assert float(lines[-1].split(",")[2]) == pytest.approx(found[4], abs=1e-6)
    assert not core_metrics(tmp_path / "without")


@pytest.mark.processes
def test_ranks_end_the_same_with_and_without_core(core_data: Path, start: Start) -> None:
    runs = [
        start(2, name=name, data_dirs=[core_data] * 2, **SETTINGS, **QUIET, core_metric_every=every)
        for name, every in (("without", 0), ("with", 2))
    ]
    for rank in (rank for ranks in runs for rank in ranks):
        code, text = rank.wait()
        assert code == 0, text
    assert losses(runs[1][0].run_dir) == losses(runs[0][0].run_dir)
    assert weights(runs[1][0].run_dir) == weights(runs[0][0].run_dir)
    assert list(core_metrics(runs[1][0].run_dir)) == [2, 4]


@pytest.mark.processes
def test_ranks_with_other_bundles_do_not_train(core_data: Path, start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(core_data, other)
    with open(other / "core" / "eval_data" / "made" / "days.jsonl", "a") as file:
        file.write('{"context": "a", "continuation": "b"}\n')
    for rank in start(2, data_dirs=[core_data, other], **SETTINGS, core_metric_every=2):
        code, text = rank.wait()
        assert code == 1
        assert "CORE bundle is" in text
        assert "rank 1 (host-2) has" in text


def test_a_run_without_a_bundle_ends_before_its_first_step(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"core_metric_every is 2, and there is no CORE bundle .*/core on"):
        train_here(data_dir, tmp_path / "run", **SETTINGS, core_metric_every=2)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_limit_below_the_examples_ends_the_run_at_once(core_data: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "core_metric_max_per_task": 3}
    with pytest.raises(DataError, match=r"tools is limited to 3 of 10 items, .* shows 3 examples"):
        train_here(core_data, tmp_path / "run", **settings, core_metric_every=2)


def test_a_full_disk_costs_the_table_and_not_the_run(
    core_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracker, "write_whole", full)
    train_here(core_data, tmp_path / "run", **SETTINGS, **QUIET, core_metric_every=2)
    assert len(losses(tmp_path / "run")) == 4
    assert "is full: the table of CORE was not written." in capfd.readouterr().out


def test_a_stop_ends_the_evaluation_and_the_run_is_saved(
    core_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = core._is_correct

    def asks_to_stop(*arguments: object) -> bool:
        (tmp_path / "run" / "stop").touch()
        return sound(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "_is_correct", asks_to_stop)
    with pytest.raises(Exception, match="Stopped on request after 3 of 4 steps"):
        train_here(core_data, tmp_path / "run", **SETTINGS, **QUIET, core_metric_every=2)
    assert not core_metrics(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_000003").is_dir()


def test_the_watchdog_knows_the_length_of_each_block(
    core_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    watchdogs: list[object] = []
    sound, begin = core._is_correct, Trainer._set_up

    def set_up(self: Trainer) -> None:
        begin(self)
        watchdogs.append(self.watchdog)

    def looks(*arguments: object) -> bool:
        seen.append(watchdogs[0].evaluation_steps)  # type: ignore[attr-defined]
        return sound(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_set_up", set_up)
    monkeypatch.setattr(core, "_is_correct", looks)
    train_here(core_data, tmp_path / "run", **SETTINGS, **QUIET, core_metric_every=4)
    assert len(seen) == 5 * len(read_bundle(FIXTURE).tasks)
    assert max(seen) > 2 * 320 / 160  # more than the 320 tokens of an evaluation of bits per byte
    assert watchdogs[0].evaluation_steps == 2  # type: ignore[attr-defined]
