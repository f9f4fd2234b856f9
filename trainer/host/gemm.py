"""Measures GEMM rates: of one core for each number format, or of all torch threads for one shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

# Sizes of square GEMMs and the seconds given to each: an emulated format shows in the first ones, and a fast
# one needs the last to reach its rate in training.
SIZES = {128: 0.02, 256: 0.02, 512: 0.1}
REPEATS = 3  # at least
LONGEST = 0.2  # seconds: a size that would take longer is left out
ONE_SHAPE_SECONDS = 0.5
ONE_SHAPE_REPEATS = 5  # at least


def gemm_rates(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """The GEMM rate of one core in FLOP/s for each number format in `dtypes`: {dtype: rate}.

    A rate is the best of several runs, in CPU time. The runs of the formats alternate, so that other load on
    the host slows all formats alike; all have the same matrix size. On a busy host threads wait for each
    other, so one core and its CPU time are measured. Takes about 0.15 s, and longer if a format is slow. The
    number of torch's threads is restored afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(dtypes)
    finally:
        torch.set_num_threads(threads)


def _measure(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    best = [0.0] * len(dtypes)
    largest = 0
    for size, budget in SIZES.items():
        if (REPEATS + 1) * sum(best) * (size / max(largest, 1)) ** 3 > LONGEST:
            break
        largest = size
        factors = [torch.ones(size, size, dtype=dtype) for dtype in dtypes]
        gemms = [lambda factor=factor: factor @ factor for factor in factors]
        best = shortest_seconds(gemms, budget, REPEATS, time.thread_time)
    return {dtype: 2 * largest**3 / seconds for dtype, seconds in zip(dtypes, best, strict=True)}


def gemm_rate(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    """The rate in FLOP/s of the GEMM of a (rows, inner) and an (inner, cols) matrix, with all torch threads.

    shape: (rows, inner, cols). dtype: number format of the matrices. device: the device that computes. The
    rate is the best of several runs, by wall-clock time.
    """
    rows, inner, cols = shape
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(inner, cols, dtype=dtype, device=device)
    out = torch.empty(rows, cols, dtype=dtype, device=device)
    return 2 * rows * inner * cols / shortest_on(device, lambda: torch.mm(a, b, out=out))


def shortest_on(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the shortest of several runs of the function `work`, by wall-clock time.

    device: the device on which `work` computes. On a GPU, each run ends when the GPU has finished.
    """

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return shortest_seconds([finished], ONE_SHAPE_SECONDS, ONE_SHAPE_REPEATS, time.perf_counter)[0]


def shortest_seconds(
    works: Sequence[Callable[[], object]], budget: float, repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds of the shortest run of each function in `works`, in the order of `works`.

    The functions are called one after the other, again and again, for `budget` seconds of wall-clock time and
    at least `repeats` times each. clock: returns the seconds by which a run is measured, such as
    time.perf_counter. The first run of each function also prepares kernels and does not count.
    """
    for work in works:
        work()
    best = [float("inf")] * len(works)
    began, done = time.perf_counter(), 0
    while done < repeats or time.perf_counter() - began < budget:
        for number, work in enumerate(works):
            started = clock()
            work()
            best[number] = min(best[number], clock() - started)
        done += 1
    return best
