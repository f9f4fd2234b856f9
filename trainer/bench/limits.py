"""The roofline limit of a step: its operations over the measured GEMM rate and copy bandwidth.

    work = work_of(model, optimizer, owned, tokens)
    rates = measure(compute_dtype, device)               # in the process that steps, with its threads
    seconds = work.seconds(rates)

The limit counts what cannot be left out: matrix products of the model and of Muon at the rate of one large
product, and the bytes that AdamW reads and writes at the rate of a copy. Nothing else, so it is not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import POLAR_EXPRESS, MuonAdamW, polar_express_flops

GEMM_SHAPE = (2048, 512, 2048)  # tokens of two rows, the width of depth 8, its hidden layer
COPY_BYTES = 128 * 2**20  # beyond any cache
MEASURING_SECONDS = 0.5  # for each of the two
REPEATS = 5  # at least
ADAMW_PASSES = 7  # reads weight, gradient and both moments; writes weight and both moments


@dataclass(frozen=True)
class Rates:
    """Measured rates of a process: GEMMs in FLOP/s, copies in bytes/s with reads and writes counted."""

    gemm: float
    copy: float

    @classmethod
    def median(cls, rates: Sequence[Rates]) -> Rates:
        """The middle of what was measured between steps, as the time of a step is the middle of theirs."""
        return cls(median(r.gemm for r in rates), median(r.copy for r in rates))


@dataclass(frozen=True)
class StepOperations:
    """The operations of one rank in a step.

    `muon_flops` are five iterations over each whole matrix, as the optimizer is defined; `muon_flops_done`
    are those of the shorter way that wide matrices take in float32.
    """

    model_flops: int
    muon_flops: int
    muon_flops_done: int
    adamw_bytes: int

    def seconds(self, rates: Rates) -> float:
        """The roofline limit: no step is shorter."""
        return (self.model_flops + self.muon_flops) / rates.gemm + self.adamw_bytes / rates.copy

    def seconds_of_done(self, rates: Rates) -> float:
        """The limit of the operations that are really done; a little less."""
        return (self.model_flops + self.muon_flops_done) / rates.gemm + self.adamw_bytes / rates.copy


def count_operations(model: GPT, optimizer: MuonAdamW, owned: Collection[str], tokens: int) -> StepOperations:
    """The work of a rank that reads so many tokens of a step and steps the matrices of these names."""
    matrices = optimizer.muon_parameters()
    mine = [matrix for matrix in matrices if matrix.name in owned]
    apart = {id(matrix.parameter) for matrix in matrices}
    shapes = [(m.parameter.size(0), m.parameter.size(1)) for m in mine]
    dtype = optimizer.compute_dtype or torch.float32
    return StepOperations(
        model_flops=model.flops_per_token() * tokens,
        muon_flops=sum(iterated_flops(rows, cols) for rows, cols in shapes),
        muon_flops_done=sum(polar_express_flops(rows, cols, dtype) for rows, cols in shapes),
        adamw_bytes=sum(_adamw_bytes(p) for p in model.parameters() if id(p) not in apart),
    )


def iterated_flops(rows: int, cols: int) -> int:
    """Polar Express on the matrix itself."""
    m, n = min(rows, cols), max(rows, cols)
    return len(POLAR_EXPRESS) * (4 * m * m * n + 2 * m**3)


def _adamw_bytes(parameter: nn.Parameter) -> int:
    return ADAMW_PASSES * parameter.numel() * parameter.element_size()


def measure(dtype: torch.dtype, device: torch.device) -> Rates:
    """The best of several, in about a second, with all threads of this process."""
    rows, inner, cols = GEMM_SHAPE
    a = torch.ones(rows, inner, dtype=dtype, device=device)
    b = torch.ones(inner, cols, dtype=dtype, device=device)
    out = torch.empty(rows, cols, dtype=dtype, device=device)
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    gemm = _shortest(lambda: torch.mm(a, b, out=out), device)
    copy = _shortest(lambda: target.copy_(source), device)
    return Rates(2 * rows * inner * cols / gemm, 2 * COPY_BYTES / copy)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the shortest run; the first one, which also prepares, does not count."""
    finish = torch.cuda.synchronize if device.type == "cuda" else _nothing
    work()
    finish()
    best, began, repeats = float("inf"), time.perf_counter(), 0
    while repeats < REPEATS or time.perf_counter() - began < MEASURING_SECONDS:
        started = time.perf_counter()
        work()
        finish()
        best = min(best, time.perf_counter() - started)
        repeats += 1
    return best


def _nothing() -> None:
    """A CPU has finished when the call returns."""
