"""Made-up results of benchmark cases."""

from __future__ import annotations

from typing import Any

from trainer.bench import SCHEMA


def measured(tokens: int, seconds: float, ranks: int = 1, sync: str = "", **more: Any) -> dict[str, Any]:
    names = ("a", "b")[:ranks]
    shares = more.pop("shares", [tokens // 1024 // ranks] * ranks)
    rates = {"gemm": 1e11, "copy": 1e10}
    of_rank = {
        "compute_dtype": "float32",
        "device": "cpu",
        "cpu": "a CPU",
        "processor": "x",
        "threads": 1,
        "peak_rss": 3e9,
        "cpu_share": 1.0,
        "rates": rates,
        "rates_all": [rates, rates],
        "counted": 180e6,
        "counted_mean": 180e6,
        "sent": 190e6,
        "sent_mean": 190e6,
        "reduce_bandwidth": 100e6 if ranks > 1 else None,
        "link_mbit": None,
    } | more.pop("of_rank", {})
    return {
        "schema": SCHEMA,
        "depth": 8,
        "sequence_len": 1024,
        "tokens": tokens,
        "shares": shares,
        "world_size": ranks,
        "hosts": list(names),
        "sync": sync,
        "steps": 3,
        "step_seconds": seconds,
        "step_seconds_mean": more.get("mean", seconds),
        "split": dict.fromkeys(("data", "forward", "backward", "sync", "optimizer"), 0.1),
        "share_of_limit": 0.9,
        "torch": "2",
        "ranks": [
            {**of_rank, "rank": rank, "host": host, "rows": shares[rank]} for rank, host in enumerate(names)
        ],
    }
