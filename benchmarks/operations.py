"""Measures where the seconds of a step of one process go, and which share of its roofline limit is in reach.

    python -m benchmarks.operations                      depth 8, 2 rows of 1,024 tokens, all cores
    python -m benchmarks.operations --depth 4 --steps 2  quick

For float32 and bfloat16 it prints a table of the operations that take the most time. The weights are random;
they take the same time as trained ones. Of the roofline limit, a step could reach at most the printed share,
if every GEMM had the rate of one large GEMM and all other operations took as long as they do now.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.bench.limits import count_operations, measure
from trainer.distributed.process_group import Collectives
from trainer.formatting import markdown_table
from trainer.host.gemm_library import choose_library
from trainer.host.memory import keep_freed_memory
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import build_optimizer
from trainer.sync.mode import SyncMode
from trainer.sync.modes import make_sync

VOCAB_SIZE = 32_768
SHOWN = 8  # operations in a table
GEMMS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"}


def step(model: GPT, sync: SyncMode, tokens: torch.Tensor) -> None:
    """A training step of one process. tokens: (rows, tokens + 1), int64."""
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    sync.begin_step(idx.unique())
    with sync.last_backward(targets.numel()):
        model(idx, targets, loss_reduction="sum").backward()
    sync.reduce_gradients(targets.numel())
    sync.step()
    sync.broadcast()


def table(model: GPT, dtype: torch.dtype, rows: int, steps: int) -> str:
    """Train in one dtype; returns a Markdown table of the slowest operations, and text on the roofline limit.

    rows: the number of sequences in a step. steps: the number of timed steps.
    """
    optimizer = build_optimizer(model, 0.0, 0.0, 0.0, 0.0, 0.0)
    model.compute_dtype = optimizer.compute_dtype = dtype
    optimizer.set_schedule(1.0, 0.95, 1.0)
    sync = make_sync("dense", Collectives(RankEnv(), []), model, optimizer)
    tokens = torch.randint(VOCAB_SIZE, (rows, model.config.sequence_len + 1))
    step(model, sync, tokens)  # allocates memory
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step(model, sync, tokens)
        times.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(model, sync, tokens)
    seconds = {each.key: each.self_cpu_time_total / 1e6 for each in profiled.key_averages()}
    whole, scale = statistics.median(times), statistics.median(times) / sum(seconds.values())
    of_gemms = scale * sum(value for name, value in seconds.items() if name in GEMMS)
    rates = measure(dtype, torch.device("cpu"))
    owned = [matrix.name for matrix in optimizer.muon_parameters()]
    work = count_operations(model, optimizer, owned, rows * model.config.sequence_len)
    limit, others = work.seconds(rates), whole - of_gemms
    at_rate = (work.model_flops + work.muon_flops) / rates.gemm
    listed = sorted(seconds, key=lambda name: -seconds[name])[:SHOWN]
    lines = [
        [name, f"{scale * seconds[name]:.3f}", f"{seconds[name] / sum(seconds.values()):.0%}"]
        for name in listed
    ]
    name = str(dtype).removeprefix("torch.")
    return (
        f"{markdown_table([('operation', 's a step', 'share'), *lines])}\n\n"
        f"{name}: a step takes {whole:.2f} s, {limit / whole:.0%} of its roofline limit of {limit:.2f} s. "
        f"GEMMs take {of_gemms:.2f} s; at {rates.gemm / 1e9:.0f} GFLOP/s they would take {at_rate:.2f} s. "
        f"All others take {others:.2f} s. In reach: {limit / (at_rate + others):.0%}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    keep_freed_memory()
    choose_library()
    model = GPT(GPTConfig.from_depth(args.depth, VOCAB_SIZE))
    model.init_weights()
    for dtype in (torch.float32, torch.bfloat16):
        print(table(model, dtype, args.rows, args.steps), flush=True)


if __name__ == "__main__":
    main()
