"""Writes figures to docs/recorded/, from which scripts.docs_figures fills the pages.

bench.json has those of a complete `make bench`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases import GROUPS, LINK_MBIT, Group

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "docs" / "recorded"
RECORD = RECORDED / "bench.json"
SHOWN = (
    ("1gbit", "dense-4096-float32"),
    ("1gbit", "exact-4096-float32"),
    ("1gbit", "fast-4096-float32"),
    ("1gbit", "fast-4096-bfloat16"),
    ("1gbit", "exact-16384-float32"),
    ("1gbit", "fast-16384-bfloat16"),
    ("100mbit", "local-8192-float32"),
    ("uneven", "exact-16384-float32-auto"),
)
"""(Group, case) of the recorded cases of two hosts, in the order of the documentation's table."""


def record(
    host: Mapping[str, Any],
    rows: Mapping[str, Mapping[str, Any]],
    machine: str,
) -> dict[str, Any]:
    """The content of bench.json from the results of a complete `make bench`.

    host: {case: result of one process}. rows: {"GROUP/CASE": row of `trainer.bench.report.compare`}.
    machine: text about the hardware. Raises KeyError, with the name of the case, if a case was not measured.
    """
    groups = {group.name: group for group in GROUPS}
    return {
        **origin("make bench"),
        "machine": machine,
        "one_process": [_one_process(host[name]) for name in ("host-float32", "host-bfloat16")],
        "two_hosts": [_two_hosts(rows[f"{group}/{case}"], groups[group]) for group, case in SHOWN],
    }


def _one_process(result: Mapping[str, Any]) -> dict[str, Any]:
    rank = result["ranks"][0]
    return {
        "dtype": rank["compute_dtype"],
        "tokens": result["tokens"],
        "step_seconds": round(result["step_seconds"], 2),
        "tok_per_s": round(result["tok_per_s"]),
        "share_of_limit": round(result["share_of_limit"], 3),
        "peak_gb": round(rank["peak_rss"] / 1e9, 1),
    }


def _two_hosts(row: Mapping[str, Any], group: Group) -> dict[str, Any]:
    baseline_tokens = row["tokens"] // (row["ranks"] if row["sync"] == "local" else 1)
    payload = row["payload"] / 1e6
    return {
        "sync": row["sync"],
        "dtype": row["format"],
        "tokens": row["tokens"],
        "step_seconds": round(row["step_seconds"], 2),
        "baseline_seconds": round(baseline_tokens * row["ratio"] / row["tok_per_s"], 2),
        "baseline_tokens": baseline_tokens,
        "factor": round(row["ratio"], 2),
        "over_ddp": round(row["over_ddp"], 2) if row.get("over_ddp") else None,
        "payload_mb": round(payload) if payload >= 10 else round(payload, 1),
        "link_mbit": LINK_MBIT[group.link],
        "slow_second": group.slow_second,
    }


def origin(command: str) -> dict[str, str]:
    """Command, date and commit of figures that are recorded now."""
    commit = ["git", "rev-parse", "--short", "HEAD"]
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the record `content` to `path` as JSON.

    Each value, and each case of a list, is on a line of its own, so that diffs are readable.
    """
    lines = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(case)}" for case in value) + "\n]"
        lines.append(f'"{name}": {text}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
