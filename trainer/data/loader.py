"""The global batch of a step, a pure function of (seed, step), and its split over the ranks.

No state that affects the result is kept between steps: the loss curve does not depend on the number of ranks,
and a resumed run computes its next batch from the number of the step. The permutations of two epochs are
cached: 16 bytes per row. The CRC-32 of each row is verified at every read, to detect bits that change on the
disk or in memory.

Rows of conversations are uint32. The highest bit of a token, TRAINED, marks those that the model is trained
to predict.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data import RowsChangedError

TRAINED = np.uint32(2**31)
IGNORED_TARGET = -1  # a target without a loss, as in trainer.model.loss


class Split:
    """The rows of a split (train or val), (n, T+1) token ids, indexed by an array of row numbers.

    Each read verifies the CRC-32 of the rows that it returns. rows: the token ids, (n, T+1). sums: uint32,
    (n,), the CRC-32 of each row. name: path of the file, for messages. masked: True if only tokens with the
    bit TRAINED have a loss (conversations), False if all tokens have a loss.
    """

    def __init__(self, rows: NDArray[Any], sums: NDArray[np.uint32], name: str, masked: bool = False) -> None:
        self._rows, self._sums, self._name = rows, sums, name
        self.masked = masked
        self.shape = rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of the rows `numbers`, shape (len(numbers), T+1), in which the bit TRAINED is kept.

        Raises RowsChangedError if the CRC-32 of a row differs from the one in `sums`.
        """
        rows = self._rows[numbers]
        changed = numbers[row_sums(rows) != self._sums[numbers]]
        if len(changed):
            raise RowsChangedError(
                f"Row {changed[0]} of {self._name} has changed since the file was opened: a bit has changed "
                "in the memory or on the disk of this host. The next attempt verifies the file and packs it "
                "again if it is damaged. If it happens again, test the memory (memtest86+) and the disk "
                "(smartctl -a) of this host."
            )
        return rows


def row_sums(rows: NDArray[Any]) -> NDArray[np.uint32]:
    """The CRC-32 of the bytes of each row, uint32 of shape (n,)."""
    return np.fromiter(map(zlib.crc32, np.ascontiguousarray(rows)), dtype=np.uint32, count=len(rows))


class Sequences(NamedTuple):
    """Rows of token ids, and a target for each of their first T positions.

    tokens: (rows, T+1), with the bit TRAINED cleared. targets: int64, (rows, T): the next token, or
    IGNORED_TARGET if the next token has no loss.
    """

    tokens: NDArray[Any]
    targets: NDArray[np.int64]


def read_sequences(data: Split | NDArray[Any], numbers: NDArray[np.int64]) -> Sequences:
    """Read the rows of `data` whose row numbers are `numbers`.

    Raises RowsChangedError if `data` is a Split and a row differs from its checksum.
    """
    return _decode(data, data[numbers])


def _decode(data: Split | NDArray[Any], rows: NDArray[Any]) -> Sequences:
    if not (isinstance(data, Split) and data.masked):
        return Sequences(rows, rows[:, 1:].astype(np.int64))
    tokens = rows & ~TRAINED
    trained = rows[:, 1:] & TRAINED != 0
    return Sequences(tokens, np.where(trained, tokens[:, 1:].astype(np.int64), IGNORED_TARGET))


