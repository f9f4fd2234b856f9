"""The processors on which the threads of this process run, and how fast each of them is at the moment.

with pinned({0, 2, 4, 6}):          # torch has four threads, and all threads run on these processors only
    work()
pin({0, 2, 4, 6})                   # the same, without restoring anything
rates = core_rates([0, 2, 4, 6])    # relative to the fastest: {0: 1.0, 2: 0.98, ...}
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

PROBE_SECONDS = 0.2  # several time slices of the kernel's scheduler, and periods of a CPU quota
PROBE_BYTES = 2**16  # hashing a longer text releases the GIL; times the processors, which take it in turn
THREADS = Path("/proc/self/task")


def can_pin() -> bool:
    """Whether this system can bind threads to processors (Linux)."""
    return hasattr(os, "sched_setaffinity") and THREADS.is_dir()


def pin(cpus: Iterable[int], threads: int = 0) -> None:
    """Bind all threads of this process to the logical processors `cpus`, and set torch's number of threads.

    cpus: numbers of the processors. threads: torch's number of threads; 0: one for each processor. Threads
    that start later inherit the binding. The kernel ignores a processor that does not exist or is not
    allowed; raises OSError if no processor is left.
    """
    numbers = set(cpus)
    for thread in THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), numbers)
    torch.set_num_threads(threads or len(numbers))


@contextlib.contextmanager
def pinned(cpus: Iterable[int]) -> Iterator[None]:
    """Context in which all threads of this process run on the logical processors `cpus`.

    Within the context, torch has one thread for each of these processors. At the end of the context, the
    threads are bound as before, and torch has its former number of threads.
    """
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    pin(cpus)
    try:
        yield
    finally:
        pin(before, threads)


def bound_to(cpus: Iterable[int], work: Callable[[], float]) -> float:
    """Bind the calling thread to the logical processors `cpus`, then return `work()`, called on that thread.

    Only the calling thread is bound. Threads that `work` starts inherit the binding. The binding is not
    removed when `work` returns.
    """
    os.sched_setaffinity(threading.get_native_id(), set(cpus))
    return work()


def core_rates(cpus: Sequence[int], seconds: float = PROBE_SECONDS) -> dict[int, float]:
    """The speed of each logical processor in `cpus`, relative to the fastest one: {number: 0 to 1}.

    All are measured at the same time, for `seconds` seconds. Other load and CPU quotas count: a processor
    that another process keeps busy has about half its speed; one to which this process is not allowed has 0.
    """
    done, text = dict.fromkeys(cpus, 0), bytes(PROBE_BYTES * len(cpus))
    barrier = threading.Barrier(len(cpus))

    def work(cpu: int) -> None:
        try:
            os.sched_setaffinity(threading.get_native_id(), {cpu})
        except OSError:  # taken from this process meanwhile: speed 0
            barrier.wait()
            return
        barrier.wait()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            hashlib.sha256(text)
            done[cpu] += 1

    workers = [threading.Thread(target=work, args=(cpu,)) for cpu in cpus]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    best = max(done.values(), default=0)
    return {cpu: count / best if best else 1.0 for cpu, count in done.items()}
