"""Measures how far predicted steps are from measured ones: 20 cases on a lab of two hosts.

    python -m benchmarks.predictions            measure (about 20 minutes; existing results are kept)
    python -m benchmarks.predictions --record   also write docs/recorded/predictions.json

The cases differ in depth, sync mode, dtype, batch size, link and batch split. Each rank measures its speed
and its link before step 0; from that, the cost model (trainer.placement.cost_model) predicts the step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cases import LINK_MBIT, Group
from benchmarks.lab import ROOT, Job, machine, measure_group, playbook, prepare
from benchmarks.targets import prediction_line
from trainer.bench.report import compare, load
from trainer.formatting import markdown_table

RECORD = record.RECORDED / "predictions.json"
GROUPS = (
    Group(
        "depth-8",
        "1gbit",
        (
            "exact-2048-float32",
            "exact-4096-float32",
            "exact-8192-float32",
            "fast-4096-bfloat16",
            "fast-8192-bfloat16",
            "dense-4096-float32",
        ),
    ),
    Group(
        "depth-4",
        "1gbit",
        (
            "exact-2048-float32",
            "exact-8192-float32",
            "fast-4096-float32",
            "fast-8192-bfloat16",
            "dense-4096-float32",
            "dense-8192-bfloat16",
        ),
        depth=4,
    ),
    Group(
        "slow-link",
        "100mbit",
        (
            "exact-4096-float32",
            "exact-16384-bfloat16",
            "fast-4096-bfloat16",
            "dense-16384-float32",
            "local-4096-float32",
        ),
        depth=4,
    ),
    Group(
        "uneven",
        "1gbit",
        ("exact-8192-float32-auto", "exact-16384-float32-auto", "fast-8192-bfloat16-auto"),
        slow_second=True,
        depth=4,
    ),
)
HEAD = ("sync, dtype", "depth", "tokens a step", "predicted, s", "measured, s", "difference")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="also write docs/recorded/predictions.json")
    parser.add_argument("--lab", default="bench", metavar="NAME", help="name of the lab (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "artifacts/predictions", metavar="DIR", help="(%(default)s)"
    )
    args = parser.parse_args(argv, argparse.Namespace(only=[], quick=False, again=False))
    job = Job(args, args.out.resolve())
    left = [(group, job.left(group.name, group.cases)) for group in GROUPS]
    todo = [(group, cases) for group, cases in left if cases]
    data = prepare() if todo else Path()
    try:
        for group, cases in todo:
            measure_group(job, group, cases, data)
    finally:
        if todo:
            playbook(job, "lab.yml", {"lab_state": "down"}, quiet=True)
    measured = cases_of(job)
    content = {**record.origin("python -m benchmarks.predictions"), "machine": machine(), "cases": measured}
    print(f"{table(content)}\n\n{prediction_line(measured)}")
    if job.missing:
        print(f"Not measured: {', '.join(job.missing)}. Type the same again; existing results are kept.")
    elif args.record:
        record.write(RECORD, content)
        print("Written: docs/recorded/predictions.json. Fill the pages: python -m scripts.docs_figures")
    return 1 if job.missing else 0


def cases_of(job: Job) -> list[dict[str, Any]]:
    """Figures of each measured case, in the order of GROUPS."""
    found = []
    for group in GROUPS:
        results, _ = load(job.out / group.name / "cases")
        rows = {row["case"]: row for row in compare(results, LINK_MBIT[group.link])}
        found += [
            {
                "sync": row["sync"],
                "dtype": row["format"],
                "depth": group.depth,
                "tokens": row["tokens"],
                "link_mbit": LINK_MBIT[group.link],
                "slow_second": group.slow_second,
                "predicted_seconds": round(row["predicted_seconds"], 3),
                "step_seconds": round(row["step_seconds"], 3),
            }
            for row in (rows[case] for case in group.cases if case in rows)
        ]
    return found


def table(content: Mapping[str, Any]) -> str:
    """The Markdown table of the predictions. content: that of predictions.json."""
    rows = [
        [
            f"`{case['sync']}`, {case['dtype']}"
            + (f", {case['link_mbit']} Mbit/s" if case["link_mbit"] != 1000 else "")
            + (", the second host with a third of a core" if case["slow_second"] else ""),
            str(case["depth"]),
            f"{case['tokens']:,}",
            f"{case['predicted_seconds']:.2f}",
            f"{case['step_seconds']:.2f}",
            f"{case['predicted_seconds'] / case['step_seconds'] - 1:+.0%}".replace("%", " %"),
        ]
        for case in content["cases"]
    ]
    return markdown_table([HEAD, *rows], aligned=False)


def block(content: Mapping[str, Any]) -> str:
    """The table for the documentation, with its origin and the differences. content: of predictions.json."""
    origin = f"`{content['command']}`, {content['machine']}, commit `{content['commit']}`, {content['date']}"
    where = (
        "two hosts of one core each, in containers on one machine, 1 Gbit/s unless the table has another rate"
    )
    return f"{origin}; {where}:\n\n{table(content)}\n\n{prediction_line(content['cases'])}"


if __name__ == "__main__":
    sys.exit(main())
