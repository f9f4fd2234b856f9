"""The GPUs that torch can use on this host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """Name, compute capability ("8.6") and bfloat16 support of a GPU."""

    name: str
    capability: str
    has_bfloat16: bool  # in hardware, not emulated


def gpu_count() -> int:
    """The number of GPUs that torch can use; 0 without a driver or with a build of torch for CPUs."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def find_gpu(index: int) -> Gpu:
    """The properties of the GPU with the device index `index`."""
    major, minor = torch.cuda.get_device_capability(index)
    with torch.cuda.device(index):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(torch.cuda.get_device_name(index), f"{major}.{minor}", has_bfloat16)
