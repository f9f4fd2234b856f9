"""The GEMM rate of one core by number format, measured in about 0.15 s."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

# Cubes of rising size and the seconds given to each: a format that is emulated gives itself away in the first
# ones, and a fast one needs the last to show what it does in training.
SIZES = {128: 0.02, 256: 0.02, 512: 0.1}
REPEATS = 3  # at least
LONGEST = 0.2  # seconds: a size that would take longer is left out


def gemm_rates(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """FLOP/s of one core's matrix product in each format, all of one size; the best of several, in turn.

    One core, its own time and in turn, because on a busy host several threads wait for each other more than
    they multiply, and what else is there must meet all formats alike. The number of threads is as before
    afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(dtypes)
    finally:
        torch.set_num_threads(threads)


def _measure(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    best = dict.fromkeys(dtypes, 0.0)
    largest = 0
    for size, budget in SIZES.items():
        if (REPEATS + 1) * sum(best.values()) * (size / max(largest, 1)) ** 3 > LONGEST:
            break
        largest = size
        factors = {dtype: torch.ones(size, size, dtype=dtype) for dtype in dtypes}
        for factor in factors.values():
            factor @ factor  # the first product of a shape also prepares its kernel
        best = dict.fromkeys(dtypes, float("inf"))
        began, repeats = time.perf_counter(), 0
        while repeats < REPEATS or time.perf_counter() - began < budget:
            for dtype, factor in factors.items():
                started = time.thread_time()
                factor @ factor
                best[dtype] = min(best[dtype], time.thread_time() - started)
            repeats += 1
    return {dtype: 2 * largest**3 / seconds for dtype, seconds in best.items()}
