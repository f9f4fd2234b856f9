"""The losses of a disturbed run, against those of one rank that continues from each of its checkpoints.

Training amplifies rounding: two undisturbed runs from step 0 with other micro-batches differ by a thousandth
after 1,400 steps of this model, and later a thousandfold more from one step to the next. So each piece is
continued twice, with other micro-batches. A disturbed run may differ from an undisturbed one by 1e-10, or
where these two differ by more, now or a few steps later, by WIDER times as much. A wrong row or a lost
update is seen in the third digit.
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
TOLERANCE, WIDER, LATER = 1e-10, 1000.0, 3


def check_losses(
    folder: Path, dataset: Path, losses: Mapping[int, Mapping[int, float]], **settings: object
) -> None:
    """Compare all steps. folder: has `checkpoints`. losses: by host and step. settings: of the run."""
    saved = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    pieces = list(itertools.pairwise([0, *saved]))
    assert saved[-1] == max(map(max, losses.values())), "the last step is saved"
    assert max(end - start for start, end in pieces) < MOST_STEPS, saved
    exact = 0
    with ThreadPoolExecutor(2) as pool:
        continued = pool.map(lambda piece: _continue(folder, dataset, *piece, **settings), pieces)
        for (start, _), (expected, others) in zip(pieces, continued, strict=True):
            drift = [abs(other / loss - 1) for loss, other in zip(expected, others, strict=True)]
            for number, loss in enumerate(expected):
                allowed = max(TOLERANCE, WIDER * max(drift[: number + LATER + 1]))
                exact += allowed == TOLERANCE
                for host, found in losses.items():
                    step = start + 1 + number
                    where = f"step {step} on host {host}, from the checkpoint of step {start}"
                    assert found.get(step, loss) == pytest.approx(loss, rel=allowed), where
    print(f"{exact} of {saved[-1]} steps compared at {TOLERANCE:g}, the others at more", flush=True)


def _continue(
    folder: Path, dataset: Path, start: int, end: int, **settings: object
) -> tuple[list[float], list[float]]:
    """The losses of the steps `start` + 1 to `end` of one rank, from the checkpoint of step `start`.

    Twice, with other micro-batches.
    """
    found, name = [], f"step_{start:06}"
    for rows in (8, 2):
        run_dir = folder / f"from-{start}-{rows}"
        (run_dir / "checkpoints").mkdir(parents=True)
        if start:
            shutil.copytree(folder / "checkpoints" / name, run_dir / "checkpoints" / name)
        losses = undisturbed(dataset, run_dir, end - start, **{**settings, "device_batch_size": rows})
        found.append(losses[: end - start])
    return found[0], found[1]
