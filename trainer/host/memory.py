"""The memory that this process has had: kept when it is freed, for the next step needs it again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1  # of <malloc.h>
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 2**30  # the largest block that is kept


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
