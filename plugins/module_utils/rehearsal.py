# SPDX-License-Identifier: MIT
"""One host's part of a rehearsal: its GEMM rate, then all-reduces over Gloo with the other hosts.

Used on the hosts by the module doctor_rehearsal, under the Python of the run's environment.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any


def gemm(torch: Any, dtype: Any, seconds: float) -> float:
    """GEMM rate of a dtype in GFLOP/s, measured for `seconds` seconds.

    The product grows to at most 2048 x 512 x 2048 while it takes less than an eighth of the time: emulated
    bfloat16 is a hundred times slower.
    """
    m, k, n = 256, 512, 2048
    best = 0.0
    while True:
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        started = time.monotonic()
        a @ b
        first = time.monotonic() - started
        if first < seconds / 8 and m < 2048:
            m *= 2
            continue
        ends = time.monotonic() + seconds
        took = first
        while time.monotonic() < ends:
            started = time.monotonic()
            a @ b
            took = min(took, time.monotonic() - started)
        best = max(best, 2e-9 * m * k * n / took)
        return round(best, 1)


def effective_bandwidth(torch: Any, dist: Any, group: Any, size: int, seconds: float) -> float:
    """Mbit/s that each rank sends in all-reduces of float32, measured for about `seconds` seconds.

    size: number of ranks in `group`. All ranks use the same tensor size and number of all-reduces. Raises
    RuntimeError if a sum is wrong.
    """
    ones = torch.ones(1 << 18)
    dist.all_reduce(ones, group=group)
    if not bool((ones == size).all()):
        raise RuntimeError(f"the sum of {size} ones came out as {float(ones[0])}")
    started = time.monotonic()
    dist.all_reduce(torch.zeros(1 << 18), group=group)
    # The slowest rank's clock decides for all; at most 64 MiB at a time.
    once = torch.tensor([time.monotonic() - started])
    dist.all_reduce(once, op=dist.ReduceOp.MAX, group=group)
    per_element = max(float(once), 1e-6) / (1 << 18)
    tensor = torch.zeros(int(min(1 << 24, max(1 << 18, seconds / 3 / per_element))))
    times = int(min(20, max(1, seconds / (per_element * tensor.numel()))))
    started = time.monotonic()
    for _ in range(times):
        dist.all_reduce(tensor, group=group)
    sent = 4 * tensor.numel() * times * 2 * (size - 1) / size
    return float(round(8e-6 * sent / (time.monotonic() - started), 1))


def all_reduces(torch: Any, dist: Any, part: Mapping[str, Any]) -> dict[str, Any]:
    """Effective bandwidths in Mbit/s: {"allreduce_mbit" (all hosts), "pairs" ({"A-B": of ranks A and B})}.

    part: the options of the module doctor_rehearsal.
    """
    timeout = datetime.timedelta(seconds=part["timeout"])
    size = len(part["hosts"])
    store = dist.TCPStore(
        part["master"],
        part["port"],
        size,
        part["rank"] == 0,
        timeout=datetime.timedelta(seconds=part["join_timeout"]),
    )
    dist.init_process_group("gloo", store=store, rank=part["rank"], world_size=size, timeout=timeout)
    all_mbit = effective_bandwidth(torch, dist, None, size, part["seconds"])
    pairs = {}
    for pairs_of_round in part["rounds"] if size > 2 else []:
        groups = {tuple(pair): dist.new_group(pair, timeout=timeout) for pair in pairs_of_round}
        for pair, group in groups.items():
            if part["rank"] in pair:
                pairs["-".join(map(str, pair))] = effective_bandwidth(torch, dist, group, 2, part["seconds"])
        dist.barrier()
    if size == 2:
        pairs["0-1"] = all_mbit
    dist.barrier()
    return {"allreduce_mbit": all_mbit, "pairs": pairs}


def rehearse(part: Mapping[str, Any]) -> dict[str, Any]:
    """hosts, torch, gemm_gflops by dtype, allreduce_mbit (all hosts), pairs by "A-B", error (or "").

    part: the options of the module doctor_rehearsal.
    """
    found: dict[str, Any] = {
        "hosts": part["hosts"], "gemm_gflops": {}, "allreduce_mbit": None, "pairs": {}, "error": "",
    }  # fmt: skip
    try:
        import torch
        import torch.distributed as dist

        torch.set_flush_denormal(True)
        found["torch"] = torch.__version__
        for name in ("float32", "bfloat16"):
            found["gemm_gflops"][name] = gemm(torch, getattr(torch, name), part["seconds"])
        if len(part["hosts"]) > 1:
            found.update(all_reduces(torch, dist, part))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        found["error"] = lines[0][:300]
    return found


def rehearse_in_child(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rehearse` in a child process; None if it did not end within part["limit"] seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(part["limit"]))
            with os.fdopen(writer, "w") as pipe:
                json.dump(rehearse(part), pipe)
        finally:
            # Gloo's threads may wait for a peer that is lost.
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else None
