"""Measures the peak memory of ranks, and compares it with the estimate that train.yml makes before a start.

    python -m benchmarks.memory --data-dir data --out DIR            all cases, about 10 minutes
    python -m benchmarks.memory --data-dir data --out DIR --record   also docs/recorded/memory.json

Each case trains three steps of sync=exact in float32 on this machine, with 2 rows of 1,024 tokens for each
rank, and saves a checkpoint after the second one. The peak is VmHWM, which the kernel keeps for each process.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.nanofleet.fleet.plugins.module_utils.run_memory import Need

from benchmarks import ranks, record
from benchmarks.lab import machine
from trainer.formatting import markdown_table

RECORD = record.RECORDED / "memory.json"
ROWS, LENGTH, STEPS = 2, 1024, 3
POLL_SECONDS = 0.05
HEAD = ("depth", "ranks", "recompute", "rank 0, GiB", "estimated", "largest other rank, GiB", "estimated")


class Case(NamedTuple):
    depth: int
    ranks: int
    recompute: str = "none"


CASES = (
    Case(4, 1),
    Case(4, 2),
    Case(8, 1),
    Case(8, 2),
    Case(8, 2, "layers"),
    Case(8, 4),
    Case(8, 4, "layers"),
    Case(12, 1),
    Case(12, 2),
    Case(12, 4, "layers"),
)


def peaks(parent: int) -> dict[int, float]:
    """{rank: peak memory so far in GiB} of the ranks that the process `parent`, torchrun, has started."""
    found = {}
    with contextlib.suppress(OSError):  # they have ended
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split():
            with contextlib.suppress(OSError, StopIteration):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                rank = next(text for text in variables if text.startswith(b"RANK="))
                lines = Path(f"/proc/{child}/status").read_text(encoding="utf-8").splitlines()
                peak = next(line for line in lines if line.startswith("VmHWM:"))
                found[int(rank[5:])] = int(peak.split()[1]) / 2**20
    return found


def measure(case: Case, data_dir: Path, out: Path) -> dict[int, float]:
    """Train the ranks of a case; returns {rank: peak memory in GiB}. Raises SystemExit if they fail."""
    run_dir = out / f"depth{case.depth}-ranks{case.ranks}-{case.recompute}"
    settings = {**values(case), "num_iterations": STEPS, "save_every": STEPS - 1, "eval_tokens": LENGTH}
    names = {name.replace("_", "-"): value for name, value in settings.items()}
    torchrun = ranks.start(case.ranks, data_dir, run_dir, names)
    found: dict[int, float] = {}
    while torchrun.poll() is None:
        found |= peaks(torchrun.pid)
        time.sleep(POLL_SECONDS)
    if torchrun.returncode:
        raise SystemExit(f"{case} ended with {torchrun.returncode}. Its log: {run_dir}.log")
    return found


def values(case: Case) -> dict[str, Any]:
    """The settings of a case that determine its memory."""
    return {
        "depth": case.depth,
        "sequence_len": LENGTH,
        "device_batch_size": ROWS,
        "total_batch_size": ROWS * LENGTH * case.ranks,
        "dtype": "float32",
        "sync": "exact",
        "recompute": case.recompute,
        "tracker": "none",
    }


def estimated(case: Case, coordinates: bool) -> float:
    """The estimate for one rank in GiB, without torchrun. coordinates: whether it is rank 0."""
    need = Need(values(case), world_size=case.ranks, coordinates=coordinates)
    return sum(need.parts.values()) + need.copy_gb


def table(content: Mapping[str, Any]) -> str:
    """The Markdown table of measured and estimated memory. content: that of memory.json."""
    lines = []
    for row in content["cases"]:
        cells = [f"{row['first']:.2f}", difference(row["first_estimated"], row["first"])]
        if row["other"]:
            cells += [f"{row['other']:.2f}", difference(row["other_estimated"], row["other"])]
        lines.append(
            [str(row["depth"]), str(row["ranks"]), row["recompute"], *cells, *[""] * (4 - len(cells))]
        )
    return markdown_table([HEAD, *lines], aligned=False)


def block(content: Mapping[str, Any]) -> str:
    """The table for the documentation, with its origin. content: that of memory.json."""
    origin = f"`{content['command']}`, {content['machine']}, commit `{content['commit']}`, {content['date']}"
    what = f"float32, `exact`, {ROWS} rows of {LENGTH:,} tokens per rank, a vocabulary of 32,768"
    return f"{origin}; {what}, a checkpoint included:\n\n{table(content)}"


def difference(estimate: float, measured: float) -> str:
    """The estimate in GiB, and how far it is above the measured value, as text: "4.70 (+8 %)"."""
    return f"{estimate:.2f} ({100 * (estimate / measured - 1):+.0f} %)"


def main() -> int:
    parser = ranks.argument_parser(__doc__, "the run directories and their logs")
    parser.add_argument("--record", action="store_true", help="also write docs/recorded/memory.json")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in CASES:
        found = measure(case, args.data_dir, args.out)
        other = max((peak for rank, peak in found.items() if rank), default=0.0)
        rows.append(
            {
                **case._asdict(),
                "first": round(found[0], 2),
                "first_estimated": round(estimated(case, True), 2),
                "other": round(other, 2),
                "other_estimated": round(estimated(case, False), 2),
            }
        )
        print(rows[-1], flush=True)
    content = {**record.origin("python -m benchmarks.memory"), "machine": machine(), "cases": rows}
    print(table(content))
    if args.record:
        record.write(RECORD, content)
        print("Written: docs/recorded/memory.json. Fill the pages: python -m scripts.docs_figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
