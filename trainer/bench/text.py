"""Results of bench as text: a few lines for one measurement, a table for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.formatting import counted
from trainer.health.run_status import STEP_PHASES

Result = dict[str, Any]
_PAIRED = " (each compared with the rates measured before and after it)"
QUIET = 0.9  # share of its cores below which other processes have influenced the figures


def describe(result: Result) -> str:
    """The result of one measurement as a few lines of text."""
    first = result["ranks"][0]
    around_each = len(first["rates_all"]) == result["steps"] + 1
    lines = [
        f"depth {result['depth']}, {result['tokens']:,} tokens a step in rows of {result['sequence_len']:,}, "
        f"{_ranks(result)}",
        f"  step       {result['step_seconds']:.2f} s ({min(result['step_seconds_all']):.2f} to "
        f"{max(result['step_seconds_all']):.2f} over {result['steps']}), {result['tok_per_s']:,.0f} tok/s",
        "  of which   " + ", ".join(f"{name} {result['split'][name]:.2f}" for name in STEP_PHASES) + " s",
        f"  limit      {max(r['limit_seconds'] for r in result['ranks']):.2f} s, of which the step reaches "
        f"{percent(result['share_of_limit'])}" + (_PAIRED if around_each else ""),
    ]
    for rank in result["ranks"]:
        lines += _lines_of(rank)
    if any(rank["cpu_share"] < QUIET and rank["device"] == "cpu" for rank in result["ranks"]) and (
        result["world_size"] == 1
    ):
        lines.append(
            f"  The process had only {percent(first['cpu_share'])} of its cores. Another process runs on "
            "this host; stop it and measure again."
        )
    return "\n".join(lines)


def _ranks(result: Result) -> str:
    rank = result["ranks"][0]
    if result["world_size"] == 1:
        threads = counted(rank["threads"], "thread")
        return f"one process, {rank['compute_dtype']}, {threads} on {rank['processor']}"
    shares = "/".join(map(str, result["shares"]))
    return f"{result['world_size']} ranks of {shares} rows, sync {result['sync']}"


def _lines_of(rank: Result) -> list[str]:
    who = f"rank {rank['rank']} ({rank['host']})"
    work, rates, times = rank["work"], rank["rates"], len(rank["rates_all"])
    gemm = [one["gemm"] for one in rank["rates_all"]]
    lines = [
        f"  {who}: {work['model_flops'] / 1e12:.2f} TFLOP of the model and "
        f"{work['muon_flops'] / 1e12:.2f} of Muon, {work['adamw_bytes'] / 1e9:.1f} GB of AdamW; "
        f"{rank['compute_dtype']}, {counted(rank['threads'], 'thread')}",
        f"    GEMM {rates['gemm'] / 1e9:,.0f} GFLOP/s ({min(gemm) / 1e9:,.0f} to "
        f"{max(gemm) / 1e9:,.0f}, measured {times} times), copy {rates['copy'] / 1e9:.1f} GB/s; "
        f"memory at most {rank['peak_rss'] / 1e9:.2f} GB; {percent(rank['cpu_share'])} of its cores",
    ]
    if rank["reduce_goodput"]:
        seen = f", {rank['sent'] / 1e6:,.1f} MB by {rank['interface']}'s counter" if rank["sent"] else ""
        lines.append(
            f"    sends {rank['counted'] / 1e6:,.1f} MB a step by count{seen}; the effective bandwidth of an "
            f"all-reduce is {rank['reduce_goodput'] / 1e6:,.1f} MB/s, so this takes at least "
            f"{rank['counted'] / rank['reduce_goodput']:.2f} s"
        )
    return lines


def table(results: Sequence[Result]) -> str:
    """The results of several measurements of single processes as a Markdown table."""
    head = [
        "depth",
        "tokens",
        "format",
        "threads",
        "step, s",
        *(f"{name}, s" for name in STEP_PHASES),
        "tok/s",
        "limit, s",
        "reached",
        "memory, GB",
    ]
    rows = [
        [
            str(result["depth"]),
            f"{result['tokens']:,}",
            result["ranks"][0]["compute_dtype"],
            str(result["ranks"][0]["threads"]),
            f"{result['step_seconds']:.2f}",
            *(f"{result['split'][name]:.2f}" for name in STEP_PHASES),
            f"{result['tok_per_s']:,.0f}",
            f"{max(rank['limit_seconds'] for rank in result['ranks']):.2f}",
            percent(result["share_of_limit"]),
            f"{max(rank['peak_rss'] for rank in result['ranks']) / 1e9:.2f}",
        ]
        for result in results
    ]
    return markdown([head, *rows])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
