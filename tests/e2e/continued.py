"""The losses of a disturbed run, against those of one rank that continues from each of its checkpoints.

Training amplifies rounding: two undisturbed runs from step 0 with other micro-batches differ by a thousandth
after 1,400 steps of this model, and later a thousandfold more from one step to the next. So a piece in which
the disturbed run differs from one rank by more than 1e-10 is continued again, with other micro-batches. Where
one of these differs by more, now or a few steps later, the disturbed run may differ by WIDER times as much.
Two of them may agree by chance: from one checkpoint, micro-batches of 8 and 2 rows differed by 2e-9 after 22
steps, and each of 1, 4, 16 and 64 rows by 8e-5, as the disturbed run did. A wrong row or a lost update is
seen in the third digit.

Two processes continue one piece after the other, because a process takes longer to start than to train one.
They are replaced after some pieces: a pool that does so by itself (max_tasks_per_child) can wait for ever
(Python 3.11).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .test_elastic import MODEL, STEPS

MOST_STEPS = 60  # between two checkpoints
PIECES_AT_ONCE = 50
TOLERANCE, WIDER, LATER = 1e-10, 1000.0, 3
ROWS, OTHER_ROWS = 8, (2, 4, 16)  # of a micro-batch

Losses = Mapping[int, Mapping[int, float]]  # by host and step


def check_losses(
    folder: Path, dataset: Path, losses: Losses, near: Collection[int] | None = None, **settings: object
) -> None:
    """Compare the losses of a run, which has the settings `settings`.

    folder: has `checkpoints`, and gets `losses` as losses.json. losses: the losses of the run. near: compare
    only pieces with one of these steps; None: all steps.
    """
    (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    saved = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    pieces = list(itertools.pairwise([0, *saved]))
    assert saved[-1] == max(map(max, losses.values())), "the last step is saved"
    assert max(end - start for start, end in pieces) < MOST_STEPS, saved
    if near is not None:
        pieces = [(start, end) for start, end in pieces if any(start < step <= end for step in near)]
    check = partial(_check_piece, losses, partial(_continue, folder, dataset, settings))
    spawn, others = multiprocessing.get_context("spawn"), 0
    for first in range(0, len(pieces), PIECES_AT_ONCE):
        with ProcessPoolExecutor(2, spawn, _one_thread) as pool:
            others += sum(pool.map(check, pieces[first : first + PIECES_AT_ONCE]))
    compared = sum(end - start for start, end in pieces)
    text = f"{compared - others} of {compared} steps equal at {TOLERANCE:g}, the others at more"
    print(f"{text}; the run has {saved[-1]} steps", flush=True)


def _check_piece(
    losses: Losses, continued: Callable[[int, int, int], list[float]], piece: tuple[int, int]
) -> int:
    """Compare the steps of one piece; returns how many of them differ by more than TOLERANCE.

    continued: (start, end, rows) -> the losses of one rank.
    """
    start, end = piece
    expected = continued(start, end, ROWS)
    differences = [
        [abs(found.get(step, loss) / loss - 1) for found in losses.values()]
        for step, loss in enumerate(expected, start + 1)
    ]
    equal = [all(each <= TOLERANCE for each in step) for step in differences]
    drift, wrong = [0.0 for _ in expected], "" if all(equal) else "not compared yet"
    for rows in OTHER_ROWS:
        if not wrong:
            break
        others = continued(start, end, rows)
        drift = [
            max(old, abs(other / loss - 1)) for old, other, loss in zip(drift, others, expected, strict=True)
        ]
        wrong = _first_wrong(differences, drift, start)
    assert not wrong, wrong
    return equal.count(False)


def _first_wrong(differences: list[list[float]], drift: list[float], start: int) -> str:
    """The first step whose difference is more than `drift` allows, as text; "" if there is none."""
    for number, step in enumerate(differences):
        allowed = max(TOLERANCE, WIDER * max(drift[: number + LATER + 1]))
        if not all(each <= allowed for each in step):
            return f"step {start + 1 + number}, from the checkpoint of step {start}: {step} of {allowed:.1e}"
    return ""


def _one_thread() -> None:
    """Prepare a process that continues pieces: it computes with one thread, and prints nothing."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _continue(
    folder: Path, dataset: Path, settings: Mapping[str, Any], start: int, end: int, rows: int
) -> list[float]:
    """The losses of the steps `start` + 1 to `end` of one rank, from the checkpoint of step `start`."""
    from trainer.config import RunConfig, RunFile  # here: torch reads OMP_NUM_THREADS when it is imported
    from trainer.health.attempt import Attempt
    from trainer.host.logger import RunLogger
    from trainer.host.rank_env import RankEnv
    from trainer.train import Trainer

    class PieceEndedError(Exception):
        """Raised after the step `end`."""

    class Piece(Trainer):
        def train_step(self, step: int) -> None:
            if step == end:
                raise PieceEndedError
            super().train_step(step)

    run_dir, name = folder / f"from-{start}-{rows}", f"step_{start:06}"
    (run_dir / "checkpoints").mkdir(parents=True)
    if start:
        shutil.copytree(folder / "checkpoints" / name, run_dir / "checkpoints" / name)
    values = {**MODEL, "num_iterations": STEPS, **settings, "device_batch_size": rows}
    run_id = values.pop("run_id")
    attempt = Attempt(run_dir, RankEnv())
    attempt.begin()
    run_file = RunFile(run_id, RunConfig.from_strings(values))
    try:
        Piece(run_file, dataset, run_dir, RankEnv(), attempt, RunLogger(RankEnv())).run()
    except PieceEndedError:
        attempt.end("final", "The piece ends here.")
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    shutil.rmtree(run_dir)
    return losses
