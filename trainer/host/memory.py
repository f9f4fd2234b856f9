"""The memory of this process: freed memory is kept for the next step, and a shortage is recognised."""

from __future__ import annotations

import ctypes
import errno

_M_TRIM_THRESHOLD = -1  # of <malloc.h>
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 2**30  # the largest block that is kept


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's own error, the system's, or torch's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torchs = isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError"
        or any(text in str(error) for text in ("can't allocate memory", "Cannot allocate memory"))
    )
    return isinstance(error, MemoryError) or torchs


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, up to KEPT_BYTES a block; False where the C library is another one.

    By default it maps each large block anew and gives it back to the system when it is freed, so that a step
    of depth 8 faults some 100,000 pages in: little by itself, but some 5 % of the step beside another process
    that does the same (docs/performance.md). Said once for the whole process, before there are large tensors.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # Windows, macOS, musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
