"""The losses of a disturbed run, against those of one rank that continues from each of its checkpoints.

In a few hundred steps of this model the last digit of a sum grows to a thousandth of the loss, in
a run without any event too: two runs from step 0 with other micro-batches differ as much. From one checkpoint
to the next, about a hundred steps later, it is still below the tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .test_elastic import undisturbed

MOST_STEPS = 300  # between two checkpoints: rounding grows tenfold in as few as 35 steps


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
                    assert found.get(step, loss) == pytest.approx(loss, rel=1e-10), where


def _continue(folder: Path, dataset: Path, start: int, end: int, **settings: object) -> list[float]:
    """The losses of the steps `start` + 1 to `end` of one rank, from the checkpoint of step `start`."""
    run_dir, name = folder / f"from-{start}", f"step_{start:06}"
    (run_dir / "checkpoints").mkdir(parents=True)
    if start:
        (folder / "checkpoints" / name).rename(run_dir / "checkpoints" / name)
    return undisturbed(dataset, run_dir, end - start, **settings)[: end - start]
