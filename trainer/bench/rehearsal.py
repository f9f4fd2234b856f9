"""Measure GEMM rates and all-reduces over Gloo for a few seconds, before any run; prints one JSON object.

All hosts run it at the same time. GLOO_SOCKET_IFNAME and OMP_NUM_THREADS apply. Example:

    python -m trainer.bench.rehearsal '{"hosts": ["tower", "laptop"], "rank": 0, "master": "10.0.0.1",
                                        "port": 29500, "rounds": [[[0, 1]]]}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.process_group import CPU, Collectives
from trainer.host.gemm import gemm_rate, gemm_rates
from trainer.placement.microbenchmark import measure_link

JOIN_TIMEOUT = timedelta(seconds=20)
CONNECT_TIMEOUT = timedelta(seconds=4)  # Gloo gives up connecting after five times this.
REDUCE_TIMEOUT = timedelta(seconds=16)
SLOW = 5e9  # FLOP/s of one core, as of an emulated bfloat16: a large GEMM would take many seconds


class Ranks(Collectives):
    """All ranks of the rehearsal, or those of one process group of torch.distributed."""

    def __init__(self, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.world_size, self._group = world_size, group
        ones = torch.ones(1 << 18)
        self.all_reduce([ones])
        if not bool((ones == world_size).all()):
            raise RuntimeError(f"the sum of {world_size} ones is {float(ones[0])}")
        dist.distributed_c10d._set_pg_timeout(REDUCE_TIMEOUT, group)

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)

    def mbit(self) -> float:
        """The effective bandwidth of an all-reduce in Mbit/s, the mean over ranks."""
        link = measure_link(self, CPU)
        return round(8e-6 * link.bandwidth, 1) if link else 0.0


def gemm_gflops() -> dict[str, float]:
    """GEMM rates with all threads in GFLOP/s, by dtype: float32 and bfloat16."""
    rates = {}
    for dtype, one_core in gemm_rates([torch.float32, torch.bfloat16]).items():
        rows = 2048 if one_core > SLOW else 64
        rates[str(dtype).removeprefix("torch.")] = round(1e-9 * gemm_rate((rows, 512, 2048), dtype, CPU), 1)
    return rates


def all_reduces(part: Mapping[str, Any]) -> dict[str, Any]:
    """Effective bandwidths in Mbit/s: {"allreduce_mbit" (all hosts), "pairs" (by "A-B", two ranks)}."""
    rank, size = part["rank"], len(part["hosts"])
    store = dist.TCPStore(part["master"], part["port"], size, rank == 0, timeout=JOIN_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECT_TIMEOUT)
    all_mbit = Ranks(size).mbit()
    pairs = {"0-1": all_mbit} if size == 2 else {}
    for pairs_of_round in part["rounds"] if size > 2 else []:
        groups = [(pair, dist.new_group(pair, timeout=CONNECT_TIMEOUT)) for pair in pairs_of_round]
        for pair, group in groups:
            if rank in pair:
                pairs["-".join(map(str, pair))] = Ranks(2, group).mbit()
        dist.barrier()
    dist.barrier()
    return {"allreduce_mbit": all_mbit, "pairs": pairs}


def rehearse(part: Mapping[str, Any]) -> dict[str, Any]:
    """hosts, gemm_gflops, allreduce_mbit, pairs, error ("" if nothing failed).

    part: hosts (in rank order), rank, master (address of the first host), port (of the rendezvous store),
    rounds (lists of pairs of ranks that all-reduce at the same time).
    """
    found: dict[str, Any] = {
        "hosts": part["hosts"], "gemm_gflops": {}, "allreduce_mbit": None, "pairs": {}, "error": "",
    }  # fmt: skip
    try:
        torch.set_flush_denormal(True)
        found["gemm_gflops"] = gemm_gflops()
        if len(part["hosts"]) > 1:
            found.update(all_reduces(part))
    except Exception as error:
        found["error"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return found


if __name__ == "__main__":
    print(json.dumps(rehearse(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # threads of Gloo may wait for a lost peer
