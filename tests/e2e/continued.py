"""The losses of a disturbed run, against those of one rank that continues from each of its checkpoints.

Training amplifies rounding: two undisturbed runs from step 0 with other micro-batches differ by a thousandth
after 1,400 steps of this model, and in between tenfold more in as few as 10 steps. So each piece is short.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .test_elastic import undisturbed

MOST_STEPS = 60  # between two checkpoints
TOLERANCE = 1e-10


def check_losses(
    folder: Path, dataset: Path, losses: Mapping[int, Mapping[int, float]], **settings: object
) -> None:
    """Compare all steps. folder: has `checkpoints`. losses: by host and step. settings: of the run."""
    saved = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    pieces = list(itertools.pairwise([0, *saved]))
    assert saved[-1] == max(map(max, losses.values())), "the last step is saved"
    assert max(end - start for start, end in pieces) < MOST_STEPS, saved
    with ThreadPoolExecutor(2) as pool:
        continued = pool.map(lambda piece: _continue(folder, dataset, *piece, **settings), pieces)
        for (start, _), expected in zip(pieces, continued, strict=True):
            for step, loss in enumerate(expected, start + 1):
                for host, found in losses.items():
                    where = f"step {step} on host {host}, from the checkpoint of step {start}"
                    assert found.get(step, loss) == pytest.approx(loss, rel=TOLERANCE), where


def _continue(folder: Path, dataset: Path, start: int, end: int, **settings: object) -> list[float]:
    """The losses of the steps `start` + 1 to `end` of one rank, from the checkpoint of step `start`."""
    run_dir, name = folder / f"from-{start}", f"step_{start:06}"
    (run_dir / "checkpoints").mkdir(parents=True)
    if start:
        shutil.copytree(folder / "checkpoints" / name, run_dir / "checkpoints" / name)
    return undisturbed(dataset, run_dir, end - start, **settings)[: end - start]
