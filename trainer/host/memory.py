"""Memory of this process: keeps freed memory from step to step, and recognises out-of-memory errors."""

from __future__ import annotations

import contextlib
import ctypes
import errno

_M_TRIM_THRESHOLD = -1  # of <malloc.h>
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 2**30  # the largest block that is kept


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation: MemoryError, OSError with ENOMEM, or an error of torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one, and torch may not be imported
        return type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    return isinstance(error, MemoryError)


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to KEPT_BYTES for reuse; other C libraries are left as they are.

    By default glibc returns each large block to the system when it is freed, and maps it again later. A step
    of a model of depth 8 then has some 100,000 page faults. They take about 5 % of the step if another
    process trains on the host at the same time (docs/research/performance-log.md). Call this once in a
    process, before large tensors exist.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows, macOS, musl
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Return to the system the freed memory that glibc keeps because of `keep_freed_memory`.

    The next step has to map its memory again. Call this after work that allocates blocks of other sizes than
    a step does: the setup, an evaluation, a checkpoint. Without this call, a rank with a model of
    depth 8 keeps 0.8 GB from the setup that its steps cannot use.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
