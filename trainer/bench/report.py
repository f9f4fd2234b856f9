"""The report of several measurements: throughput, ratio to the single-host baseline, and its upper bound.

python -m trainer.bench.report FOLDER --out OUT [--link-mbit 1000] [--tracker-uri http://tower:5000]

FOLDER has CASE.json for each benchmark case, as `python -m trainer bench` writes it. OUT gets bench.md,
bench.json and bench.png.

The baseline has the same tokens per step as all ranks together; for `local` it has those of one rank. The
bound of the ratio is baseline step / max(baseline step with the rows of one rank, bytes sent / bandwidth of
an all-reduce).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.bench import SCHEMA
from trainer.bench.text import markdown, percent
from trainer.config import number_from_zero
from trainer.data.files import write_json, write_whole
from trainer.formatting import counted

Result = dict[str, Any]
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
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
    write_json(args.out / "bench.json", {"schema": 1, "rows": rows, "cases": results})
    draw(args.out / "bench.png", rows)
    print(text)
    if args.tracker_uri:
        log(args.tracker_uri, args.out, rows)
    return 0


# -- the figures ---------------------------------------------------------------------------------------------


def load(folder: Path) -> tuple[dict[str, Result], list[str]]:
    """Read FOLDER/*.json. Returns (results by case, cases whose files have another SCHEMA)."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    other = [name for name, result in results.items() if result.get("schema") != SCHEMA]
    return {name: result for name, result in results.items() if name not in other}, other


def compare(results: Mapping[str, Result], link_mbit: float = 0.0) -> list[Row]:
    """One row per benchmark case, with ratio and bound if the single-host baseline was measured too.

    link_mbit: rate of the link in Mbit/s; 0: as the network cards report it.
    """
    return [_row(name, result, list(results.values()), link_mbit) for name, result in results.items()]


def _row(name: str, result: Result, results: Sequence[Result], link_mbit: float) -> Row:
    ranks = result["ranks"]
    together = result["world_size"] > 1
    # A sync round occurs once in many steps, so the time of a step is a mean.
    local = result["sync"] == "local"
    seconds = result["step_seconds_mean" if local else "step_seconds"]
    row: Row = {
        "case": name,
        "ranks": result["world_size"],
        "hosts": sorted(set(result["hosts"])),
        "tokens": result["tokens"],
        "shares": result["shares"],
        "sync": result["sync"],
        "format": "/".join(dict.fromkeys(rank["compute_dtype"] for rank in ranks)),
        "device": ranks[0]["device"],
        "step_seconds": seconds,
        "predicted_seconds": result.get("predicted_seconds"),
        "steps": result["steps"],
        "tok_per_s": result["tokens"] / seconds,
        "split": result["split"],
        "share_of_limit": result["share_of_limit"] if not together else None,
        "peak_rss": max(rank["peak_rss"] for rank in ranks),
        "gemm": [rank["rates"]["gemm"] for rank in ranks],
        "cpu_share": min(rank["cpu_share"] for rank in ranks),
    }
    if not together:
        return row
    suffix = "_mean" if local else ""
    payload = max(rank[f"counted{suffix}"] for rank in ranks)
    goodput = min(rank["reduce_goodput"] for rank in ranks)
    sent = [rank[f"sent{suffix}"] for rank in ranks if rank[f"sent{suffix}"] is not None]
    link = link_mbit or min((rank.get("link_mbit") or 0 for rank in ranks), default=0)
    if len(row["hosts"]) == 1:  # ranks of one host use no link
        sent, link = [], 0
    row |= {
        "payload": payload,
        "payload_by_interface": max(sent, default=None),
        "goodput": goodput,
        "reduce_seconds": payload / goodput,
        "link_seconds": payload * 8 / (link * 1e6) if link else None,
    }
    length = result["sequence_len"]
    singles = [one for one in results if one["world_size"] == 1 and _comparable(one, result)]
    tokens = result["tokens"] // (result["world_size"] if local else 1)
    baseline = _baseline_seconds(singles, tokens, ranks[0]["host"])
    if baseline is None:
        return row
    at_share = [
        _baseline_seconds(singles, rank["rows"] * length, rank["host"])
        or _interpolated(singles, rank["rows"] * length)
        for rank in ranks
    ]
    baseline_rate = tokens / baseline
    row["ratio"] = row["tok_per_s"] / baseline_rate
    if all(at_share):
        least = max(max(s for s in at_share if s), payload / goodput)
        row["bound"] = result["tokens"] / least / baseline_rate
        row["share_of_bound"] = row["ratio"] / row["bound"]
        row["bound_by"] = "the link" if payload / goodput >= least else "the processor"
    row["baseline_share_of_limit"] = next(
        (one["share_of_limit"] for one in singles if one["step_seconds"] == baseline), None
    )
    return row


def _comparable(one: Result, other: Result) -> bool:
    same = ("depth", "sequence_len")
    formats = {rank["compute_dtype"] for rank in other["ranks"]}
    rank = one["ranks"][0]
    return (
        all(one[key] == other[key] for key in same)
        and rank["compute_dtype"] in formats
        and rank["device"] == other["ranks"][0]["device"]
    )


def _baseline_seconds(singles: Sequence[Result], tokens: int, host: str) -> float | None:
    """Seconds of a step of `tokens` tokens of one process: on `host`, else on any host, else None."""
    fitting = [one for one in singles if one["tokens"] == tokens]
    there = [one for one in fitting if one["hosts"] == [host]]
    return float((there or fitting)[0]["step_seconds"]) if fitting else None


def _interpolated(singles: Sequence[Result], tokens: int) -> float | None:
    """Seconds of a step of `tokens` tokens, on the line through two measurements of one host; else None.

    The two are those with the fewest and the most tokens.
    """
    if not singles:
        return None
    host = singles[0]["hosts"]
    known = sorted((one["tokens"], one["step_seconds"]) for one in singles if one["hosts"] == host)
    (low, first), (high, last) = known[0], known[-1]
    if low == high:
        return None
    return float(first + (tokens - low) * (last - first) / (high - low))


# -- for people ----------------------------------------------------------------------------------------------


def as_markdown(results: Mapping[str, Result], rows: Sequence[Row]) -> str:
    """The report as Markdown: facts of the hosts, a table of throughput and one of transfers."""
    first = next(iter(results.values()))
    facts: dict[str, str] = {}
    for result in results.values():
        for rank in result["ranks"]:
            facts.setdefault(
                rank["host"],
                f"{rank['host']}: {rank['cpu'] or rank['processor']}, {counted(rank['threads'], 'thread')}",
            )
    lines = [
        f"Depth {first['depth']}, rows of {first['sequence_len']:,} tokens, torch {first['torch']}. "
        + "; ".join(facts.values())
        + ".",
        "",
        _throughput(rows),
    ]
    together = [row for row in rows if row["ranks"] > 1]
    if together:
        lines += ["", _wire(together)]
    return "\n".join(lines)


def _throughput(rows: Sequence[Row]) -> str:
    head = ["case", "hosts", "rows", "format", "step, s", "predicted, s", "of it sync, s", "tok/s"]
    head += ["to baseline", "bound", "of the bound", "bound by", "of the limit", "GFLOP/s"]
    head += ["memory, GB", "of its cores"]
    table = [head]
    for row in rows:
        table.append(
            [
                row["case"],
                ", ".join(row["hosts"]),
                "/".join(map(str, row["shares"])),
                row["format"],
                f"{row['step_seconds']:.2f}",
                _predicted(row),
                f"{row['split']['sync']:.2f}",
                f"{row['tok_per_s']:,.0f}",
                _times(row.get("ratio")),
                _times(row.get("bound")),
                _share(row.get("share_of_bound")),
                row.get("bound_by", ""),
                _share(row["share_of_limit"] or row.get("baseline_share_of_limit")),
                "/".join(f"{rate / 1e9:,.0f}" for rate in row["gemm"]),
                f"{row['peak_rss'] / 1e9:.2f}",
                percent(row["cpu_share"]),
            ]
        )
    return markdown(table)


def _wire(rows: Sequence[Row]) -> str:
    head = ["case", "sent a step, MB", "by the interface, MB", "all-reduce, MB/s", "takes, s"]
    head += ["by bytes and link, s", "waited for, s"]
    table = [head]
    for row in rows:
        seen, link = row["payload_by_interface"], row["link_seconds"]
        table.append(
            [
                row["case"],
                f"{row['payload'] / 1e6:,.1f}",
                f"{seen / 1e6:,.1f}" if seen is not None else "",
                f"{row['goodput'] / 1e6:,.1f}",
                f"{row['reduce_seconds']:.2f}",
                f"{link:.2f}" if link is not None else "",
                f"{row['split']['sync']:.2f}",
            ]
        )
    return markdown(table)


def _predicted(row: Row) -> str:
    """Text: the predicted seconds of a step and their deviation from the measured ones; "" without them."""
    seconds = row["predicted_seconds"]
    if not seconds:
        return ""
    return f"{seconds:.2f} ({round(100 * (seconds / row['step_seconds'] - 1)):+d} %)"


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""


def _share(value: float | None) -> str:
    return percent(value) if value is not None else ""


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Plot tokens per second of each case, with the bound as a red mark if it is known."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    colours = ["0.6" if row["ranks"] == 1 else "tab:blue" for row in rows]
    axes.barh(places, [row["tok_per_s"] for row in rows], color=colours)
    for place, row in zip(places, rows, strict=True):
        if "bound" in row:
            axes.plot(
                [row["tok_per_s"] / row["share_of_bound"]] * 2, [place - 0.4, place + 0.4], color="tab:red"
            )
    axes.set_yticks(list(places), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second; red: the bound of the processor or the link")
    figure.savefig(path)


def log(uri: str, folder: Path, rows: Sequence[Row]) -> None:
    """Create a run on the MLflow server at `uri` with the figures of each case and the report's files."""
    import mlflow

    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # it would be the coordinator's own address
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("nanofleet-bench")
    with mlflow.start_run(run_name="bench"):
        for row in rows:
            names = (
                "tok_per_s",
                "step_seconds",
                "ratio",
                "bound",
                "share_of_bound",
                "payload",
                "reduce_seconds",
            )
            figures = {f"{row['case']}/{name}": row[name] for name in names if row.get(name) is not None}
            mlflow.log_metrics(figures)
        for name in ("bench.md", "bench.json", "bench.png"):
            mlflow.log_artifact(str(folder / name))


if __name__ == "__main__":
    sys.exit(main())
