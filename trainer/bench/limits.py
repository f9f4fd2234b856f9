"""The roofline limit of a step: its operations divided by the measured GEMM rate and copy bandwidth.

    work = count_operations(model, optimizer, owned, tokens)
    rates = measure(compute_dtype, device)               # in the process that trains, with its threads
    seconds = work.seconds(rates)

The limit counts the GEMMs of the model and of Muon at the rate of one large GEMM, and the bytes that AdamW
reads and writes at the rate of a copy. It counts nothing else, so no step reaches it.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from trainer.host.gemm import gemm_rate, shortest_on
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import POLAR_EXPRESS, MuonAdamW

# On a CPU: tokens of two rows, the width of depth 8, its hidden layer. On a GPU: one that fills it.
GEMM_SHAPES = {"cpu": (2048, 512, 2048), "cuda": (8192, 8192, 8192)}
COPY_BYTES = 128 * 2**20  # beyond any cache
ADAMW_PASSES = 7  # reads weight, gradient and both moments; writes weight and both moments


@dataclass(frozen=True)
class Rates:
    """Measured rates of a process.

    gemm: GEMM rate in FLOP/s. copy: copy bandwidth in bytes/s; read and written bytes both count.
    """

    gemm: float
    copy: float

    @classmethod
    def median(cls, rates: Sequence[Rates]) -> Rates:
        """The median of each rate over several measurements."""
        return cls(median(r.gemm for r in rates), median(r.copy for r in rates))


@dataclass(frozen=True)
class StepOperations:
    """The operations of one rank in a step, from which the roofline limit follows.

    model_flops: FLOPs of forward and backward of the model.
    muon_flops: FLOPs of five Polar Express iterations on each matrix that Muon updates on this rank. If one
        side of a matrix is at least twice the other side and its format is float32 or float64, Muon iterates
        on the smaller Gram matrix and computes fewer FLOPs.
    adamw_bytes: bytes that AdamW reads and writes if this rank updates all parameters that Muon does not
        update. With sync=exact and sync=fast a rank updates only its own rows of embeddings: fewer bytes.
    """

    model_flops: int
    muon_flops: int
    adamw_bytes: int

    def seconds(self, rates: Rates) -> float:
        """The roofline limit of the step in seconds, at the measured `rates`."""
        return (self.model_flops + self.muon_flops) / rates.gemm + self.adamw_bytes / rates.copy


def count_operations(model: GPT, optimizer: MuonAdamW, owned: Collection[str], tokens: int) -> StepOperations:
    """Count the operations of a rank in a step.

    model, optimizer: of the rank. owned: names of the matrices that Muon updates on this rank. tokens: number
    of tokens of this rank in a step.
    """
    matrices = optimizer.muon_parameters()
    of_muon = {id(matrix.parameter) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in of_muon]
    return StepOperations(
        model_flops=model.flops_per_token() * tokens,
        muon_flops=sum(iterated_flops(*m.parameter.shape) for m in matrices if m.name in owned),
        adamw_bytes=ADAMW_PASSES * sum(p.numel() * p.element_size() for p in others),
    )


def iterated_flops(rows: int, cols: int) -> int:
    """FLOPs of Muon's Polar Express iterations on a (rows, cols) matrix itself, not on its Gram matrix."""
    m, n = min(rows, cols), max(rows, cols)
    return len(POLAR_EXPRESS) * (4 * m * m * n + 2 * m**3)


def measure(dtype: torch.dtype, device: torch.device) -> Rates:
    """Measure GEMM rate and copy bandwidth with all threads of this process: the best of several trials.

    dtype: number format of the GEMM; the copy is of float32. device: where both are measured. Takes about a
    second.
    """
    gemm = gemm_rate(GEMM_SHAPES[device.type], dtype, device)
    source, target = _copy_buffer(device).fill_(1.0), _copy_buffer(device)
    copy = shortest_on(device, lambda: target.copy_(source))
    return Rates(gemm, 2 * COPY_BYTES / copy)


def _copy_buffer(device: torch.device) -> torch.Tensor:
    """A float32 tensor of COPY_BYTES bytes.

    On a CPU it is an anonymous mmap, because malloc could keep the freed memory during the next steps.
    """
    if device.type == "cpu":
        return torch.frombuffer(mmap.mmap(-1, COPY_BYTES), dtype=torch.float32)
    return torch.empty(COPY_BYTES // 4, dtype=torch.float32, device=device)
