"""The roofline limit of a step: its operations over the measured GEMM rate and copy bandwidth.

    work = work_of(model, optimizer, owned, tokens)
    rates = measure(compute_dtype, device)               # in the process that steps, with its threads
    seconds = work.seconds(rates)

The limit counts the GEMMs of the model and of Muon at the rate of one large GEMM, and the bytes that AdamW
reads and writes at the rate of a copy. It counts nothing else, so no step reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from trainer.host.gemm import gemm_rate, shortest_on
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import POLAR_EXPRESS, MuonAdamW, polar_express_flops

GEMM_SHAPE = (2048, 512, 2048)  # tokens of two rows, the width of depth 8, its hidden layer
COPY_BYTES = 128 * 2**20  # beyond any cache
ADAMW_PASSES = 7  # reads weight, gradient and both moments; writes weight and both moments


@dataclass(frozen=True)
class Rates:
    """Measured rates of a process. gemm: in FLOP/s; copy: in bytes/s, reads and writes both counted."""

    gemm: float
    copy: float

    @classmethod
    def median(cls, rates: Sequence[Rates]) -> Rates:
        """The median of each rate over several measurements, as bench reports the median of the steps."""
        return cls(median(r.gemm for r in rates), median(r.copy for r in rates))


@dataclass(frozen=True)
class StepOperations:
    """The operations of one rank in a step.

    `muon_flops` counts five iterations over each matrix, as the optimizer is defined. `muon_flops_done`
    counts the FLOPs that are computed: fewer for long matrices in float32, which use the Gram matrix.
    """

    model_flops: int
    muon_flops: int
    muon_flops_done: int
    adamw_bytes: int

    def seconds(self, rates: Rates) -> float:
        """The roofline limit in seconds, with the operations as the optimizer is defined."""
        return (self.model_flops + self.muon_flops) / rates.gemm + self.adamw_bytes / rates.copy

    def seconds_of_done(self, rates: Rates) -> float:
        """The roofline limit in seconds, with the operations that are computed; slightly lower."""
        return (self.model_flops + self.muon_flops_done) / rates.gemm + self.adamw_bytes / rates.copy


def count_operations(model: GPT, optimizer: MuonAdamW, owned: Collection[str], tokens: int) -> StepOperations:
    """Count the operations of a rank in a step: `tokens` tokens, and Muon on the matrices in `owned`."""
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
    """FLOPs of Polar Express on a matrix of this shape, without the Gram matrix."""
    m, n = min(rows, cols), max(rows, cols)
    return len(POLAR_EXPRESS) * (4 * m * m * n + 2 * m**3)


def _adamw_bytes(parameter: nn.Parameter) -> int:
    return ADAMW_PASSES * parameter.numel() * parameter.element_size()


def measure(dtype: torch.dtype, device: torch.device) -> Rates:
    """Measure both rates with all threads of this process, in about a second; the best of several trials."""
    gemm = gemm_rate(GEMM_SHAPE, dtype, device)
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = shortest_on(device, lambda: target.copy_(source))
    return Rates(gemm, 2 * COPY_BYTES / copy)
