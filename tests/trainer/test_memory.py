"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from trainer.host.numerics import explore

def faults(megabytes):
    for _ in range(20):  # until glibc's cache per thread holds the slivers beside them that keep blocks apart
        torch.zeros(megabytes * 2**18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(megabytes * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    explore("cpu", "float32", threads=1, local_rank=0, local_world_size=1)
torch.set_num_threads(1)
print(faults(40), faults(80))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_large_tensors_are_made_of_memory_that_was_freed() -> None:
    """In a run, none of ten blocks of 40 MB in turn, and of 80 MB, is paged in; otherwise each one is."""
    seen = {}
    for how in ("kept", "plain"):
        printed = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
        ).stdout
        seen[how] = [int(number) for number in printed.split()]
    assert seen["kept"][0] < seen["plain"][0] / 20
    assert seen["kept"][1] < seen["plain"][1] / 20
