"""Memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from trainer.host.memory import keep_freed_memory

def faults(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(megabytes * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
print(faults(40), faults(200))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_large_tensors_are_made_of_memory_that_was_freed() -> None:
    """Of twenty blocks of 40 MB in turn, and of 200 MB, some are paged in; without it each one is."""
    seen = {}
    for how in ("kept", "plain"):
        said = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
        ).stdout
        seen[how] = [int(number) for number in said.split()]
    assert seen["kept"][0] < seen["plain"][0] / 2
    assert seen["kept"][1] < seen["plain"][1] / 2
