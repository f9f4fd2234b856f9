"""The targets of the benchmarks, and the tables of `make bench` that compare results with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.bench.text import percent
from trainer.formatting import counted, markdown_table

# Target share of the roofline limit, without AMX and with it; and the least share that a single-host baseline
# must reach so that a ratio to it counts.
HOST_LIMIT = {"float32": 0.92, "bfloat16": 0.78}
AMX_LIMIT = {"float32": 0.92, "bfloat16": 0.60}
BASELINE_LIMIT = {"float32": 0.83, "bfloat16": 0.60}
MOST_MEMORY = 4.5e9
PREDICTION = 0.10  # the most that 90 % of the predicted steps may differ from the measured ones


@dataclass(frozen=True)
class Target:
    """A benchmark case and its targets; None for no target.

    group, case: names of the group of cases and of the case. ratio: the least ratio of its tokens per second
    to those of the single-host baseline. bound: the least quotient of this ratio and its upper bound (see
    trainer.bench.report). over_ddp: the least factor over plain DDP. payload: the most MB that a rank sends
    in a step.
    """

    group: str
    case: str
    ratio: float | None = None
    bound: float | None = None
    over_ddp: float | None = None
    payload: float | None = None


TARGETS = (
    Target("1gbit", "exact-4096-float32", ratio=1.7, bound=0.85, over_ddp=1.8, payload=190),
    Target("1gbit", "fast-4096-bfloat16", bound=0.75, over_ddp=2.0, payload=100),
    Target("1gbit", "exact-16384-float32", ratio=1.9),
    Target("1gbit", "fast-16384-bfloat16", ratio=1.75, bound=0.85),
    Target("100mbit", "local-8192-float32", ratio=1.9, payload=5),
    Target("uneven", "exact-16384-float32-auto", ratio=1.27),
)


def host_table(host: dict[str, dict[str, Any]]) -> str:
    head = ["one host", "step, s", "tok/s", "limit, s", "reached", "required", "memory, GB", "of its cores"]
    table = [head]
    for name, result in host.items():
        rank = result["ranks"][0]
        required = (AMX_LIMIT if has_amx() else HOST_LIMIT)[rank["compute_dtype"]]
        met = result["share_of_limit"] >= required and rank["peak_rss"] < MOST_MEMORY
        verdict = f"{percent(required)}: {'met' if met else 'missed'}"
        table.append(
            [
                f"{name.removeprefix('host-')}, {counted(rank['threads'], 'thread')}",
                f"{result['step_seconds']:.2f}",
                f"{result['tok_per_s']:,.0f}",
                f"{rank['limit_seconds']:.2f}",
                percent(result["share_of_limit"]),
                verdict,
                f"{rank['peak_rss'] / 1e9:.2f}",
                percent(rank["cpu_share"]),
            ]
        )
    return markdown_table(table)


def has_amx() -> bool:
    """Whether this processor, on which the lab's hosts run too, has AMX tiles for bfloat16 GEMMs."""
    return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()


def targets_table(rows: dict[str, dict[str, Any]]) -> str:
    head = ["target", "measured", "required", "", "beside an idle host", "bound by"]
    table = [[*head, "baseline, of its limit", "GEMM rate, of the baseline's"]]
    for target in TARGETS:
        row = rows.get(f"{target.group}/{target.case}")
        figures = (
            ("to baseline", "ratio", target.ratio, "{:.2f}x"),
            ("of its bound", "share_of_bound", target.bound, "{:.0%}"),
            ("over plain DDP", "over_ddp", target.over_ddp, "{:.2f}x"),
            ("MB a step", "payload", target.payload, "{:.1f}"),
        )
        for what, key, required, shape in figures:
            if required is None:
                continue
            value = (row or {}).get(key)
            if value is not None and key == "payload":
                value /= 1e6
            names = ("baseline_share_of_limit", "relative_gemm_rate", "ratio_idle")
            baseline, gemm_rate, idle = ((row or {}).get(name) for name in names)
            table.append(
                [
                    f"{target.group}, {target.case}, {what}",
                    shape.format(value) if value is not None else "not measured",
                    f"{'at most' if key == 'payload' else 'at least'} {shape.format(required)}",
                    verdict(
                        key,
                        value,
                        required,
                        shape,
                        baseline,
                        "bfloat16" if "bfloat16" in target.case else "float32",
                    ),
                    shape.format(idle) if key == "ratio" and idle else "",
                    (row or {}).get("bound_by", ""),
                    f"{100 * baseline:.1f} %" if baseline else "",
                    percent(gemm_rate) if gemm_rate else "",
                ]
            )
    return markdown_table(table)


def verdict(
    key: str, value: float | None, required: float, shape: str, baseline: float | None, dtype: str
) -> str:
    """Whether a figure meets its target, as text: "met" or "missed by X"; "" without a value.

    key: ratio, share_of_bound, over_ddp or payload. shape: format of a value, such as "{:.2f}x". baseline:
    the share of its roofline limit that the single-host baseline reached, None if unknown. If this share is
    below BASELINE_LIMIT for `dtype`, a ratio does not count, and the text names this condition.
    """
    if value is None:
        return ""
    if not (value <= required if key == "payload" else value >= required):
        return f"missed by {shape.format(abs(value - required))}"
    if key == "ratio" and (baseline or 0) < BASELINE_LIMIT[dtype]:
        return f"reached; counts if the baseline reaches {percent(BASELINE_LIMIT[dtype])} of its limit"
    return "met"


def prediction_line(rows: Iterable[dict[str, Any]]) -> str:
    """A sentence on how far the predicted steps are from the measured ones; "" without a prediction.

    rows: dicts, one for each case, with predicted_seconds (None without a prediction) and step_seconds.
    """
    predicted = [row for row in rows if row.get("predicted_seconds")]
    errors = sorted(row["predicted_seconds"] / row["step_seconds"] - 1 for row in predicted)
    if not errors:
        return ""
    sizes = sorted(map(abs, errors))
    found = sizes[math.ceil(0.9 * len(sizes)) - 1]
    verdict = "met" if found <= PREDICTION else "missed"
    return (
        f"Predicted steps of {counted(len(errors), 'case')}: {errors[0]:+.1%} to {errors[-1]:+.1%} of the "
        f"measured ones; 90 % of them within {found:.1%} (at most {PREDICTION:.0%}: {verdict})."
    )


def relative_gemm_rate(
    result: dict[str, Any], results: Iterable[dict[str, Any]], slow_second: bool = False
) -> float | None:
    """The GEMM rate in a case divided by that of its baseline; None without a baseline.

    This quotient shows whether the machine was equally fast in both measurements. The rate of a rank is the
    best of its measurements, because ranks on one machine that measure at the same time slow each other down.
    The slowest rank counts; with `slow_second`, rank 0. result: the result of the case. results: the results
    of all cases of its group, among which the baseline is.
    """
    ranks = result["ranks"][:1] if slow_second else result["ranks"]
    rate = min(_best(rank) for rank in ranks)
    tokens = result["tokens"] // (result["world_size"] if result["sync"] == "local" else 1)
    for other in results:
        same_dtype = other["ranks"][0]["compute_dtype"] == ranks[0]["compute_dtype"]
        if other["world_size"] == 1 < result["world_size"] and other["tokens"] == tokens and same_dtype:
            return rate / _best(other["ranks"][0])
    return None


def _best(rank: dict[str, Any]) -> float:
    return max(float(rates["gemm"]) for rates in rank["rates_all"])