def permutation(n: int, *seed: int) -> NDArray[np.int64]:
    """A pseudorandom permutation of 0..n-1 that depends only on `n` and `seed`.

    The permutation is the argsort of raw PCG64 draws. NumPy keeps these draws stable between releases, but
    not the results of `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64)


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n_rows: int) -> NDArray[np.int64]:
    order = permutation(n_rows, seed, epoch)
    order.setflags(write=False)
    return order


def batch_rows(seed: int, step: int, rows_per_step: int, n_rows: int) -> NDArray[np.int64]:
    """The row numbers of the global batch of `step` (0-based), int64 of shape (rows_per_step,).

    All steps together read one endless sequence of rows, in which each epoch is a new permutation of all
    `n_rows` rows. A batch may span two epochs, so no row is left out. Raises ValueError for a negative `seed`
    or `step`, or a number of rows below 1.
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
    """The global batch of a step. Every rank reads all of it; `rank_rows` selects the rows of one rank.

    tokens: token ids, (rows, T+1).
    active: int64, the active rows of embeddings: all input ids, each once, ascending.
    checksum: a checksum of the rows, their row numbers and `active`; an integer below 2^53, which a float64
        represents exactly.
    targets: int64, (rows, T): the next token, or IGNORED_TARGET if the next token has no loss.
    """

    tokens: NDArray[Any]
    active: NDArray[np.int64]
    checksum: int
    targets: NDArray[np.int64]


def read_batch(data: Split | NDArray[Any], seed: int, step: int, rows_per_step: int) -> Batch:
    """Read the global batch of `step` (0-based) from `data`, the rows of a split, shape (n, T+1).

    Raises RowsChangedError if `data` is a Split and a row differs from its checksum.
    """
    numbers = batch_rows(seed, step, rows_per_step, len(data))
    rows = data[numbers]
    tokens, targets = _decode(data, rows)
    active = np.unique(tokens[:, :-1]).astype(np.int64)
    checksum = 0
    for part in (numbers, rows, active):
        checksum = zlib.crc32(part.tobytes(), checksum)
    return Batch(tokens, active, len(active) << 32 | checksum, targets)


def count_targets(targets: NDArray[np.int64]) -> int:
    """The number of targets that have a loss. targets: token ids of any shape."""
    return int(np.count_nonzero(targets != IGNORED_TARGET))


def rank_rows(rows: NDArray[Any], shares: Sequence[int], rank: int) -> NDArray[Any]:
    """The contiguous rows of the global batch that one rank trains on.

    rows: (rows, ...), the global batch. shares: rows per rank, in rank order. rank: the rank whose rows are
    returned. Raises ValueError if the sum of `shares` is not the length of `rows`, or a share is negative.
    """
    if sum(shares) != len(rows) or min(shares) < 0:
        raise ValueError(f"shares {list(shares)} do not make up a batch of {len(rows)} rows")
    start = sum(shares[:rank])
    return rows[start : start + shares[rank]]


def active_rows(rows: NDArray[Any], shares: Sequence[int]) -> list[NDArray[np.int64]]:
    """The input ids in each rank's rows of the global batch: one array per rank, each id once, ascending.

    rows: token ids of the global batch, (rows, T+1). shares: rows per rank, in rank order.
    """
    slices = (rank_rows(rows, shares, rank) for rank in range(len(shares)))
    return [np.unique(each[:, :-1]).astype(np.int64) for each in slices]


def equal_split(rows: int, world_size: int) -> list[int]:
    """Split the number `rows` equally over `world_size` ranks; returns the rows per rank, in rank order.

    If there is a remainder, the first ranks have one row more.
    """
    share, rest = divmod(rows, world_size)
    return [share + (rank < rest) for rank in range(world_size)]


def proportional_split(shares: Sequence[int], rows: int) -> list[int]:
    """Split the number `rows` in the proportions of `shares`; returns the rows per rank, in rank order.

    If the shares differ by at most 1, the result is that of `equal_split`. Otherwise the exact parts are
    rounded down, and the ranks with the largest fractional parts get the remaining rows, one row each.
    """
    if max(shares) - min(shares) <= 1:
        return equal_split(rows, len(shares))
    whole = sum(shares)
    parts = [rows * share // whole for share in shares]
    order = sorted(range(len(shares)), key=lambda rank: (-(rows * shares[rank] % whole), rank))
    for rank in order[: rows - sum(parts)]:
        parts[rank] += 1
    return parts
