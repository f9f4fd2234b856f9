"""Compares the validation losses of all sync modes: the same run in each, and twice in `dense`.

    python -m benchmarks.quality --data-dir .cache/demo/data --out artifacts/quality

The defaults are depth 4 and 2,000 steps. All runs are on this machine, `--jobs` at a time, with two ranks
except for the baseline. The two dense runs have different batch splits, so they differ only in the order of
additions; the mean absolute difference of their losses is the noise floor. A mode meets its target if its
losses differ from those of `dense` by at most twice the noise floor; `local`, if its mean loss is at most
0.03 nat above that of `dense`. Each run has an ordinary run directory: after an interruption the same command
resumes, and `--summary` evaluates the steps so far. Writes OUT/quality.json and OUT/quality.png. The exit
code is 1 if a mode misses its target.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ranks

REPORT_SECONDS = 30.0
FLOORS = 2.0  # a mode may be this many noise floors away from dense
LOCAL_NATS = 0.03
EVALUATIONS = 25  # per run
EVAL_TOKENS = 16_384
SETTLED = 0.5  # fraction of the run after which differences count


class Kind(NamedTuple):
    """A kind of run that is compared.

    ranks: the number of ranks. parts: the batch split, as relative rows of each rank. sync: the sync mode.
    """

    ranks: int
    parts: tuple[int, ...]
    sync: str


KINDS = {
    "single-host baseline": Kind(1, (4,), "dense"),
    "dense": Kind(2, (2, 2), "dense"),
    "dense, uneven split": Kind(2, (1, 3), "dense"),
    "exact": Kind(2, (2, 2), "exact"),
    "fast": Kind(2, (2, 2), "fast"),
    "local": Kind(2, (2, 2), "local"),
}
FLOOR = ("dense", "dense, uneven split")


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="runs, figures and picture")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="of each run (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, metavar="N", help="of the model (%(default)s)")
    parser.add_argument(
        "--aspect-ratio", type=int, default=64, metavar="N", help="its width per layer (%(default)s)"
    )
    parser.add_argument(
        "--sequence-len", type=int, default=128, metavar="N", help="tokens of a row (%(default)s)"
    )
    parser.add_argument(
        "--rows", type=int, default=8, metavar="N", help="of a step, a multiple of 4 (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="RUN", help="these runs"
    )
    parser.add_argument("--summary", action="store_true", help="do not train; evaluate existing runs")
    args = parser.parse_args(argv)
    if args.rows % 4:
        parser.error(f"--rows is {args.rows}: it must be a multiple of 4")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.summary:
        train(args)
    return summarize(args)


# -- running -----------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train all unfinished runs in --only, `--jobs` at a time, and print their progress."""
    waiting = [name for name in args.only if not finished(folder(args, name))]
    running: dict[str, subprocess.Popen[bytes]] = {}
    report_at = time.monotonic()
    while waiting or running:
        while waiting and len(running) < args.jobs:
            name = waiting.pop(0)
            running[name] = start(args, name)
        time.sleep(0.5)
        for name, run in list(running.items()):
            if run.poll() is not None:
                del running[name]
                if run.returncode:
                    print(f"{name} ended with {run.returncode}: see {folder(args, name)}.log", flush=True)
        if time.monotonic() >= report_at:
            report_at = time.monotonic() + REPORT_SECONDS
            print("; ".join(where(args, name) for name in running), flush=True)


def folder(args: argparse.Namespace, name: str) -> Path:
    return Path(args.out) / name.replace(", ", "-").replace(" ", "-")


def start(args: argparse.Namespace, name: str) -> subprocess.Popen[bytes]:
    """Start torchrun for the run `name` of KINDS, with one thread per rank."""
    kind, run_dir = KINDS[name], folder(args, name)
    shares = [part * args.rows // sum(kind.parts) for part in kind.parts]
    settings: dict[str, object] = {
        "run-id": run_dir.name,
        "tracker": "none",
        "sync": kind.sync,
        "depth": args.depth,
        "aspect-ratio": args.aspect_ratio,
        "head-dim": 64,
        "sequence-len": args.sequence_len,
        "total-batch-size": args.rows * args.sequence_len,
        "device-batch-size": args.rows,
        "num-iterations": args.steps,
        "eval-every": max(1, args.steps // EVALUATIONS),
        "eval-tokens": EVAL_TOKENS,
        "save-minutes": 5,
        "keep-checkpoints": 1,
        "dtype": "float32",
        "threads": 1,
    }
    if kind.ranks > 1:
        settings["shares"] = ",".join(map(str, shares))
    return ranks.start(kind.ranks, args.data_dir, run_dir, settings)


def finished(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "outcome.json").read_text())["outcome"] == "finished")
    except (OSError, ValueError, KeyError):
        return False


def where(args: argparse.Namespace, name: str) -> str:
    curve = Curve.read(folder(args, name))
    return f"{name} {len(curve.losses):,} of {args.steps:,}" + (
        f", loss {curve.losses[-1]:.3f}" if curve.losses else ""
    )


