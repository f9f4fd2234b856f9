"""Measures the training time that a checkpoint costs. Training continues while the checkpoint is written.

    python -m benchmarks.saving --data-dir data --out artifacts/saving

One process trains depth 8 by default and saves every few steps. metrics.jsonl has the wall time of each step.
The cost of a save is the time from one save to the next, minus the median step times the steps between them.
Prints the median step, the cost of a save, and its share of the training time at the default of one save
every 30 minutes.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys

from benchmarks.ranks import ROOT, argument_parser

DEFAULT_SECONDS = 30 * 60
FIRST = 3  # first steps, which include warm-up


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__, out="the run")
    parser.add_argument("--depth", type=int, default=8, metavar="N", help="of the model (%(default)s)")
    parser.add_argument("--every", type=int, default=8, metavar="N", help="steps between saves (%(default)s)")
    parser.add_argument("--saves", type=int, default=3, metavar="N", help="saves measured (%(default)s)")
    args = parser.parse_args(argv)

    shutil.rmtree(args.out, ignore_errors=True)
    steps = args.every * (args.saves + 2)
    command = [sys.executable, "-m", "trainer", "train", "--data-dir", str(args.data_dir.resolve())]
    command += ["--run-dir", str(args.out.resolve()), "--depth", str(args.depth), "--tracker", "none"]
    command += ["--num-iterations", str(steps), "--save-every", str(args.every), "--save-minutes", "0"]
    command += ["--eval-every", "0", "--eval-tokens", "1024"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout)

    times = [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]
    at = {line["step"]: line["time"] for line in times if "loss" in line}
    wall = {step: at[step] - at[step - 1] for step in at if step > FIRST}
    # A save happens between the lines of its step and of the next one; writing it takes some more steps.
    quiet = [wall[step] for step in wall if (step - 1) % args.every >= args.every // 2]
    median = statistics.median(quiet)
    costs = [
        at[saved + args.every] - at[saved] - args.every * median
        for saved in range(args.every, args.every * (args.saves + 1), args.every)
    ]
    cost = statistics.median(costs)
    waits = [float(text) for text in re.findall(r"which waited ([0-9.]+) s", done.stdout)]
    writing = [float(text) for text in re.findall(r"in ([0-9.]+) s beside", done.stdout)]
    files = [path for path in (args.out / f"checkpoints/step_{steps:06d}").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e9
    print(f"checkpoint {size:.2f} GB, median step {median:.2f} s ({min(quiet):.2f} to {max(quiet):.2f})")
    print(f"training waits {statistics.median(waits):.2f} s for the copy")
    print(f"writing takes {statistics.median(writing):.1f} s beside it")
    print(
        f"a save costs {cost:.2f} s in all ({', '.join(f'{c:.2f}' for c in costs)}): "
        f"{100 * cost / (args.every * median):.1f} % with one in {args.every} steps, "
        f"{100 * cost / DEFAULT_SECONDS:.2f} % with one in 30 minutes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
