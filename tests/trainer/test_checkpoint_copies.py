"""Checkpoints have copies on other hosts, and a run resumes from the newest one that any host has."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Rank, Start, losses

pytestmark = pytest.mark.processes

SETTINGS: dict[str, Any] = {
    "num_iterations": 12,
    "save_every": 3,
    "save_minutes": 0,
    "eval_every": 0,
    "digest_every": 0,
    "keep_checkpoints": 2,
    "checkpoint_copies": 2,
}


def finish(ranks: list[Rank]) -> list[str]:
    """Wait until the ranks have ended; returns their logs."""
    logs = []
    for rank in ranks:
        code, text = rank.wait()
        assert code == 0, text
        logs.append(text)
    return logs


def content(run_dir: Path) -> dict[str, bytes]:
    """The files below checkpoints/ of a run directory, hidden ones too."""
    folder = run_dir / "checkpoints"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def names(run_dir: Path) -> list[str]:
    folder = run_dir / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def without(run_dir: Path, step: int) -> None:
    shutil.rmtree(run_dir / "checkpoints" / f"step_{step:06d}")


def test_the_next_host_has_the_same_checkpoints(start: Start) -> None:
    ranks = start(3, **SETTINGS)
    logs = finish(ranks)
    first, second, third = (rank.run_dir for rank in ranks)
    assert "step_000012" in names(first)
    assert content(second)["step_000012/meta.json"] == content(first)["step_000012/meta.json"]
    for name, data in content(second).items():
        assert content(first)[name] == data, name
    assert names(second) == names(first), "they are pruned together"
    assert names(third) == []
    assert "Copied step_000012 to host-2: " in logs[0]


@pytest.mark.parametrize("lost", ["all", pytest.param("newest", marks=pytest.mark.slow), "damaged"])
def test_a_lost_disk_of_the_coordinator_costs_no_step(start: Start, lost: str) -> None:
    (calm, _) = calm_ranks = start(2, name="calm", **SETTINGS)
    finish(calm_ranks)
    first = start(2, **{**SETTINGS, "num_iterations": 12})
    finish(first)
    run = first[0].run_dir
    if lost == "all":
        shutil.rmtree(run / "checkpoints")
        (first[1].run_dir / "checkpoints" / "step_000012" / ".DS_Store").touch()  # is not sent
    elif lost == "newest":
        without(run, 12)
    else:
        path = run / "checkpoints" / "step_000012" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    logs = finish(start(2, **{**SETTINGS, "num_iterations": 18}))
    assert "host-2 has the newest checkpoint, of step 12" in logs[0]
    assert "Received step_000012 from host-2" in logs[0]
    assert "Resuming from the checkpoint of step 12." in logs[0]
    assert ("damaged_step_000012" in names(run)) == (lost == "damaged")
    finish(start(2, name="calm", **{**SETTINGS, "num_iterations": 18}))
    assert losses(run) == losses(calm.run_dir)
    assert content(first[1].run_dir)["step_000018/meta.json"] == content(run)["step_000018/meta.json"]


def test_a_damaged_copy_is_not_taken(start: Start) -> None:
    ranks = start(2, **SETTINGS)
    finish(ranks)
    run, other = (rank.run_dir for rank in ranks)
    without(run, 12)
    (older,) = names(run)
    path = other / "checkpoints" / "step_000012" / "optim.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    logs = finish(start(2, **{**SETTINGS, "num_iterations": 18}))
    assert f"Resuming from the checkpoint of step {int(older[5:])}." in logs[0]
    assert "is damaged" in logs[1]


def test_a_host_that_cannot_write_costs_a_warning(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "checkpoints").write_text("not a folder")
    logs = finish(start(2, **SETTINGS))
    assert "warning: step_000012 has no copy on host-2: " in logs[0]


def test_one_copy_is_none_elsewhere(start: Start) -> None:
    ranks = start(2, **{**SETTINGS, "checkpoint_copies": 1})
    finish(ranks)
    assert names(ranks[1].run_dir) == []


def test_a_replaced_host_gets_the_newest_checkpoint_again(start: Start) -> None:
    ranks = start(2, **SETTINGS)
    finish(ranks)
    shutil.rmtree(ranks[1].run_dir)
    logs = finish(start(2, **{**SETTINGS, "num_iterations": 30, "save_every": 0}))
    assert "Copied step_000012 to host-2" in logs[0]


def test_ranks_killed_while_copying_leave_no_half_copy(start: Start) -> None:
    ranks = start(2, **{**SETTINGS, "num_iterations": 60, "save_every": 1})
    ranks[0].reach_step(8)
    for rank in ranks:
        rank.process.kill()
        rank.wait()
    run, other = (rank.run_dir for rank in ranks)
    for run_dir in (run, other):
        for path in (run_dir / "checkpoints").glob("step_*"):
            assert json.loads((path / "meta.json").read_text())["step"] == int(path.name[5:])
    shutil.rmtree(run / "checkpoints")
    newest = max(int(name[5:]) for name in names(other) if name.startswith("step_"))
    began = time.monotonic()
    logs = finish(start(2, **{**SETTINGS, "num_iterations": 60, "save_every": 0}))
    assert f"Resuming from the checkpoint of step {newest}." in logs[0]
    assert not [name for name in names(other) if name.startswith(".")]
    assert time.monotonic() - began < 120


def test_a_stop_does_not_wait_for_a_copy(start: Start) -> None:
    """What had arrived of it is removed, and the next attempt makes the copy."""
    ranks = start(2, faults=["copy 0 40", "copy 0 40"], **{**SETTINGS, "num_iterations": 2000})
    ranks[0].reach_step(5)
    began = time.monotonic()
    (ranks[0].run_dir / "stop").touch()
    for rank in ranks:
        code, text = rank.wait()
        assert rank.outcome()["outcome"] == "stopped", (code, text)
    assert time.monotonic() - began < 20
    step = ranks[0].outcome()["step"]
    assert f"step_{step:06d}" not in names(ranks[1].run_dir)
    (ranks[0].run_dir / "stop").unlink()
    again = start(2, **{**SETTINGS, "num_iterations": 2000})
    again[0].reach_step(step + 20)
    (again[0].run_dir / "stop").touch()
    logs = [rank.wait()[1] for rank in again]
    assert f"Copied step_{step:06d} to host-2" in logs[0]
    assert not [name for name in names(again[1].run_dir) if name.startswith(".")]
