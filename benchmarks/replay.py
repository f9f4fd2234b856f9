"""Compares plain DDP and nanofleet, on the hosts of the inventory, with a training that was set up by hand.

    make replay                       measures with bench.yml, and prints the table
    make replay ARGS="--record"       also writes docs/recorded/replay.json, for docs/how-to/replay.md

The training that was set up by hand is not repeated: docs/recorded/by-hand.json has its figures. As in that
training, the model has depth 8, and a step has 4,096 tokens. `bench.yml` measures the cases one after the
other; to type the same yourself:
`ansible-playbook bench.yml -e depth=8 -e bench_cases=ddp-4096,exact-4096,fast-4096`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import DEPTH, LENGTH
from benchmarks.record import RECORDED, ROOT, origin, write
from trainer.bench.report import compare, load
from trainer.formatting import counted, markdown_table

BY_HAND = RECORDED / "by-hand.json"
REPLAY = RECORDED / "replay.json"
TOKENS = 4096
CASES = ("ddp-4096", "exact-4096", "fast-4096")
NAMES = {
    "ddp": "plain DDP with a replicated optimizer",
    "exact": "nanofleet, `exact`",
    "fast": "nanofleet, `fast`",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--record", action="store_true", help="also write docs/recorded/replay.json")
    parser.add_argument("--hardware", default="", metavar="TEXT", help="what the hosts are, for --record")
    parser.add_argument("--report", action="store_true", help="measure nothing, use existing results")
    out = ROOT / "artifacts/replay"
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="(%(default)s)")
    args = parser.parse_args(argv)
    if not args.report:
        measure(args.out.resolve())
    results, _ = load(args.out / "cases")
    missing = [name for name in CASES if name not in results]
    if missing:
        print(f"Not measured: {', '.join(missing)}. Fix: make replay", file=sys.stderr)
        return 1
    found = record(results, args.hardware)
    by_hand = json.loads(BY_HAND.read_text(encoding="utf-8"))
    print(table(by_hand, found))
    print(other_model(found, by_hand), end="")
    if args.record:
        write(REPLAY, found)
        print("Written: docs/recorded/replay.json. Fill the page: python -m scripts.docs_figures")
    return 0


def other_model(found: Mapping[str, Any], by_hand: Mapping[str, Any]) -> str:
    """A message if the measured model has another size than the one trained by hand, else "".

    found, by_hand: the contents of replay.json and by-hand.json.
    """
    if found["parameters"] == by_hand["parameters"]:
        return ""
    vocab_size = by_hand["vocab_size"]
    return (
        f"This model has {found['parameters']:,} parameters, that of the effort by hand "
        f"{by_hand['parameters']:,} (vocabulary {vocab_size:,}), so bytes and factors differ.\n"
        f"Fix: python -m trainer prepare --source TEXT_FOLDER --vocab-size {vocab_size} --out data, then "
        "ansible-playbook setup.yml -e data_dir=data\n"
    )


def measure(out: Path) -> None:
    """Measure CASES with one call of bench.yml, also those measured before. Raises SystemExit if it fails.

    out: the folder for the results.
    """
    settings = {"depth": DEPTH, "sequence_len": LENGTH, "bench_cases": ",".join(CASES), "bench_out": out}
    command = ["ansible-playbook", "bench.yml", "-e", "bench_again=true"]
    command += [text for name, value in settings.items() for text in ("-e", f"{name}={value}")]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(code)


def record(results: Mapping[str, Mapping[str, Any]], hardware: str = "") -> dict[str, Any]:
    """The content of replay.json from the results of CASES.

    results: {case: result}. hardware: a text about the hosts; "" for what the hosts report.
    """
    rows = {row["case"]: row for row in compare({name: dict(results[name]) for name in CASES})}
    first = results[CASES[0]]
    return {
        **origin("make replay"),
        "hardware": hardware or hosts_of(first),
        "tokens": TOKENS,
        "depth": first["depth"],
        "parameters": first["parameters"],
        "cases": [_case(rows[name]) for name in CASES],
    }


def hosts_of(result: Mapping[str, Any]) -> str:
    """The hosts of a result as text: "tower: a CPU, 8 threads; laptop: ..."."""
    return "; ".join(
        f"{rank['host']}: {rank['cpu'] or rank['processor']}, {counted(rank['threads'], 'thread')}"
        for rank in result["ranks"]
    )


def _case(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sync": row["sync"],
        "format": row["format"],
        "step_seconds": round(row["step_seconds"], 2),
        "tok_per_s": round(row["tok_per_s"]),
        "over_ddp": round(row["over_ddp"], 2) if "over_ddp" in row else None,
        "payload_mb": round(row["payload"] / 1e6),
    }


def table(by_hand: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """The table of the page: the recorded training by hand and the measured cases, each with its hardware.

    by_hand, measured: the contents of by-hand.json and replay.json. Only the measured cases have a factor
    over plain DDP, because this factor compares steps on the same hosts.
    """
    head = ["", "step, s", "tok/s", "over plain DDP", "MB sent per rank", "hardware"]
    lines = [head]
    for name, figures in (("by hand, two hosts", "two_hosts"), ("by hand, one of them alone", "one_host")):
        one = by_hand[figures]
        seconds = f"{one['step_seconds']:g}" if one.get("step_seconds") else ""
        lines.append([f"{name} (as recorded)", seconds, f"{one['tok_per_s']:g}", "", "", by_hand["hardware"]])
    for case in measured["cases"]:
        over = f"{case['over_ddp']:.2f}x" if case["over_ddp"] else ""
        what = f"{NAMES[case['sync']]}, {case['format']}"
        rate, sent = f"{case['tok_per_s']:,}", f"{case['payload_mb']:,}"
        lines.append([what, f"{case['step_seconds']:.2f}", rate, over, sent, measured["hardware"]])
    return markdown_table(lines)


if __name__ == "__main__":
    sys.exit(main())
