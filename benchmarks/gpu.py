"""Measures how fast one GPU trains models of several depths, with `python -m trainer bench`.

python -m benchmarks.gpu --out gpu.json                 on the machine with the GPU
python -m benchmarks.gpu --record gpu.json              in a checkout: to docs/recorded/gpu.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

RECORD = record.RECORDED / "gpu.json"
CASES = ((8, 4), (8, 64), (12, 64), (20, 32))
"""Depth, and rows of 1,024 tokens in a step; all rows are one micro-batch."""
STEPS = 10


def measure(depth: int, rows: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{depth}-{rows}.json"
    command = [sys.executable, "-m", "trainer", "bench", "--device", "cuda", "--out", str(out)]
    command += ["--depth", str(depth), "--steps", str(STEPS)]
    command += ["--rows", str(rows), "--device-batch-size", str(rows)]
    subprocess.run(command, check=True)
    return case(json.loads(out.read_text(encoding="utf-8")))


def case(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a case for the record. result: the content of the file that `trainer bench` writes."""
    (rank,) = result["ranks"]
    return {
        "gpu": rank["processor"],
        "torch": result["torch"],
        "depth": result["depth"],
        "parameters": result["parameters"],
        "tokens": result["tokens"],
        "dtype": rank["compute_dtype"],
        "step_seconds": round(result["step_seconds"], 3),
        "tok_per_s": round(result["tok_per_s"]),
        "share_of_limit": round(result["share_of_limit"], 3),
        "gemm_tflops": round(rank["rates"]["gemm"] / 1e12),
        "peak_gb": round(rank["peak_rss"] / 1e9, 1),
    }


def block(content: Mapping[str, Any]) -> str:
    """The table of docs/how-to/gpu-host.md from the content of gpu.json."""
    cases: Sequence[Mapping[str, Any]] = content["cases"]
    first = cases[0]
    lines = [
        f"**Measured on one {first['gpu']}** (torch {first['torch']}, {first['dtype']}, rows of 1,024 "
        + f"tokens; `{content['command']}`, commit `{content['commit']}`, {content['date']}). A GEMM reaches "
        + f"{first['gemm_tflops']} TFLOP/s there; the limit is the time of the step's GEMMs at that rate, "
        + "and of AdamW's bytes at that of a copy.",
        "",
        "| depth | parameters | tokens a step | s a step | tokens/s | share of the limit | GPU memory |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['depth']} | {each['parameters'] / 1e6:,.0f}M | {each['tokens']:,} "
        f"| {each['step_seconds']:.3f} | {each['tok_per_s']:,} "
        f"| {100 * each['share_of_limit']:.0f} % | {each['peak_gb']:.0f} GB |"
        for each in cases
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, metavar="FILE", help="measure, and write the cases to FILE")
    wanted.add_argument("--record", type=Path, metavar="FILE", help="write the record from such a FILE")
    args = parser.parse_args()
    if args.record:
        cases = json.loads(args.record.read_text(encoding="utf-8"))
        record.write(RECORD, {**record.origin("python -m benchmarks.gpu"), "cases": cases})
        print(f"{RECORD.relative_to(record.ROOT)} written; then: python -m scripts.docs_figures")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cases = [measure(depth, rows, Path(folder)) for depth, rows in CASES]
    args.out.write_text(json.dumps(cases), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
