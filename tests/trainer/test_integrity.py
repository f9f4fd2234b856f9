"""A bit that changes on one host, in its packed rows or its memory: what is noticed, when, whose it is."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Start, losses

from trainer.config import RunConfig
from trainer.data.dataset import Dataset
from trainer.data.loader import batch_rows, read_batch

NONE = "none 0 0"
ROWS, SEQUENCE_LEN = 5, 32  # of a step and in a row: see TINY


def rows_of(data_dir: Path) -> Path:
    (folder,) = (path for path in (data_dir / "rows").iterdir() if path.is_dir())
    return folder / "train.bin"


def flip_a_bit(data_dir: Path, step: int) -> int:
    """One that changes how many active rows the batch of `step`, counted from 1, has; the row's number."""
    data = Dataset.open(data_dir, SEQUENCE_LEN)
    numbers = batch_rows(RunConfig().seed, step - 1, ROWS, len(data.train))
    tokens = data.train[numbers]
    active = set(tokens[:, :-1].flatten().tolist())
    row, column = next(
        (row, column)
        for row in range(ROWS)
        for column in range(1, SEQUENCE_LEN)
        if tokens[row, column] ^ 1 not in active and (tokens[:, :-1] == tokens[row, column]).sum() > 1
    )
    offset = (int(numbers[row]) * (SEQUENCE_LEN + 1) + column) * tokens.itemsize
    with open(rows_of(data_dir), "r+b") as file:
        file.seek(offset)
        file.write((tokens[row, column] ^ 1).tobytes())
    return int(numbers[row])


@pytest.mark.parametrize(
    "sync",
    [pytest.param("dense", marks=pytest.mark.slow), "exact", pytest.param("local", marks=pytest.mark.slow)],
)
def test_a_bit_that_changes_in_the_rows_of_one_host_while_it_trains(
    start: Start, data_dir: Path, tmp_path: Path, sync: str
) -> None:
    """Host, file and row are named before the row is trained on; the next attempt packs the rows again."""
    theirs = tmp_path / "theirs"
    shutil.copytree(data_dir, theirs)
    sound = rows_of(theirs).read_bytes()
    settings = {"sync": sync, "num_iterations": 200, "save_every": 20, "data_dirs": [data_dir, theirs]}
    ranks = start(2, **settings)
    ranks[0].reach_step(25)
    row = flip_a_bit(theirs, 175)
    began = time.monotonic()
    for number, rank in enumerate(ranks):
        code, printed = rank.wait(60)
        assert code == 75, printed
        outcome = rank.outcome()
        assert outcome["outcome"] == "retryable"
        assert f"Row {row} of {rows_of(theirs)} has changed" in outcome["reason"]
        assert ("rank 1 (host-2): Row" in outcome["reason"]) == (number == 0)
        assert 25 <= outcome["step"] < 175
    assert time.monotonic() - began < 45

    ranks = start(2, **settings)
    whole = start(2, name="whole", **settings | {"data_dirs": []}) if sync != "local" else []
    for rank in [*ranks, *whole]:
        code, printed = rank.wait()
        assert code == 0, printed
    assert rows_of(theirs).read_bytes() == sound
    if whole:
        assert losses(ranks[0].run_dir) == losses(whole[0].run_dir)


@pytest.mark.parametrize("sync", ["dense", "exact"])
def test_a_bit_that_changed_in_the_rows_of_one_host_before_the_start(
    start: Start, data_dir: Path, tmp_path: Path, sync: str
) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(data_dir, theirs)
    flip_a_bit(theirs, 4)
    ranks = start(2, sync=sync, data_dirs=[data_dir, theirs])
    whole = start(2, name="whole", sync=sync)
    printed = [rank.wait() for rank in [*ranks, *whole]]
    assert [code for code, _ in printed] == [0] * 4, printed
    assert f"warning: {rows_of(theirs)} has changed since it was packed" in printed[1][1]
    assert losses(ranks[0].run_dir) == losses(whole[0].run_dir)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_that_one_rank_has_read_differently(start: Start, world_size: int, step: int) -> None:
    """In its memory, behind the rows' checksums: with three ranks it is known whose, with two it is open."""
    faults = [NONE, f"misread {step} 0", NONE][:world_size]
    ranks = start(world_size, num_iterations=100_000, sync="exact", faults=faults)
    for rank in ranks:
        code, printed = rank.wait(60)
        assert code == 75, printed
        outcome = rank.outcome()
        assert outcome["step"] < step
        if world_size == 3:
            found = f"Rank 1 (host-2) read another batch for step {step} than the other ranks"
            assert outcome["reason"].startswith(found)
        else:
            assert (
                f"different batches for step {step}, and no majority shows which is right"
                in outcome["reason"]
            )
            assert "right: rank 0 (host-1) and rank 1 (host-2). " in outcome["reason"]


@pytest.mark.parametrize("sync", ["dense", "exact", "fast"])
def test_of_two_ranks_that_differ_the_one_that_changed_is_found_when_the_step_is_computed_again(
    start: Start, sync: str
) -> None:
    """The difference is found before it gets into a checkpoint, though digests were not due."""
    settings = {"sync": sync, "num_iterations": 12, "save_every": 4, "save_minutes": 0, "digest_every": 50}
    ranks = start(2, faults=[NONE, "flip 8 0"], **settings)
    whole = start(2, name="whole", **settings)
    for rank in ranks:
        code, printed = rank.wait()
        assert code == 1, printed
        reason = rank.outcome()["reason"]
        assert "After step 8 the parameters are not the same on all ranks." in reason
        assert "rank 0 (host-1) and rank 1 (host-2) differ." in reason
        assert "without it" not in reason
    kept = [path.name for path in (ranks[0].run_dir / "checkpoints").iterdir()]
    assert kept == ["step_000004"]

    printed = [rank.wait() for rank in [*start(2, **settings), *whole]]
    assert [code for code, _ in printed] == [0] * 4, printed
    assert "Step 8, after which the parameters once differed, is computed again: " in printed[0][1]
    assert "rank 1 (host-2) had other values then, in " in printed[0][1]
    assert "rank 0 (host-1) had other values" not in printed[0][1]
    assert losses(ranks[0].run_dir) == losses(whole[0].run_dir)
    assert not list(ranks[0].run_dir.glob("digests-*.json"))


def test_a_checksum_of_a_batch_goes_through_a_float_and_sees_every_part() -> None:
    rows = np.random.default_rng(1).integers(0, 2**16, (40, 9)).astype(np.uint16)
    batch = read_batch(rows, 7, 3, 8)
    assert batch.tokens.tolist() == rows[batch_rows(7, 3, 8, 40)].tolist()
    assert batch.active.tolist() == sorted(set(batch.tokens[:, :-1].flatten().tolist()))
    assert batch.checksum >> 32 == len(batch.active)
    assert int(torch.tensor([float(batch.checksum), 0.0], dtype=torch.float64).sum()) == batch.checksum
    assert len({read_batch(rows, 7, step, 8).checksum for step in range(20)}) == 20
    rows[batch_rows(7, 3, 8, 40)[2], -1] ^= 1  # a target alone
    assert read_batch(rows, 7, 3, 8).checksum != batch.checksum
