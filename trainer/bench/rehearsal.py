"""Measure GEMM rates and all-reduces over Gloo for some seconds before a run, and predict a step of the run.

Prints one JSON object a line; the last line is the result. All hosts run it at the same time.
GLOO_SOCKET_IFNAME and OMP_NUM_THREADS apply. Example:

    python -m trainer.bench.rehearsal '{"hosts": ["tower", "laptop"], "rank": 0, "master": "10.0.0.1",
                                        "port": 29500, "rounds": [[[0, 1]]]}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.bench.step_prediction import predict, sample_speed
from trainer.config import RunConfig
from trainer.data import VOCAB_SIZE
from trainer.distributed.process_group import CPU, Collectives
from trainer.host.gemm import gemm_rate, gemm_rates
from trainer.host.gemm_library import choose_library
from trainer.host.numerics import cpu_format, limit_threads, name_of
from trainer.host.rank_env import RankEnv
from trainer.placement.microbenchmark import Link, Speed, measure_delay, measure_link, slowest_link
from trainer.run_plan import make_plan

JOIN_TIMEOUT = timedelta(seconds=20)
CONNECT_TIMEOUT = timedelta(seconds=4)  # Gloo gives up connecting after five times this.
REDUCE_TIMEOUT = timedelta(seconds=16)
SPEEDS_TIMEOUT = timedelta(seconds=20)  # for the slowest host to measure its speed
SLOW = 5e9  # FLOP/s of one core, as of an emulated bfloat16: a large GEMM would take many seconds


class Ranks(Collectives):
    """The ranks that all-reduce together in the rehearsal, which measures hosts and network before any run.

    world_size: the number of ranks. group: their process group; None: all ranks of the rehearsal. The
    constructor tests one all-reduce, and raises RuntimeError if its sum is wrong.
    """

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

    def link(self) -> Link:
        """Measure all-reduces between the ranks.

        Of the result, bandwidth (bytes/s) is the mean over the ranks, and latency (s) that of this rank.
        """
        link = measure_link(self, CPU)
        assert link is not None, "measured with two ranks at least"
        return link


def mbit(link: Link) -> float:
    """The bandwidth of a link in Mbit/s."""
    return round(8e-6 * link.bandwidth, 1)


def gemm_gflops(rates: Mapping[torch.dtype, float]) -> dict[str, float]:
    """Measure GEMM rates with all threads of this process; returns {name of the dtype: rate in GFLOP/s}.

    rates: {dtype to measure: GEMM rate of one core in FLOP/s}. A dtype with a low rate gets a small GEMM.
    """
    found = {}
    for dtype, one_core in rates.items():
        rows = 2048 if one_core > SLOW else 64
        found[name_of(dtype)] = round(1e-9 * gemm_rate((rows, 512, 2048), dtype, CPU), 1)
    return found


def join(part: Mapping[str, Any]) -> dist.TCPStore:
    """Connect to the rendezvous store and join the process group of all hosts; returns the store.

    part: as for `rehearse`.
    """
    rank, size = part["rank"], len(part["hosts"])
    store = dist.TCPStore(part["master"], part["port"], size, rank == 0, timeout=JOIN_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECT_TIMEOUT)
    return store


def all_reduces(part: Mapping[str, Any]) -> tuple[Link, dict[str, float]]:
    """Measure all-reduces of all hosts together and of pairs of hosts.

    Returns (link of all hosts, {"A-B": effective bandwidth between the ranks A and B in Mbit/s}). The dict
    has the pairs that contain this rank. part: as for `rehearse`.
    """
    rank, size = part["rank"], len(part["hosts"])
    whole = Collectives(RankEnv(rank=rank, world_size=size), [])  # of the default process group
    link = replace(Ranks(size).link(), delay=measure_delay(whole))
    pairs = {"0-1": mbit(link)} if size == 2 else {}
    for pairs_of_round in part["rounds"] if size > 2 else []:
        groups = [(pair, dist.new_group(pair, timeout=CONNECT_TIMEOUT)) for pair in pairs_of_round]
        for pair, group in groups:
            if rank in pair:
                pairs["-".join(map(str, pair))] = mbit(Ranks(2, group).link())
        dist.barrier()
    dist.barrier()
    return link, pairs


def predicted_step(
    part: Mapping[str, Any],
    store: dist.Store,
    link: Link,
    rates: Mapping[torch.dtype, float],
    gflops: Mapping[str, float],
) -> dict[str, Any] | None:
    """The predicted step of the run (see step_prediction) on rank 0; None on other ranks. All ranks call it.

    part: as for `rehearse`. store: the rendezvous store. link: the link of all hosts. rates: {dtype: GEMM
    rate of one core in FLOP/s}. gflops: {name of the dtype: GEMM rate of all threads in GFLOP/s}. Raises
    ConfigError if the settings of the run do not fit these hosts. Raises RuntimeError if a rank publishes no
    speed in time, or if all ranks would compute on GPUs.
    """
    hosts, config = part["hosts"], RunConfig.from_strings(part.get("config") or {})
    plan = make_plan(config, VOCAB_SIZE, len(hosts))
    dtype = cpu_format(config.dtype, rates)[0]
    flops_rate = 1e9 * gflops.get(name_of(dtype), gflops["float32"])
    speed = sample_speed(plan.model, dtype, flops_rate)
    has_gpu = config.device != "cpu" and torch.cuda.is_available()
    store.set(f"speed/{part['rank']}", json.dumps([astuple(speed), astuple(link), has_gpu]))
    if part["rank"]:
        return None
    keys = {host: f"speed/{rank}" for rank, host in enumerate(hosts)}
    try:
        store.wait([*keys.values()], SPEEDS_TIMEOUT)
    except RuntimeError:
        missing = ", ".join(host for host, key in keys.items() if not store.check([key]))
        limit = f"{SPEEDS_TIMEOUT.total_seconds():.0f} s"
        raise RuntimeError(f"no speed was measured within {limit} on {missing}") from None
    measured = [json.loads(store.get(key)) for key in keys.values()]
    if all(has_gpu for _speed, _link, has_gpu in measured):
        raise RuntimeError("the ranks would compute on GPUs, and only processors were measured")
    links = [Link(*each) for _speed, each, _has_gpu in measured]
    speeds = [Speed(*each) for each, _link, _has_gpu in measured]
    return predict(config, plan, speeds, slowest_link(links), hosts)


def rehearse(part: Mapping[str, Any], report: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure this host together with the other hosts, and call `report` with the results.

    `report` is called before a step is predicted, and again afterwards. With one host, or if the measurement
    fails, it is called once. The dict `part` has the keys
    hosts: names of the hosts, in rank order. rank: rank of this host.
    master, port: address and port of the rendezvous store, on the first host.
    rounds: lists of pairs of ranks; the pairs of a list all-reduce at the same time.
    config: settings of the run, by the names of RunConfig's fields.
    The reported dict has
    hosts: as in `part`. gemm_gflops: {name of the dtype: GFLOP/s of all threads}.
    allreduce_mbit: effective bandwidth of all hosts in Mbit/s; None if it was not measured.
    pairs: {"A-B": effective bandwidth of two ranks in Mbit/s}.
    error: why the measurement failed; "" if it succeeded.
    predicted: on rank 0, the predicted step (see step_prediction); else None.
    prediction_error: why the prediction failed; "" if it succeeded.
    """
    found: dict[str, Any] = {
        "hosts": part["hosts"], "gemm_gflops": {}, "allreduce_mbit": None, "pairs": {}, "error": "",
        "predicted": None, "prediction_error": "",
    }  # fmt: skip
    try:
        torch.set_flush_denormal(True)
        limit_threads()
        choose_library()
        rates = gemm_rates([torch.float32, torch.bfloat16])
        found["gemm_gflops"] = gemm_gflops(rates)
        if len(part["hosts"]) == 1:
            return report(found)
        store = join(part)
        link, found["pairs"] = all_reduces(part)
        found["allreduce_mbit"] = mbit(link)
    except Exception as error:
        found["error"] = first_line(error)
        return report(found)
    report(found)  # a slow host may be killed while it measures its speed
    try:
        found["predicted"] = predicted_step(part, store, link, rates, found["gemm_gflops"])
    except Exception as error:
        found["prediction_error"] = first_line(error)
    report(found)


def first_line(error: Exception) -> str:
    """The first line (300 characters at most) of the message of `error`; its class name if that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


if __name__ == "__main__":
    rehearse(json.loads(sys.argv[1]), lambda found: print(json.dumps(found), flush=True))
    os._exit(0)  # threads of Gloo may wait for a lost peer
