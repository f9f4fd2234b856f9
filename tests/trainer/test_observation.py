"""Looking at a run does not change it: evaluations, samples, checkpoints and digests leave all bits alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Rank, Start, losses, train_here

from trainer.checkpoint.storage import read_tensors

STEPS = 9
QUIET = {"eval_every": 0, "sample_every": 0, "save_every": 0, "save_minutes": 0, "digest_every": 0}
WATCHED = {"eval_every": 1, "sample_every": 2, "save_every": 3, "save_minutes": 0, "digest_every": 1}
BY_TIME = {**QUIET, "eval_every": 4, "save_minutes": 0.0001}
SETTINGS = {"num_iterations": STEPS, "local_steps": 4, "local_delay": 2}


def end_of(run_dir: Path) -> tuple[Any, ...]:
    """Hashes of the last weights, optimizer state and what ranks have of their own; losses of all steps."""
    meta = json.loads((run_dir / f"checkpoints/step_{STEPS:06d}/meta.json").read_text())
    own = meta.get("own_sha256")
    return (
        meta["sha256"]["model.safetensors"],
        meta["sha256"]["optim.pt"],
        own,
        meta["val_bpb"],
        losses(run_dir),
    )


@pytest.mark.processes
@pytest.mark.parametrize("sync", ["dense", "exact", "local"])
def test_one_rank_ends_the_same_however_it_is_watched(sync: str, data_dir: Path, tmp_path: Path) -> None:
    ends = []
    for number, watching in enumerate((QUIET, WATCHED, BY_TIME)):
        train_here(data_dir, tmp_path / str(number), sync=sync, **SETTINGS, **watching)
        ends.append(end_of(tmp_path / str(number)))
    assert ends[1] == ends[0]
    assert ends[2] == ends[0]
    assert len(ends[0][-1]) == STEPS


@pytest.mark.parametrize(
    ("sync", "world_size"), [("dense", 2), ("exact", 2), ("fast", 2), ("local", 2), ("local", 3)]
)
def test_ranks_end_the_same_however_they_are_watched(sync: str, world_size: int, start: Start) -> None:
    runs = [
        start(world_size, name=name, sync=sync, **SETTINGS, **watching)
        for name, watching in (("quiet", QUIET), ("watched", WATCHED))
    ]
    for rank in (rank for ranks in runs for rank in ranks):
        code, text = rank.wait()
        assert code == 0, text
    assert end_of(runs[1][0].run_dir) == end_of(runs[0][0].run_dir)


def test_resumed_from_a_checkpoint_in_a_sync_round(start: Start) -> None:
    """The end is that of a run which was neither interrupted nor saved on the way."""

    def train(name: str, save_every: int) -> list[Rank]:
        settings = {
            **SETTINGS,
            **QUIET,
            "save_every": save_every,
            "keep_checkpoints": 9,
            "checkpoint_copies": 1,
        }
        ranks = start(2, name=name, sync="local", **settings)
        for rank in ranks:
            code, text = rank.wait()
            assert code == 0, text
        return ranks

    quiet, saved = train("quiet", 0)[0], train("saved", 1)[0]
    folder = saved.run_dir / "checkpoints"
    for step in (3, 6):
        optim = read_tensors(folder / f"step_{step:06d}/optim.pt")
        assert any("outer_round_table" in state for state in optim.values()), "nothing is in flight"
        for later in folder.glob("step_*"):
            if int(later.name[5:]) > step:
                shutil.rmtree(later)
        train("saved", 1)
        assert end_of(saved.run_dir) == end_of(quiet.run_dir)
