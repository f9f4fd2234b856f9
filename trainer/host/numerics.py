"""The arithmetic of this host: number format, threads, denormals."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

DTYPES = {"auto": torch.float32, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Numerics:
    """How this process computes; `describe` says it in a line."""

    dtype: torch.dtype
    threads: int
    denormals_flushed: bool
    capability: str

    def describe(self) -> str:
        denormals = (
            "flushed" if self.denormals_flushed else "kept (this CPU cannot flush them: steps may slow down)"
        )
        return (
            f"{str(self.dtype).removeprefix('torch.')} on {platform.machine()} {self.capability}, "
            f"{self.threads} thread{'s' if self.threads != 1 else ''}, denormals {denormals}"
        )


def set_up(dtype: str) -> Numerics:
    """Set this process's arithmetic; call it before torch does anything in parallel.

    Denormals: AdamW's moments of embedding rows that no token touches decay into them, and a step over such
    state takes 50 times as long. The flag belongs to a thread and is inherited by those torch starts later.
    """
    flushed = torch.set_flush_denormal(True)
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    return Numerics(DTYPES[dtype], torch.get_num_threads(), flushed, torch.backends.cpu.get_cpu_capability())