# -- figures -----------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """The figures in metrics.jsonl of a run.

    losses, seconds, sent: the loss in nats, the duration and the bytes sent of each step.
    evaluations: {step: validation loss in nats}.
    """

    losses: list[float]
    seconds: list[float]
    sent: list[int]
    evaluations: dict[int, float]

    @classmethod
    def read(cls, run_dir: Path) -> Curve:
        path = run_dir / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        steps = {line["step"]: line for line in lines if "loss" in line}  # the last line of a step counts
        return cls(
            [line["loss"] for line in steps.values()],
            [line["step_seconds"] for line in steps.values()],
            [line["bytes_sent"] for line in steps.values()],
            {line["step"]: line["val_loss"] for line in lines if "val_loss" in line},
        )


def difference(one: Curve, other: Curve, until: int) -> float:
    """Mean of (validation loss of `one` - that of `other`) in nats, from SETTLED * until to step `until`.

    nan if no step in this range was evaluated in both runs.
    """
    steps = [
        step for step in one.evaluations if SETTLED * until <= step <= until and step in other.evaluations
    ]
    return statistics.mean(one.evaluations[s] - other.evaluations[s] for s in steps) if steps else math.nan


def spread(one: Curve, other: Curve, until: int) -> float:
    """Mean absolute difference of validation losses in nats, over the same steps as in `difference`."""
    steps = [
        step for step in one.evaluations if SETTLED * until <= step <= until and step in other.evaluations
    ]
    return (
        statistics.mean(abs(one.evaluations[s] - other.evaluations[s]) for s in steps) if steps else math.nan
    )


def summarize(args: argparse.Namespace) -> int:
    curves = {name: Curve.read(folder(args, name)) for name in KINDS}
    curves = {name: curve for name, curve in curves.items() if curve.evaluations}
    if "dense" not in curves:
        print("The dense run has no evaluation yet. Train it first: leave out --summary.")
        return 1
    until = min(max(curve.evaluations) for curve in curves.values())
    dense = curves["dense"]
    floor = spread(dense, curves[FLOOR[1]], until) if FLOOR[1] in curves else math.nan
    table: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        away = difference(curve, dense, until)
        apart = spread(curve, dense, until)
        target = {"local": LOCAL_NATS}.get(name, math.nan if name in FLOOR else FLOORS * floor)
        met = (away if name == "local" else apart) <= target if not math.isnan(target) else None
        table[name] = {
            "val_loss": curve.evaluations[until],
            "difference": away,
            "mean_absolute_difference": apart,
            "target": None if math.isnan(target) else target,
            "met": met,
            "equal_losses": curve.losses[:until] == dense.losses[:until],
            "seconds": sum(curve.seconds[:until]),
            "bytes_per_step": statistics.mean(curve.sent[:until]),
        }
    shape = {name: getattr(args, name) for name in ("depth", "aspect_ratio", "sequence_len", "rows", "steps")}
    result = {**shape, "compared_until_step": until, "noise_floor": floor, "runs": table}
    (args.out / "quality.json").write_text(json.dumps(result, indent=1) + "\n")
    tokens = args.rows * args.sequence_len
    draw(args.out / "quality.png", curves, tokens, args.steps)
    print(f"after {until:,} of {args.steps:,} steps of {tokens:,} tokens; noise floor {floor:.5f} nat")
    for name, row in table.items():
        verdict = (
            "" if row["met"] is None else f", target {row['target']:.5f}: {'met' if row['met'] else 'MISSED'}"
        )
        same = ", the same losses at every step" if row["equal_losses"] and name != "dense" else ""
        print(
            f"{name:20} val loss {row['val_loss']:.4f}, from dense {row['difference']:+.5f} "
            f"(apart {row['mean_absolute_difference']:.5f}){verdict}{same}"
        )
    return 0 if all(row["met"] is not False for row in table.values()) else 1


def draw(path: Path, curves: dict[str, Curve], tokens: int, steps: int) -> None:
    """Plot the validation loss of each run over training time and over tokens, to the file `path`.

    curves: {name of a run: its figures}. tokens: tokens of a step. steps: the number of steps of a whole run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_time, by_tokens = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        at, losses = list(curve.evaluations), list(curve.evaluations.values())
        clock = list(itertools.accumulate(curve.seconds))
        style = {"linewidth": 4, "color": "0.8"} if name == FLOOR[0] else {"linewidth": 1}
        by_time.plot([clock[step - 1] / 60 for step in at], losses, label=name, **style)
        by_tokens.plot([step * tokens / 1e6 for step in at], losses, label=name, **style)
    by_time.set_xlabel("minutes of training on this machine, all ranks on its cores")
    by_tokens.set_xlabel(f"million tokens, of {steps * tokens / 1e6:.1f}")
    by_time.set_ylabel("validation loss, nats per token")
    by_tokens.legend()
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    sys.exit(main())
