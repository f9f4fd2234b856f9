"""The report of several measurements: throughput, ratio to the single-host baseline, bound of this ratio.

python -m trainer.bench.report FOLDER --out OUT [--link-mbit 1000] [--tracker-uri http://tower:5000]

FOLDER has CASE.json for each benchmark case, as `python -m trainer bench` writes it. OUT gets bench.md,
bench.json and bench.png.

The first table has a line for each case: 1 process, several processes on one host, all hosts, a GPU. The
factor over plain DDP compares a case with the case `ddp` of the same hosts, tokens and number format.

The single-host baseline has as many tokens per step as all ranks together; for sync=local it has as many as
one rank. The ratio is tokens per second / tokens per second of the baseline. Its upper bound is the ratio of
a step that takes max(seconds of a baseline step with the rows of one rank, seconds of the transfers), where
the seconds of the transfers are bytes sent / bandwidth of an all-reduce, plus latency.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.bench import DDP, SCHEMA
from trainer.bench.text import Columns, Result, percent, table
from trainer.data.files import write_json, write_whole
from trainer.formatting import counted
from trainer.options import number_from_zero

Row = dict[str, Any]
REPORT = "bench.json"
COPIED = ("depth", "sequence_len", "tokens", "shares", "sync", "steps", "split")  # from result to row
LOGGED = (
    "tok_per_s",
    "step_seconds",
    "ratio",
    "over_ddp",
    "bound",
    "share_of_bound",
    "payload",
    "reduce_seconds",
    "reduce_measured",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of all measurements in a folder; returns the exit code.

    argv: the command line without the program name; None: the command line of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m trainer.bench.report", description="Report measurements."
    )
    parser.add_argument("folder", type=Path, help="the measurements, a file CASE.json each")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument(
        "--link-mbit", type=number_from_zero, default=0.0, metavar="N", help="rate of the link (the card's)"
    )
    parser.add_argument("--tracker-uri", default="", metavar="URI", help="also log it to this MLflow server")
    args = parser.parse_args(argv)
    results, other = load(args.folder)
    if other:
        print(
            f"Left out, because another version of nanofleet measured it: {', '.join(other)}. "
            "To measure it again, type: ansible-playbook bench.yml -e bench_again=true"
        )
    if not results:
        print(
            f"There is no measurement in {args.folder}. Measure with bench.yml, or give the folder that has "
            "CASE.json files.",
            file=sys.stderr,
        )
        return 2
    rows = compare(results, args.link_mbit)
    args.out.mkdir(parents=True, exist_ok=True)
    text = as_markdown(results, rows)
    write_whole(args.out / "bench.md", (text + "\n").encode())
    write_json(args.out / REPORT, {"schema": 1, "rows": rows, "cases": results})
    draw(args.out / "bench.png", rows)
    print(text)
    if args.tracker_uri:
        log(args.tracker_uri, args.out, rows)
    return 0


# -- the figures ---------------------------------------------------------------------------------------------


def load(folder: Path) -> tuple[dict[str, Result], list[str]]:
    """Read the results of all benchmark cases in `folder`, from the files CASE.json.

    Returns ({case: result}, names of the cases whose files have another SCHEMA or are not JSON). A result is
    the content of the file, as BenchTrainer makes it.
    """
    results, other = {}, []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            result = None
        if isinstance(result, dict) and result.get("schema") == SCHEMA:
            results[path.stem] = result
        elif path.name != REPORT:  # it may be in the same folder
            other.append(path.stem)
    return results, other


def compare(results: Mapping[str, Result], link_mbit: float = 0.0) -> list[Row]:
    """The rows of the report, one for each benchmark case: figures, and comparison with other cases.

    results: {case: content of its result file}.
    link_mbit: rate of the link in Mbit/s; 0: as the network cards report it.
    Each row has the keys in COPIED, copied from the result, and case, ranks (a number), hosts, format,
    device, step_seconds, predicted_seconds, tok_per_s, share_of_limit, peak_rss (bytes), gemm (FLOP/s, by
    rank) and cpu_share.
    With several ranks: payload (bytes that a rank sends in a step), payload_by_interface (the same by the
    counter of the interface), bandwidth (the effective bandwidth in bytes/s), and the seconds that the
    payload takes: reduce_seconds (computed from bandwidth), reduce_measured (measured), link_seconds
    (computed from the rate of the link).
    If the single-host baseline was measured: ratio (to this baseline), baseline_share_of_limit (its
    share_of_limit), bound (the upper bound of the ratio), share_of_bound, and bound_by ("the link" or "the
    processor"). If the case `ddp` was measured: over_ddp (factor over it).
    """
    rows = []
    for name, result in results.items():
        row = _row(name, result)
        if result["world_size"] > 1:
            row |= _transfers(result, link_mbit)
            singles = [one for one in results.values() if one["world_size"] == 1 and _comparable(one, result)]
            row |= _against_baseline(row, result, singles)
        rows.append(row)
    for row in rows:
        ddp = [one for one in rows if one["sync"] == DDP and _same_work(one, row)]
        if ddp and row["sync"] != DDP:
            row["over_ddp"] = ddp[0]["step_seconds"] / row["step_seconds"]
    return rows


def _same_work(one: Row, other: Row) -> bool:
    """Whether two cases differ in the sync mode or the batch split only."""
    names = ("depth", "sequence_len", "tokens", "ranks", "hosts", "format", "device")
    return all(one[name] == other[name] for name in names)


def _row(name: str, result: Result) -> Row:
    ranks = result["ranks"]
    # A sync round of local occurs once in many steps, so the time of a step is a mean.
    seconds = result["step_seconds_mean" if result["sync"] == "local" else "step_seconds"]
    return {
        **{key: result[key] for key in COPIED},
        "case": name,
        "ranks": result["world_size"],
        "hosts": sorted(set(result["hosts"])),
        "format": "/".join(dict.fromkeys(rank["compute_dtype"] for rank in ranks)),
        "device": ranks[0]["device"],
        "step_seconds": seconds,
        "predicted_seconds": result.get("predicted_seconds"),
        "tok_per_s": result["tokens"] / seconds,
        "share_of_limit": result["share_of_limit"] if len(ranks) == 1 else None,
        "peak_rss": max(rank["peak_rss"] for rank in ranks),
        "gemm": [rank["rates"]["gemm"] for rank in ranks],
        "cpu_share": min(rank["cpu_share"] for rank in ranks),
    }


def _transfers(result: Result, link_mbit: float) -> Row:
    """The part of a row of `compare` about transfers: the payload of a step, and the seconds that it takes.

    payload: the most bytes that a rank sends in a step. reduce_measured: measured seconds of an all-reduce of
    the payload; None in results of a release that did not measure it. reduce_seconds: computed from the
    effective bandwidth. link_seconds: computed from the rate of the link; None if the rate is unknown or all
    ranks are on one host.
    """
    ranks, suffix = result["ranks"], "_mean" if result["sync"] == "local" else ""
    payload = max(rank[f"counted{suffix}"] for rank in ranks)
    bandwidth = min(rank["reduce_bandwidth"] for rank in ranks)
    sent = [rank[f"sent{suffix}"] for rank in ranks if rank[f"sent{suffix}"] is not None]
    link = link_mbit or min((rank.get("link_mbit") or 0 for rank in ranks), default=0)
    if len(set(result["hosts"])) == 1:  # ranks of one host use no link
        sent, link = [], 0
    return {
        "payload": payload,
        "payload_by_interface": max(sent, default=None),
        "bandwidth": bandwidth,
        "reduce_seconds": max(rank.get("reduce_computed") or payload / bandwidth for rank in ranks),
        "reduce_measured": max(rank.get("reduce_measured") or 0.0 for rank in ranks) or None,
        "link_seconds": payload * 8 / (link * 1e6) if link else None,
    }


def _against_baseline(row: Row, result: Result, singles: Sequence[Result]) -> Row:
    """The part of a row of `compare` about the single-host baseline; {} if the baseline was not measured.

    row: the row so far. result: the case of the row. singles: results of one process that are comparable with
    `result`. The bound is missing if `singles` do not give the seconds of a step for the rows of each rank.
    """
    ranks, length = result["ranks"], result["sequence_len"]
    tokens = result["tokens"] // (result["world_size"] if result["sync"] == "local" else 1)
    baseline = _baseline_seconds(singles, tokens, ranks[0]["host"])
    if baseline is None:
        return {}
    at_share = [
        _baseline_seconds(singles, rank["rows"] * length, rank["host"])
        or _interpolated(singles, rank["rows"] * length, rank["host"])
        for rank in ranks
    ]
    baseline_rate = tokens / baseline
    ratio = row["tok_per_s"] / baseline_rate
    shares_of_limit = (one["share_of_limit"] for one in singles if one["step_seconds"] == baseline)
    found: Row = {"ratio": ratio, "baseline_share_of_limit": next(shares_of_limit, None)}
    if all(at_share):
        least = max(row["reduce_seconds"], *(seconds for seconds in at_share if seconds))
        found["bound"] = result["tokens"] / least / baseline_rate
        found["share_of_bound"] = ratio / found["bound"]
        found["bound_by"] = "the link" if row["reduce_seconds"] >= least else "the processor"
    return found


def _comparable(one: Result, other: Result) -> bool:
    """Whether a measurement of one process has the model, the device and a number format of `other`."""
    rank = one["ranks"][0]
    return (
        (one["depth"], one["sequence_len"]) == (other["depth"], other["sequence_len"])
        and any(rank["compute_dtype"] == each["compute_dtype"] for each in other["ranks"])
        and bool(rank["device"] == other["ranks"][0]["device"])
    )


def _baseline_seconds(singles: Sequence[Result], tokens: int, host: str) -> float | None:
    """Seconds of a step of `tokens` tokens of one process: on `host`, else on any host, else None."""
    fitting = [one for one in singles if one["tokens"] == tokens]
    there = [one for one in fitting if one["hosts"] == [host]]
    return float((there or fitting)[0]["step_seconds"]) if fitting else None


def _interpolated(singles: Sequence[Result], tokens: int, host: str) -> float | None:
    """Seconds of a step of `tokens` tokens on `host`, interpolated linearly; None if no host has a line.

    The line of a host goes through its measurements with the fewest and the most tokens. If `host` has no two
    measurements with different numbers of tokens, the line of another host is used. The result is then scaled
    by the ratio of a measurement of `host` to this line, if `host` has a measurement.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for one in sorted(singles, key=lambda one: int(one["tokens"])):
        points.setdefault(one["hosts"][0], []).append((one["tokens"], float(one["step_seconds"])))
    lines = {name: known for name, known in points.items() if known[0][0] < known[-1][0]}
    if host in lines:
        return _on_line(lines[host], tokens)
    if not lines:
        return None
    line = next(iter(lines.values()))
    own = points.get(host)
    ratio = own[0][1] / _on_line(line, own[0][0]) if own else 1.0
    return ratio * _on_line(line, tokens)


def _on_line(points: Sequence[tuple[int, float]], tokens: int) -> float:
    (low, first), (high, last) = points[0], points[-1]
    return first + (tokens - low) * (last - first) / (high - low)


# -- for people ----------------------------------------------------------------------------------------------


def as_markdown(results: Mapping[str, Result], rows: Sequence[Row]) -> str:
    """The report as Markdown: the hosts, one table of all cases, then details.

    results: {case: content of its result file}. rows: the result of `compare`.
    """
    first = next(iter(results.values()))
    facts: dict[str, str] = {}
    for rank in (rank for result in results.values() for rank in result["ranks"]):
        cpu, threads = rank["cpu"] or rank["processor"], counted(rank["threads"], "thread")
        facts.setdefault(rank["host"], f"{rank['host']}: {cpu}, {threads}")
    head = f"Depth {first['depth']}, rows of {first['sequence_len']:,} tokens, torch {first['torch']}. "
    parts = [f"{head}{'; '.join(facts.values())}.", table(sorted(rows, key=_sort_key), CASES)]
    parts.append(table(rows, THROUGHPUT))
    if together := [row for row in rows if row["ranks"] > 1]:
        parts.append(table(together, TRANSFERS))
    return "\n\n".join(parts)


def _sort_key(row: Row) -> tuple[bool, int, int]:
    """Sort key of the first table: CPUs before GPUs, one host before several, few processes before many."""
    return row["device"] != "cpu", len(row["hosts"]), row["ranks"]


def _case_name(row: Row) -> str:
    """The name of a case in the first table: "2 processes on tower", "plain DDP on tower, laptop"."""
    hosts = ", ".join(row["hosts"])
    if len(row["hosts"]) > 1:
        how = "plain DDP" if row["sync"] == DDP else row["sync"]
        return f"{how} on {'the GPUs of ' if row['device'] != 'cpu' else ''}{hosts}"
    if row["device"] != "cpu":
        return f"GPU of {hosts}"
    return f"{counted(row['ranks'], 'process')} on {hosts}"


def _seconds(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else ""


def _predicted(row: Row) -> str:
    """Predicted seconds of a step and their deviation from the measured seconds, as text; "" if unknown."""
    seconds = row["predicted_seconds"]
    return f"{seconds:.2f} ({round(100 * (seconds / row['step_seconds'] - 1)):+d} %)" if seconds else ""


def _megabytes(value: float | None) -> str:
    return f"{value / 1e6:,.1f}" if value is not None else ""


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""


CASES: Columns = {
    "what": _case_name,
    "tokens a step": lambda row: f"{row['tokens']:,}",
    "format": lambda row: row["format"],
    "step, s": lambda row: f"{row['step_seconds']:.2f}",
    "tok/s": lambda row: f"{row['tok_per_s']:,.0f}",
    "to baseline": lambda row: _times(row.get("ratio")),
    "over plain DDP": lambda row: _times(row.get("over_ddp")),
    "all-reduce measured, s": lambda row: _seconds(row.get("reduce_measured")),
    "computed, s": lambda row: _seconds(row.get("reduce_seconds")),
}
THROUGHPUT: Columns = {
    "case": lambda row: row["case"],
    "hosts": lambda row: ", ".join(row["hosts"]),
    "rows": lambda row: "/".join(map(str, row["shares"])),
    "format": lambda row: row["format"],
    "step, s": lambda row: f"{row['step_seconds']:.2f}",
    "predicted, s": _predicted,
    "of it sync, s": lambda row: f"{row['split']['sync']:.2f}",
    "tok/s": lambda row: f"{row['tok_per_s']:,.0f}",
    "to baseline": lambda row: _times(row.get("ratio")),
    "bound": lambda row: _times(row.get("bound")),
    "of the bound": lambda row: percent(row.get("share_of_bound")),
    "bound by": lambda row: row.get("bound_by", ""),
    "of the limit": lambda row: percent(row["share_of_limit"] or row.get("baseline_share_of_limit")),
    "GFLOP/s": lambda row: "/".join(f"{rate / 1e9:,.0f}" for rate in row["gemm"]),
    "memory, GB": lambda row: f"{row['peak_rss'] / 1e9:.2f}",
    "of its cores": lambda row: percent(row["cpu_share"]),
}
TRANSFERS: Columns = {
    "case": lambda row: row["case"],
    "sent a step, MB": lambda row: _megabytes(row["payload"]),
    "by the interface, MB": lambda row: _megabytes(row["payload_by_interface"]),
    "all-reduce, MB/s": lambda row: _megabytes(row["bandwidth"]),
    "measured, s": lambda row: _seconds(row["reduce_measured"]),
    "computed, s": lambda row: _seconds(row["reduce_seconds"]),
    "by bytes and link, s": lambda row: _seconds(row["link_seconds"]),
    "waited for, s": lambda row: f"{row['split']['sync']:.2f}",
}


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Plot the tokens per second of each case to `path`; a red mark shows the upper bound, if it is known.

    rows: the result of `compare`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(rows))
    colours = ["0.6" if row["ranks"] == 1 else "tab:blue" for row in rows]
    axes.barh(positions, [row["tok_per_s"] for row in rows], color=colours)
    for y, row in zip(positions, rows, strict=True):
        if "bound" in row:
            bound = row["tok_per_s"] / row["share_of_bound"]
            axes.plot([bound, bound], [y - 0.4, y + 0.4], color="tab:red")
    axes.set_yticks(list(positions), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second; red: the bound of the processor or the link")
    figure.savefig(path)


def log(uri: str, folder: Path, rows: Sequence[Row]) -> None:
    """Create a run on the MLflow server at `uri` with the figures of each case and the files of the report.

    folder: the folder with bench.md, bench.json and bench.png. rows: the result of `compare`.
    """
    import mlflow

    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # it would be the coordinator's own address
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("nanofleet-bench")
    with mlflow.start_run(run_name="bench"):
        for row in rows:
            found = {f"{row['case']}/{name}": row.get(name) for name in LOGGED}
            mlflow.log_metrics({name: value for name, value in found.items() if value is not None})
        for name in ("bench.md", REPORT, "bench.png"):
            mlflow.log_artifact(str(folder / name))


if __name__ == "__main__":
    sys.exit(main())
