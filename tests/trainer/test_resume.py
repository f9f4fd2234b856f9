"""A run that was interrupted continues as if nothing had been: SIGKILL between any two lines, other ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, Start, losses

from trainer.code_digest import code_digest

SETTINGS = {
    **TINY,
    "num_iterations": 6,
    "save_every": 2,
    "eval_every": 3,
    "sample_every": 2,
    "digest_every": 0,
}
SAVING = ["checkpoint/writer.py", "checkpoint/storage.py", "data/files.py"]
MODULES = [
    *SAVING,
    "checkpoint/exchange.py",
    "train.py",
    "setup.py",
    "tracking/reporter.py",
    "tracking/tracker.py",
    "optim/muon_adamw.py",
    "sync/dense.py",
    "eval/bits_per_byte.py",
]
FILES = ("model.safetensors", "optim.pt")
AT_ONCE = 10  # points that one process forks its attempts for


def attempts(data_dir: Path, wanted: list[tuple[Path, int | None]]) -> list[tuple[int, list[str]]]:
    """Trainings in these directories, each killed at that line (None: not; 0: not, but lines are counted).

    Returns their exit codes and the lines they reached.
    """
    here = Path(__file__).parent
    requests = [(str(path), SETTINGS, at or 0, [] if at is None else MODULES) for path, at in wanted]
    done = subprocess.run(
        [sys.executable, str(here / "killed.py")],
        input=json.dumps([str(data_dir), requests]),
        env={**os.environ, "PYTHONPATH": str(here.parents[1])},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, lines) for code, lines in json.loads(done.stdout)]


@pytest.fixture
def alone(data_dir: Path, tmp_path: Path) -> list[str]:
    """The lines that the run left alone has gone through, as file:number."""
    ((code, lines),) = attempts(data_dir, [(tmp_path / "alone", 0)])
    assert code == 0, (tmp_path / "alone.log").read_text()
    return lines


def end_of(run_dir: Path) -> tuple[list[str], list[float], list[str]]:
    """Hashes of the last weights and optimizer state, losses of all steps, what is in checkpoints/."""
    meta = json.loads((run_dir / "checkpoints/step_000006/meta.json").read_text())
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    return [meta["sha256"][name] for name in FILES], losses(run_dir), left


def kill_and_resume(data_dir: Path, folder: Path, points: list[int]) -> None:
    """Kill a run at each point, continue to the end: it must be the end of the run left alone."""
    expected = end_of(folder / "alone")
    assert len(expected[1]) == 6
    for start in range(0, len(points), AT_ONCE):
        some = [(folder / f"at-{point}", point) for point in points[start : start + AT_ONCE]]
        results = iter(attempts(data_dir, [(path, at) for path, point in some for at in (point, None)]))
        for run_dir, _ in some:
            (killed, _), (resumed, _) = next(results), next(results)
            log = (folder / f"{run_dir.name}.log").read_text()
            assert killed == -9, f"{run_dir.name} ended with {killed} by itself\n{log}"
            assert resumed == 0, log
            assert end_of(run_dir) == expected, log


def test_killed_between_any_two_lines(data_dir: Path, tmp_path: Path, alone: list[str]) -> None:
    """Lines drawn again for each state of the code: two of all, two of the saving beside the loop."""
    names = {Path(module).name for module in SAVING}
    # Threads race, so the last lines of a run may not be reached again.
    numbers = range(1, len(alone) * 9 // 10)
    saving = [number for number in numbers if alone[number - 1].split(":")[0] in names]
    draw = random.Random(code_digest())
    kill_and_resume(data_dir, tmp_path, [*draw.sample(numbers, 2), *draw.sample(saving, 2)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_every_line_that_saves(data_dir: Path, tmp_path: Path, alone: list[str]) -> None:
    """Each line of writer.py and storage.py once, where the run goes through it for the second time."""
    wanted: dict[str, int] = {}
    seen: dict[str, int] = {}
    for number, line in enumerate(alone[: len(alone) * 9 // 10], start=1):
        seen[line] = seen.get(line, 0) + 1
        if seen[line] == 2 and line.split(":")[0] in ("writer.py", "storage.py"):
            wanted[line] = number
    assert len(wanted) > 40
    kill_and_resume(data_dir, tmp_path, sorted(wanted.values()))


def test_resumed_on_another_number_of_ranks(start: Start) -> None:
    """Killed with two ranks half-way, gone on with three and other shares: the curve of one rank alone."""
    settings = {"num_iterations": 80, "save_every": 3, "save_minutes": 0, "dtype": "float64"}
    (alone,) = start(1, name="alone", **settings)
    first = start(2, name="moved", **settings)
    first[0].reach_step(20)
    for rank in first:
        rank.process.kill()
    for rank in first:
        rank.wait()
    assert not (first[0].run_dir / "outcome.json").exists(), "the run was over before it could be killed"
    second = start(3, name="moved", shares="1,3,1", **settings)
    printed = []
    for rank in [alone, *second]:
        code, text = rank.wait()
        assert code == 0, text
        printed.append(text)
    assert "Resuming from the checkpoint of step" in printed[1]
    assert losses(second[0].run_dir) == pytest.approx(losses(alone.run_dir), rel=1e-9)
    meta = json.loads((second[0].run_dir / "checkpoints/step_000080/meta.json").read_text())
    assert (meta["shares"], meta["rows"]) == ([1, 3, 1], 400)
    assert meta["hosts"] == ["host-1", "host-2", "host-3"]
