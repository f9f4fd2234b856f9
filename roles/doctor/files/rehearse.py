"""One host's part of a rehearsal: how fast it multiplies, then all-reduces over Gloo with the others.

Runs with the installed environment's Python, its arguments as one JSON object in argv[1]:
    hosts, rank, master (address), port, rounds (lists of pairs of ranks), seconds (of each measurement),
    join and timeout (seconds to meet and of a collective), limit (seconds after which an alarm ends it)
Prints one JSON object: hosts, torch, gemm_gflops by dtype, allreduce_mbit (all hosts), pairs by "a-b", error.
It writes no file.
"""

import datetime
import json
import os
import signal
import sys
import time


def gemm(torch, dtype, seconds):
    """GFLOP/s of a matrix product, as large as fits the time: emulated bfloat16 is a hundred times slower."""
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


def goodput(torch, dist, group, size, seconds):
    """Mbit/s each rank sends in all-reduces of fp32 for about so many seconds; ranks agree on how often."""
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
    return round(8e-6 * sent / (time.monotonic() - started), 1)


def rehearse(torch, dist, p):
    """The rates of all hosts together and of each pair."""
    timeout = datetime.timedelta(seconds=p["timeout"])
    store = dist.TCPStore(
        p["master"], p["port"], len(p["hosts"]), p["rank"] == 0, timeout=datetime.timedelta(seconds=p["join"])
    )
    dist.init_process_group("gloo", store=store, rank=p["rank"], world_size=len(p["hosts"]), timeout=timeout)
    all_mbit = goodput(torch, dist, None, len(p["hosts"]), p["seconds"])
    pairs = {}
    for pairs_of_round in p["rounds"] if len(p["hosts"]) > 2 else []:
        groups = {tuple(pair): dist.new_group(pair, timeout=timeout) for pair in pairs_of_round}
        for pair, group in groups.items():
            if p["rank"] in pair:
                pairs["-".join(map(str, pair))] = goodput(torch, dist, group, 2, p["seconds"])
        dist.barrier()
    if len(p["hosts"]) == 2:
        pairs["0-1"] = all_mbit
    dist.barrier()
    return {"allreduce_mbit": all_mbit, "pairs": pairs}


def main():
    p = json.loads(sys.argv[1])
    signal.alarm(int(p["limit"]))
    said = {"hosts": p["hosts"], "gemm_gflops": {}, "allreduce_mbit": None, "pairs": {}, "error": ""}
    try:
        import torch
        import torch.distributed as dist

        torch.set_flush_denormal(True)
        said["torch"] = torch.__version__
        for name in ("float32", "bfloat16"):
            said["gemm_gflops"][name] = gemm(torch, getattr(torch, name), p["seconds"])
        if len(p["hosts"]) > 1:
            said.update(rehearse(torch, dist, p))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said["error"] = lines[0][:300]
    print(json.dumps(said), flush=True)
    # Gloo's threads may wait for a peer that is lost.
    os._exit(0)


if __name__ == "__main__":
    main()
