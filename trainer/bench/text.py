"""Results of bench as text: a few lines for one measurement, Markdown tables for several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.formatting import counted, markdown_table
from trainer.health.run_status import STEP_PHASES

Result = dict[str, Any]
QUIET = 0.9  # cpu_share of a rank below which other processes have influenced the figures


def describe(result: Result) -> str:
    """The result of one measurement of `trainer bench` as a few lines of text.

    result: the attribute `result` of BenchTrainer.
    """
    first = result["ranks"][0]
    paired = len(first["rates_all"]) == result["steps"] + 1
    lines = [
        f"depth {result['depth']}, {result['tokens']:,} tokens a step in rows of {result['sequence_len']:,}, "
        f"{_ranks(result)}",
        f"  step       {result['step_seconds']:.2f} s ({min(result['step_seconds_all']):.2f} to "
        f"{max(result['step_seconds_all']):.2f} over {result['steps']}), {result['tok_per_s']:,.0f} tok/s",
        "  of which   " + ", ".join(f"{name} {result['split'][name]:.2f}" for name in STEP_PHASES) + " s",
        f"  limit      {_limit(result)} s, of which the step reaches {percent(result['share_of_limit'])}"
        + (" (each step compared with the rates measured before and after it)" if paired else ""),
    ]
    for rank in result["ranks"]:
        lines += _lines_of(rank)
    if result["world_size"] == 1 and first["cpu_share"] < QUIET and first["device"] == "cpu":
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
    work, rates = rank["work"], rank["rates"]
    gemm = [one["gemm"] for one in rank["rates_all"]]
    lines = [
        f"  rank {rank['rank']} ({rank['host']}): {work['model_flops'] / 1e12:.2f} TFLOP of the model and "
        f"{work['muon_flops'] / 1e12:.2f} of Muon, {work['adamw_bytes'] / 1e9:.1f} GB of AdamW; "
        f"{rank['compute_dtype']}, {counted(rank['threads'], 'thread')}",
        f"    GEMM {rates['gemm'] / 1e9:,.0f} GFLOP/s ({min(gemm) / 1e9:,.0f} to "
        f"{max(gemm) / 1e9:,.0f}, measured {len(gemm)} times), copy {rates['copy'] / 1e9:.1f} GB/s; "
        f"memory at most {rank['peak_rss'] / 1e9:.2f} GB; {percent(rank['cpu_share'])} of its cores",
    ]
    if rank["reduce_bandwidth"]:
        seen = f", {rank['sent'] / 1e6:,.1f} MB by {rank['interface']}'s counter" if rank["sent"] else ""
        lines.append(
            f"    sends {rank['counted'] / 1e6:,.1f} MB a step by count{seen}; the effective bandwidth of an "
            f"all-reduce is {rank['reduce_bandwidth'] / 1e6:,.1f} MB/s, so the transfers of a step take at "
            f"least {rank['counted'] / rank['reduce_bandwidth']:.2f} s"
        )
    return lines


def _limit(result: Result) -> str:
    seconds = max(rank["limit_seconds"] for rank in result["ranks"])
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.4f}"  # of a GPU


Columns = Mapping[str, Callable[[Result], str]]  # heading -> text of the cell for a row


def _phase(name: str) -> Callable[[Result], str]:
    return lambda result: f"{result['split'][name]:.2f}"


RESULTS: Columns = {
    "depth": lambda result: str(result["depth"]),
    "tokens": lambda result: f"{result['tokens']:,}",
    "format": lambda result: result["ranks"][0]["compute_dtype"],
    "threads": lambda result: str(result["ranks"][0]["threads"]),
    "step, s": lambda result: f"{result['step_seconds']:.2f}",
    **{f"{name}, s": _phase(name) for name in STEP_PHASES},
    "tok/s": lambda result: f"{result['tok_per_s']:,.0f}",
    "limit, s": _limit,
    "reached": lambda result: percent(result["share_of_limit"]),
    "memory, GB": lambda result: f"{max(rank['peak_rss'] for rank in result['ranks']) / 1e9:.2f}",
}


def table(rows: Sequence[Result], columns: Columns = RESULTS) -> str:
    """A Markdown table with a line for each of `rows`.

    rows: results of measurements (see BenchTrainer), or rows that `trainer.bench.report.compare` returns.
    columns: {heading: function of a row that returns the text of the cell}.
    """
    return markdown_table([list(columns), *([cell(row) for cell in columns.values()] for row in rows)])


def percent(share: float | None) -> str:
    """A share from 0 to 1 as text, such as "85 %"; "" for None."""
    return f"{100 * share:.0f} %" if share is not None else ""
