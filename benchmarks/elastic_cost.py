"""Measures what elastic=true costs a run to which nothing happens.

    python -m benchmarks.elastic_cost --lab NAME --data-dir data --out artifacts/elastic --record

NAME is a lab that is set up, as for benchmarks.elastic. Short runs with elastic=false, with elastic=true and
with elastic=true without copies of the state follow each other, --rounds times, each time in the opposite
order. They save no checkpoints. The figure of a run is the mean time of a step, which contains the copies.
Prints the ratios to elastic=false of the same round and their medians, and writes them to
OUT/elastic-cost.json; --record also writes docs/recorded/elastic-cost.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import ranks, record
from benchmarks.elastic import SETTINGS
from benchmarks.elastic_lab import Lab
from benchmarks.lab import machine

RECORD = record.RECORDED / "elastic-cost.json"
MARK = "elastic-cost"  # of the result in docs/explanation/elastic.md
OFF = "elastic=false"
CASES: dict[str, dict[str, object]] = {
    OFF: {"elastic": "false"},
    "elastic=true": {"elastic": "true"},
    "elastic=true, no copies": {"elastic": "true", "snapshot_seconds": 100_000},
}
FIRST_STEPS = 10  # of a run, which are left out


def mean_step(lab: Lab, settings: dict[str, object], steps: int) -> float:
    """Start a run, wait for `steps` steps after the first FIRST_STEPS, and stop the run.

    Returns the mean seconds of these `steps` steps. settings: {setting: value} of the run. Raises SystemExit
    if a playbook fails or the steps take longer than 600 s.
    """
    lab.run_id, lab.steps = f"cost-{int(time.time())}", {}
    lab.play("train.yml", run_id=lab.run_id, data_dir=lab.data_dir, **settings)
    try:
        lab.wait(lambda: len(lab.steps) > FIRST_STEPS + steps, f"{FIRST_STEPS + steps} steps", 600)
        lab.read(None)
    finally:
        lab.play("stop.yml", run_id=lab.run_id, stop_now="true")
    times = [when for when, step in sorted(lab.steps) if FIRST_STEPS <= step <= FIRST_STEPS + steps]
    return (times[-1] - times[0]) / (len(times) - 1)


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """{case: list with one ratio per round}, for all cases except elastic=false.

    A ratio is the step time of the case divided by that of elastic=false in the same round, to 4 decimals.
    seconds: {case: mean seconds of a step, one entry per round}.
    """
    return {
        case: [round(own / off, 4) for own, off in zip(seconds[case], seconds[OFF], strict=True)]
        for case in CASES
        if case != OFF
    }


def block(content: Mapping[str, Any]) -> str:
    """The result in a paragraph for the documentation, with its hardware, command and settings."""
    (whole, bare), settings = content["medians"].values(), content["settings"]
    step = statistics.median(content["seconds"][OFF])
    return (
        f"**Measured in containers on one machine** ({content['machine']}), {content['hosts']} hosts: "
        f"`{content['command']}`, commit `{content['commit']}`, {content['date']}. "
        f"Depth {settings['depth']}, `sync={settings['sync']}`, steps of {step:.2f} s with "
        f"`elastic=false`. `elastic=true` changed the mean step by {100 * (whole - 1):+.1f} %; without the "
        f"copies of the state it changed by {100 * (bare - 1):+.1f} % (medians of {content['rounds']} "
        f"rounds of {content['steps']} steps each)."
    )


def main(argv: list[str] | None = None) -> int:
    parser: argparse.ArgumentParser = ranks.argument_parser(__doc__, out="the figures")
    parser.add_argument("--lab", required=True, metavar="NAME", help="a lab that is set up")
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of all cases (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of a run (%(default)s)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the runs, such as depth=8"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ranks.ROOT)}")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(args.lab, args.hosts, args.data_dir.resolve())
    settings = {**SETTINGS, "save_minutes": 0, **dict(each.split("=", 1) for each in args.set)}
    content: dict[str, Any] = {
        **record.origin("python -m benchmarks.elastic_cost"),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "hosts": args.hosts,
        "steps": args.steps,
        "settings": settings,
    }
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(args.rounds):
        for case in list(CASES)[:: -1 if number % 2 else 1]:
            seconds[case].append(round(mean_step(lab, {**settings, **CASES[case]}, args.steps), 4))
            print(
                f"{time.strftime('%H:%M:%S')} round {number + 1}: {case}: {seconds[case][-1]} s", flush=True
            )
        found = ratios(seconds)
        content |= {"rounds": number + 1, "seconds": seconds, "ratios": found}
        content["medians"] = {case: round(statistics.median(each), 4) for case, each in found.items()}
        for folder in [args.out, *([RECORD.parent] if args.record else [])]:
            record.write(folder / RECORD.name, content)
    print(block(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
