"""Compares the compressions of sync=local with sync=dense, at 2 and 4 ranks: validation loss, bytes sent.

    python -m trainer prepare --shards .cache/demo/data/shards --out artifacts/data512 --vocab-size 512
    python -m benchmarks.compression --data-dir artifacts/data512 --out artifacts/compression

All runs train on the same rows in each step. They differ in how the rows are split and how the ranks
synchronize. The run `dense` is trained only with the first number of --ranks, because another split changes
only the order of its additions. The runs are trained one after the other on this machine; the ranks
communicate over loopback. The vocabulary is small, so that a run of this length learns its embeddings. Each
run has an ordinary run directory: after an interruption the same command resumes, and `--summary` evaluates
the runs that are finished. --record also writes docs/recorded/compression.json, from which
`python -m scripts.docs_figures` writes the table of the page. The exit code is 1 if the final validation loss
of a compression is more than TARGET_NATS above that of `dense`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.quality import Curve, difference, finished
from benchmarks.record import RECORDED, ROOT, origin, write
from trainer.host.facts import host_facts

RECORD = RECORDED / "compression.json"
TARGET_NATS = 0.02
RUNS: dict[str, dict[str, object]] = {
    "dense": {"sync": "dense"},
    "8 bits": {"sync": "local"},
    "2 bits": {"sync": "local", "local-bits": 2},
    "2 bits, top-k": {"sync": "local", "local-bits": 2, "local-topk": 352},
}


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="the run directories")
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="of each run (%(default)s)")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="of the model (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="(2 and 4)")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help="these")
    parser.add_argument("--summary", action="store_true", help="do not train; evaluate finished runs")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.summary:
        for world_size in args.ranks:
            for name in args.only:
                if name != "dense" or world_size == args.ranks[0]:
                    train(args, name, world_size)
    return summarize(args)


def folder(args: argparse.Namespace, name: str, world_size: int) -> Path:
    return Path(args.out) / f"{name.replace(', ', '-').replace(' ', '-')}-on-{world_size}"


def train(args: argparse.Namespace, name: str, world_size: int) -> None:
    """Train the run `name` of RUNS with `world_size` ranks, unless it is finished."""
    run_dir, rows = folder(args, name, world_size), 8
    if finished(run_dir):
        return
    settings: dict[str, object] = {
        "run-id": run_dir.name,
        "tracker": "none",
        "depth": args.depth,
        "head-dim": 64,
        "sequence-len": 128,
        "total-batch-size": rows * 128,
        "device-batch-size": rows // world_size,
        "num-iterations": args.steps,
        "eval-every": max(1, args.steps // 15),
        "save-minutes": 0,
        "digest-every": 0,
        "dtype": "float32",
        "threads": 1,
        **RUNS[name],
    }
    print(f"{run_dir.name}: {args.steps:,} steps", flush=True)
    code = ranks.start(world_size, args.data_dir, run_dir, settings).wait()
    if code:
        print(f"{run_dir.name} ended with {code}: see {run_dir}.log", flush=True)


def summarize(args: argparse.Namespace) -> int:
    """Print a line for each finished run; with --record, also write RECORD. Returns the exit code."""
    cases: list[dict[str, Any]] = []
    dense = folder(args, "dense", args.ranks[0])
    if not finished(dense):
        print(f"There is no finished run of dense with {args.ranks[0]} ranks. Leave out --summary.")
        return 1
    reference = Curve.read(dense)
    for world_size in args.ranks:
        for name in RUNS:
            if finished(run := folder(args, name, world_size)):
                cases.append(case(name, world_size, Curve.read(run), reference, args.steps))
    for each in cases:
        print(
            f"{each['ranks']} ranks, {each['run']:30} val loss {each['val_loss']:.3f}, from dense "
            f"{each['from_dense']:+.3f} at the end, {each['from_dense_mean']:+.3f} over the second half; "
            f"{each['bytes_per_step']:,} bytes a step"
        )
    if args.record:
        settings = {"machine": host_facts()["cpu"], "depth": args.depth, "steps": args.steps}
        write(RECORD, {**origin("python -m benchmarks.compression"), **settings, "cases": cases})
    missed = [each for each in cases if each["run"] != "dense" and each["from_dense"] > TARGET_NATS]
    return 1 if missed else 0


def case(name: str, world_size: int, curve: Curve, dense: Curve, steps: int) -> dict[str, Any]:
    return {
        "ranks": world_size,
        "run": name,
        "val_loss": round(curve.evaluations[steps], 4),
        "from_dense": round(curve.evaluations[steps] - dense.evaluations[steps], 4),
        "from_dense_mean": round(difference(curve, dense, steps), 4),
        "bytes_per_step": round(statistics.mean(curve.sent)),
    }


if __name__ == "__main__":
    sys.exit(main())
