"""python -m trainer bench: measures the seconds of a step and of its phases, by depth and rows per step.

python -m trainer bench                                        depth 8, 2 rows of 1,024 tokens
python -m trainer bench --depth 4 8 --rows 1 2 4               a table
torchrun --nproc-per-node 2 -m trainer bench --sync exact      several ranks, and their transfers
torchrun --nproc-per-node 2 -m trainer bench --ddp             the same with plain DDP, to compare with

Without --data-dir the rows are synthetic. Several measurements run one after the other, each in its own
process, so that they do not share memory and threads.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.bench import WARM_STEPS
from trainer.config import ConfigError, RunConfig, RunFile, parse_shares
from trainer.data.files import write_json
from trainer.formatting import counted
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.options import add_config_arguments

RESULT = "bench.json"
STEPS = 5
LENGTH = RunConfig().sequence_len
SET_HERE = ("num_iterations", "total_batch_size", "depth", "stage", "parent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench, and an option for each setting of a run that bench does not set itself."""
    for name, default, text in (
        ("--depth", 8, "depth of the model; several give a table (8)"),
        ("--rows", 2, "rows per step and rank; several give a table (2)"),
    ):
        parser.add_argument(name, type=int, nargs="+", default=[default], metavar="N", help=text)
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="measured steps (%(default)s)")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="the output of prepare (default: random rows)"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder for bench.json and the log files")
    parser.add_argument(
        "--run-file", type=Path, metavar="FILE", help="run.json; its num_iterations are measured"
    )
    parser.add_argument(
        "--shares",
        default="",
        metavar="N,N",
        help="rows of each rank; auto: by measured speed (default: equal)",
    )
    parser.add_argument(
        "--ddp",
        action="store_true",
        help="plain DistributedDataParallel and a replicated optimizer instead of a sync mode",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    add_config_arguments(parser, SET_HERE)


def progress_logger(env: RankEnv) -> RunLogger:
    """A logger that prints steps, warnings and errors to standard error, because the result uses stdout."""
    log = RunLogger(env)
    log.handlers = [logging.StreamHandler(sys.stderr)]
    log.addFilter(lambda record: record.levelno > logging.INFO or getattr(record, "event", "") == "step")
    return log


def run(args: argparse.Namespace) -> int:
    """`bench`: measure each depth with each number of rows; returns the exit code.

    Raises ConfigError if an option is invalid, or if options exclude each other.
    """
    if min(*args.depth, *args.rows, args.steps) < 1:
        raise ConfigError("--depth, --rows and --steps take whole numbers from 1.")
    env = RankEnv.from_environment()
    if args.ddp and args.sync:
        raise ConfigError("--ddp takes the place of a sync mode. Fix: leave out --ddp or --sync.")
    if args.ddp and env.world_size == 1:
        raise ConfigError(
            "--ddp measures several ranks, and this is one. "
            "Fix: torchrun --nproc-per-node 2 -m trainer bench --ddp"
        )
    if args.out and not args.out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {args.out}: there is no folder {args.out.absolute().parent}. Make it first."
        )
    if len(args.depth) * len(args.rows) == 1:
        return _measure(args, env)
    if env.world_size > 1 or args.run_file:
        raise ConfigError(
            "Under torchrun or with --run-file, bench measures one case. Give one --depth and one --rows."
        )
    if args.run_dir or args.shares:
        raise ConfigError("--run-dir and --shares are for one case. Give one --depth and one --rows.")
    return _measure_each(args)


def _measure(args: argparse.Namespace, env: RankEnv) -> int:
    from trainer.bench.text import describe
    from trainer.health.attempt import run_attempt

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="nanofleet-bench-") as temporary:
        args.run_dir = args.run_dir or Path(temporary)
        log = RunLogger(env, args.json) if args.run_file else progress_logger(env)

        def start(run_file: RunFile, attempt: Any, log: RunLogger) -> str:
            from trainer.bench.ddp import DDPTrainer
            from trainer.bench.steps import BenchTrainer

            kind = DDPTrainer if args.ddp else BenchTrainer
            trainer = kind(run_file, args.data_dir, args.run_dir, env, attempt, log)
            trainer.run()
            result.update(trainer.result)
            if result:
                write_json(args.run_dir / RESULT, result)
            return "Measured."

        code = run_attempt(args.run_dir, env, log, lambda: bench_run_file(args, env), start)
    if result:
        print(json.dumps(result) if args.json else describe(result), flush=True)
        if args.out:
            write_json(args.out, result)
    return code


def bench_run_file(args: argparse.Namespace, env: RankEnv) -> RunFile:
    """Load the file of --run-file; without this option, make a run file for the measured run.

    Raises ConfigError if the file cannot be used, or if an option is invalid.
    """
    if args.run_file:
        run_file = RunFile.load(args.run_file)
        if run_file.config.num_iterations <= WARM_STEPS:
            raise ConfigError(
                f"{args.run_file} has num_iterations {run_file.config.num_iterations}, and the first "
                f"{WARM_STEPS} steps are not measured. It needs more."
            )
        return run_file
    shares = parse_shares(args.shares)
    given = {name: getattr(args, name) for name in RunConfig.field_names() if getattr(args, name, None)}
    length = given.get("sequence_len", LENGTH)
    length = RunConfig.from_strings({"sequence_len": length, "total_batch_size": 0}).sequence_len
    fixed = shares if isinstance(shares, tuple) else ()
    rows = sum(fixed) or args.rows[0] * env.world_size
    given |= {
        "depth": args.depth[0],
        "num_iterations": WARM_STEPS + args.steps,
        "total_batch_size": rows * length,
        "tracker": "none",
    }
    config = RunConfig.from_strings(given)
    return RunFile(f"bench-{config.default_run_id()}", config, shares=shares)


def _measure_each(args: argparse.Namespace) -> int:
    """Measure each pair of depth and rows in its own process, with the other options unchanged.

    A pair that fails, for example because it is out of memory, is reported and left out. Returns the exit
    code of the last pair that failed; 0 if every pair was measured.
    """
    from trainer.bench.text import table

    results, code = [], 0
    with tempfile.TemporaryDirectory(prefix="nanofleet-bench-") as temporary:
        for depth in args.depth:
            for rows in args.rows:
                print(f"depth {depth}, {counted(rows, 'row')} ...", file=sys.stderr, flush=True)
                out = Path(temporary) / "result.json"
                command = [sys.executable, "-m", "trainer", "bench", "--json", "--out", str(out)]
                command += ["--depth", str(depth), "--rows", str(rows), *_options(args)]
                done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
                if done.returncode:
                    code = done.returncode
                    case = f"depth {depth}, {counted(rows, 'row')}"
                    print(f"{case}: failed, exit code {code}", file=sys.stderr, flush=True)
                    continue
                results.append(json.loads(out.read_text(encoding="utf-8")))
    if results:
        print(json.dumps(results) if args.json else table(results), flush=True)
        if args.out:
            write_json(args.out, results)
    return code


def _options(args: argparse.Namespace) -> list[str]:
    names = ["steps", "data_dir", *(name for name in RunConfig.field_names() if name not in SET_HERE)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
