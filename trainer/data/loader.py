"""The global batch of a step, a pure function of (seed, step), and its split over the ranks.

There is no state between steps, so the loss curve does not depend on the number of ranks, and resuming is a
seek. The orders of two epochs are cached: 16 bytes per row.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.split import Split


def permutation(n: int, *seed: int) -> NDArray[np.int64]:
    """A permutation of 0..n-1 that depends only on `seed`.

    Sorts raw draws: numpy keeps those stable between releases, but not `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64)


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n_rows: int) -> NDArray[np.int64]:
    order = permutation(n_rows, seed, epoch)
    order.setflags(write=False)
    return order


def batch_rows(seed: int, step: int, rows_per_step: int, n_rows: int) -> NDArray[np.int64]:
    """The row indices of the global batch of `step` (0-based), shape (rows_per_step,).

    The steps read one endless sequence of rows, in which each epoch is a new permutation of all `n_rows`. A
    batch may span two epochs, so that no row is left out.
    """
    if min(seed, step) < 0 or min(rows_per_step, n_rows) < 1:
        raise ValueError(
            f"no batch of {rows_per_step} rows at step {step} out of {n_rows} rows with seed {seed}"
        )
    start, end = step * rows_per_step, (step + 1) * rows_per_step
    parts = []
    while start < end:
        epoch, offset = divmod(start, n_rows)
        take = min(end - start, n_rows - offset)
        parts.append(_epoch(seed, epoch, n_rows)[offset : offset + take])
        start += take
    return np.concatenate(parts)


class Batch(NamedTuple):
    """The global batch of a step, which every rank reads whole."""

    tokens: NDArray[Any]  # (rows, T+1)
    active: NDArray[np.int64]  # the active rows: all input ids, each once, ascending
    checksum: int  # of both and of the rows' numbers: below 2^53, so that a float64 holds it


def read_batch(data: Split | NDArray[Any], seed: int, step: int, rows_per_step: int) -> Batch:
    """Read the global batch of `step` (0-based). Raises RowsChangedError."""
    numbers = batch_rows(seed, step, rows_per_step, len(data))
    tokens = data[numbers]
    active = np.unique(tokens[:, :-1]).astype(np.int64)
    checksum = 0
    for part in (numbers, tokens, active):
        checksum = zlib.crc32(part.tobytes(), checksum)
    return Batch(tokens, active, len(active) << 32 | checksum)


def rank_rows(rows: NDArray[Any], shares: Sequence[int], rank: int) -> NDArray[Any]:
    """The contiguous slice of a global batch for `rank`; `shares` are the rows per rank."""
    if sum(shares) != len(rows) or min(shares) < 0:
        raise ValueError(f"shares {list(shares)} do not make up a batch of {len(rows)} rows")
    start = sum(shares[:rank])
    return rows[start : start + shares[rank]]


def equal_split(rows: int, world_size: int) -> list[int]:
    """Rows per rank in equal parts; a remainder goes to the first ranks."""
    share, rest = divmod(rows, world_size)
    return [share + (rank < rest) for rank in range(world_size)]


def proportional_split(shares: Sequence[int], rows: int) -> list[int]:
    """Split `rows` in the proportions of `shares`; equal shares stay equal."""
    if max(shares) - min(shares) <= 1:
        return equal_split(rows, len(shares))
    whole = sum(shares)
    parts = [rows * share // whole for share in shares]
    # The remainder goes to the ranks with the largest fractions.
    order = sorted(range(len(shares)), key=lambda rank: (-(rows * shares[rank] % whole), rank))
    for rank in order[: rows - sum(parts)]:
        parts[rank] += 1
    return parts
