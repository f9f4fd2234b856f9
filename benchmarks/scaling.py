"""Bytes and seconds of a step for 2 to 32 ranks: measured on this machine for some, computed for all.

    python -m benchmarks.scaling --out artifacts/scaling            # measures 2, 4 and 8 ranks of depth 4
    python -m benchmarks.scaling --out artifacts/scaling --record   # also writes docs/recorded/scaling.json

Measured: `trainer bench --sync exact` with 2, 4 and 8 ranks on this machine, one thread each, over loopback.
Ranks that share cores are slow. They also measure their speeds on the shared cores, and the step is predicted
from these speeds, so prediction and measurement can be compared. Computed: the cost model (trainer.placement)
for hosts with one core like that of this machine, the network LINK, and ROWS rows per host in a step.
Finished measurements are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ranks import torchrun
from benchmarks.record import RECORDED, ROOT, origin, write
from trainer.bench.step_prediction import sample_speed
from trainer.bench.steps import synthetic
from trainer.config import RunConfig
from trainer.formatting import markdown_table
from trainer.host.facts import host_facts
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import build_optimizer
from trainer.placement.cost_model import CostModel, payload
from trainer.placement.decide import step_work
from trainer.placement.microbenchmark import Link, Speed
from trainer.run_plan import make_plan
from trainer.sync.fragment import Outer

RECORD = RECORDED / "scaling.json"
MEASURED = (2, 4, 8)
RANKS = (2, 4, 8, 16, 32)
ROWS = 2  # of a step, per rank
# What an all-reduce reaches at 1 Gbit/s (benchmarks.lab), and the CPU time of a byte on one thread.
LINK = Link(bandwidth=119e6, latency=1e-3, delay=1.5e-9)
GEMM_RATE = 75e9  # FLOP/s, from which the size of the timed sample follows
MODES = ("exact", "fast", "local")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the measurements")
    parser.add_argument("--depth", type=int, default=4, metavar="N", help="of the model (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="measured steps (%(default)s)")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    data = synthetic(RunConfig().sequence_len)
    plan = make_plan(config_of(args.depth, 1), data.info.vocab_size, 1)
    speed = sample_speed(plan.model, torch.float32, GEMM_RATE)
    measured = {ranks: measure(args.out, ranks, args.depth, args.steps) for ranks in MEASURED}
    rows = np.asarray(data.train)
    cases = [case(args.depth, ranks, speed, rows, measured.get(ranks)) for ranks in RANKS]
    found = {
        **origin("python -m benchmarks.scaling"),
        "machine": host_facts()["cpu"],
        "cores": os.cpu_count(),
        "depth": args.depth,
        "parameters": measured[MEASURED[0]]["parameters"],
        "rows": ROWS,
        "link_mb_s": round(LINK.bandwidth / 1e6),
        "cases": cases,
    }
    print("\n\n".join(tables(found)))
    if args.record:
        write(RECORD, found)
        print(f"Written: {RECORD.relative_to(ROOT)}. Fill the page: python -m scripts.docs_figures")
    return 0


def config_of(depth: int, ranks: int) -> RunConfig:
    length = RunConfig().sequence_len
    return RunConfig(depth=depth, total_batch_size=ranks * ROWS * length, device_batch_size=ROWS)


def measure(out: Path, ranks: int, depth: int, steps: int) -> dict[str, Any]:
    """The result of `trainer bench --sync exact` with `ranks` ranks, read from `out` if it is there already.

    out: the folder of the measurements. depth: of the model. steps: the number of measured steps. Raises
    SystemExit if the measurement fails.
    """
    file = out / f"exact-depth{depth}-on-{ranks}.json"
    if not file.exists():
        print(f"{ranks} ranks: {steps} steps of depth {depth}", flush=True)
        arguments = [
            "bench", "--sync", "exact", "--depth", str(depth), "--rows", str(ROWS), "--steps", str(steps),
            "--dtype", "float32", "--out", str(file.resolve()),
        ]  # fmt: skip
        if code := torchrun(ranks, arguments, stdout=subprocess.DEVNULL).wait():
            raise SystemExit(
                f"The measurement with {ranks} ranks ended with {code}: see above. Fix: remove the cause, "
                "then repeat the command; finished measurements are kept."
            )
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def case(
    depth: int, ranks: int, speed: Speed, rows: NDArray[Any], result: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The computed bytes and seconds of a step with `ranks` ranks, and the measured ones if there are any.

    depth: of the model. speed: the measured speed of one core. rows: token ids of shape (rows, T + 1), in
    which active embedding rows are counted. result: that of `measure`; None if nothing was measured.
    """

    def active(count: int) -> int:
        return len(np.unique(rows[: min(count, len(rows)), :-1]))

    plan = make_plan(config_of(depth, ranks), int(rows.max()) + 1, ranks)
    with torch.device("meta"):
        model = GPT(plan.model)
        work = step_work(model, build_optimizer(model, 0.0, 0.0, 0.0, 0.0, 0.0), ROWS, active)
    cost_model = CostModel([speed] * ranks, LINK, work, [], [1] * ranks, outer=Outer())
    count = plan.rows_per_step
    seconds = {mode: cost_model.step(mode, count) for mode in MODES}
    found: dict[str, Any] = {
        "ranks": ranks,
        "megabytes": {mode: round(payload(mode, work, count, ranks) / 1e6, 2) for mode in MODES},
        "step_seconds": {mode: round(seconds[mode], 2) for mode in MODES},
        "factor": {mode: round(cost_model.single_host(count)[0] / seconds[mode], 2) for mode in MODES},
    }
    if result:
        found["measured"] = {
            "megabytes": round(statistics.mean(rank["counted"] for rank in result["ranks"]) / 1e6, 2),
            "step_seconds": round(result["step_seconds"], 2),
            "predicted_seconds": round(result["predicted_seconds"], 2),
            "peak_gb": round(max(rank["peak_rss"] for rank in result["ranks"]) / 1e9, 2),
        }
    return found


def tables(found: Mapping[str, Any]) -> tuple[str, str]:
    """Two Markdown tables of a record: (what was computed, what was measured on one machine)."""
    head = ["ranks", *(f"`{mode}`, MB a step" for mode in MODES), *(f"`{mode}`, s" for mode in MODES)]
    lines = [[*head, *(f"`{mode}` over one host" for mode in MODES)]]
    for one in found["cases"]:
        sent = [f"{one['megabytes'][mode]:,.1f}" for mode in MODES]
        seconds = [f"{one['step_seconds'][mode]:.2f}" for mode in MODES]
        lines.append([str(one["ranks"]), *sent, *seconds, *(f"{one['factor'][mode]:.1f}x" for mode in MODES)])
    head = ["ranks", "MB a step: counted", "computed", "s a step: measured", "predicted", "peak memory, GB"]
    checks = [head]
    for one in found["cases"]:
        if "measured" in one:
            seen = one["measured"]
            sent = [f"{seen['megabytes']:,.1f}", f"{one['megabytes']['exact']:,.1f}"]
            seconds = [f"{seen['step_seconds']:.2f}", f"{seen['predicted_seconds']:.2f}"]
            checks.append([str(one["ranks"]), *sent, *seconds, f"{seen['peak_gb']:.2f}"])
    return markdown_table(lines), markdown_table(checks)


if __name__ == "__main__":
    sys.exit(main())
