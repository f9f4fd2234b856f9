"""Chooses the library for float32 GEMMs on the CPU: torch's default, which is MKL on x86, or oneDNN.

On processors of other makers than Intel, MKL uses AVX2 at most, also where they have AVX-512. oneDNN uses
AVX-512 on all of them: on an AMD EPYC of the Zen 5 generation its GEMM rate is 2.2 times that of MKL.

torch lets oneDNN compute a float32 GEMM only if it also allows oneDNN to convert the matrices to bfloat16.
oneDNN converts them only for AMX. So oneDNN is used only without AMX, and only if its results are as exact
as those of the default library; both are checked.
"""

from __future__ import annotations

import time

import torch

from trainer.host.gemm import shortest_seconds

DEFAULT, ONEDNN = "default", "oneDNN"
FASTER = 1.2  # oneDNN is used if its GEMM rate is higher by this factor: noise must not decide
SIZE, BUDGET, REPEATS = 384, 0.04, 4  # of the square matrices; seconds and runs for both libraries
INEXACT = 4.0  # so many times the error of the default library: the matrices were converted


def choose_library(before: str = "") -> str:
    """Let the faster library compute the float32 GEMMs of this process; returns DEFAULT or ONEDNN.

    before: the library that has computed them up to a checkpoint; it is used again if it can be used here.
    "" if there is none. Measures one core, by its CPU time, for about 0.05 s. The number of torch's threads
    is restored.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        is_usable = before != DEFAULT and _has_avx512_without_amx() and _is_exact()
        chosen = ONEDNN if is_usable and (before == ONEDNN or _factor() >= FASTER) else DEFAULT
    finally:
        torch.set_num_threads(threads)
    use_library(chosen)
    return chosen


def use_library(name: str) -> None:
    """Let the library `name`, DEFAULT or ONEDNN, compute the float32 GEMMs of this process."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if name == ONEDNN else "none"  # type: ignore[attr-defined]


def _has_avx512_without_amx() -> bool:
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bw")) and not any(found.get(name) for name in ("amx_tile", "amx_bf16"))


def _is_exact() -> bool:
    """Whether oneDNN's results are as exact as those of the default library."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(SIZE, SIZE, generator=generator) for _ in range(2))
    exact, errors = a.double() @ b.double(), {}
    for name in (DEFAULT, ONEDNN):
        use_library(name)
        errors[name] = float((a @ b - exact).abs().max())
    return errors[ONEDNN] <= INEXACT * errors[DEFAULT]


def _factor() -> float:
    """The GEMM rate of oneDNN divided by that of the default library."""
    a = torch.ones(SIZE, SIZE)

    def multiply(name: str) -> None:
        use_library(name)
        torch.mm(a, a)

    works = [lambda name=name: multiply(name) for name in (DEFAULT, ONEDNN)]
    default, onednn = shortest_seconds(works, BUDGET, REPEATS, time.thread_time)
    return default / onednn
