"""Compares a run that is killed twice and resumed with the same run without interruption.

    python -m benchmarks.interrupted --data-dir .cache/demo/data --out artifacts/interrupted

Both runs have two ranks on this machine; the defaults are depth 4 and 300 steps. Two steps are drawn with the
seed --seed. After each of the two, all processes of one run receive SIGKILL, and the run is started again.
Prints the final figures of both runs and plots their losses to OUT/interrupted.png. The exit code is 1 if a
loss or a bit of the weights or of the optimizer state differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import ranks

POLL_SECONDS = 0.2


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="runs, figures and picture")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of the run (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, metavar="N", help="of the model (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the kills (%(default)s)")
    args = parser.parse_args(argv)

    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    draw = random.Random(args.seed)
    kills = sorted(draw.sample(range(args.steps // 10, args.steps * 9 // 10), 2))
    alone, killed = args.out / "alone", args.out / "killed"

    with torchrun(args, alone) as run:
        finish(run)
    resumed_at = []
    for step in kills:
        with torchrun(args, killed) as run:
            reach(run, killed, step)
        resumed_at.append(newest_checkpoint(killed))
    with torchrun(args, killed) as run:
        finish(run)

    ends = {run_dir.name: end_of(run_dir, args.steps) for run_dir in (alone, killed)}
    same = ends["alone"] == ends["killed"]
    for name, (losses, bpb, hashes) in ends.items():
        print(
            f"{name:7} {len(losses)} steps, loss {losses[0]:.6f} -> {losses[-1]:.6f}, "
            f"{bpb:.6f} bits per byte, weights {hashes[0][:12]}, optimizer {hashes[1][:12]}"
        )
    print(f"killed after steps {kills[0]} and {kills[1]}, resumed from {resumed_at[0]} and {resumed_at[1]}")
    print("the same to the last bit" if same else "NOT the same")
    draw_curves(args.out / "interrupted.png", ends["alone"][0], ends["killed"][0], kills)
    return 0 if same else 1


@contextmanager
def torchrun(args: argparse.Namespace, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run, and yield its torchrun process to the `with` block.

    If the run is still active at the end of the block, its processes receive SIGKILL, the ranks first.
    """
    settings = {
        "run-id": "interrupted",
        "tracker": "none",
        "depth": args.depth,
        "num-iterations": args.steps,
        "sequence-len": 256,
        "eval-tokens": 16384,
        "save-every": 20,
        "save-minutes": 0,
        "eval-every": 100,
        "dtype": "float32",
    }
    run = ranks.start(args.ranks, args.data_dir, run_dir, settings)
    try:
        yield run
    finally:
        if run.poll() is None:
            for beat in run_dir.glob("heartbeat-*.json"):  # torchrun's ranks are in sessions of their own
                with suppress(ProcessLookupError):
                    os.kill(json.loads(beat.read_text())["pid"], signal.SIGKILL)
            run.kill()
            run.wait()


def finish(run: subprocess.Popen[bytes]) -> None:
    if run.wait():
        raise SystemExit(f"The run failed with {run.returncode}. See alone.log or killed.log in --out.")


def reach(run: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    """Wait until the run in `run_dir` has done `step` steps. Raises SystemExit if it ends before."""
    beat = run_dir / "heartbeat-0.json"
    while not beat.exists() or json.loads(beat.read_text())["step"] < step:
        if run.poll() is not None:
            raise SystemExit(f"the run ended before step {step}: see {run_dir}.log")
        time.sleep(POLL_SECONDS)


def newest_checkpoint(run_dir: Path) -> str:
    return max((path.name for path in (run_dir / "checkpoints").glob("step_*")), default="the start")


def end_of(run_dir: Path, steps: int) -> tuple[list[float], float, list[str]]:
    """Returns (losses of all steps, bits per byte at the end, [hash of weights, hash of optimizer state])."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    meta = json.loads((run_dir / f"checkpoints/step_{steps:06d}/meta.json").read_text())
    hashes = [meta["sha256"][name] for name in ("model.safetensors", "optim.pt")]
    return [line["loss"] for line in lines if "loss" in line], meta["val_bpb"], hashes


def draw_curves(path: Path, alone: list[float], killed: list[float], kills: list[int]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(alone) + 1), alone, linewidth=4, color="0.8", label="uninterrupted")
    axes.plot(
        range(1, len(killed) + 1), killed, linewidth=1, color="tab:blue", label="killed twice and resumed"
    )
    for step in kills:
        axes.axvline(step, color="tab:red", linestyle=":", label="SIGKILL" if step == kills[0] else None)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    sys.exit(main())
