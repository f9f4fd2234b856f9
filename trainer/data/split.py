"""Rows that are compared with their checksums whenever they are read: a bit that changes later is noticed.

train = Split(rows, row_sums(rows), "rows/0123456789abcdef/train.bin")
train[numbers]                                      # a copy of these rows, or RowsChangedError
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data import RowsChangedError


class Split:
    """Rows (n, T+1) that are compared with their checksums as they are read, by an array of their numbers."""

    def __init__(self, rows: NDArray[Any], sums: NDArray[np.uint32], name: str) -> None:
        self._rows, self._sums, self._name = rows, sums, name
        self.shape = rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of these rows. Raises RowsChangedError."""
        rows = self._rows[numbers]
        changed = numbers[row_sums(rows) != self._sums[numbers]]
        if len(changed):
            raise RowsChangedError(
                f"Row {changed[0]} of {self._name} is not what it was when the file was opened: a bit has "
                "changed in the memory or on the disk of this host. The next attempt compares the file and "
                "packs it again if it is damaged. Does it happen again, test the memory (memtest86+) and the "
                "disk (smartctl -a) of this host."
            )
        return rows


def row_sums(rows: NDArray[Any]) -> NDArray[np.uint32]:
    """A checksum (CRC-32) of each row's bytes."""
    return np.fromiter(map(zlib.crc32, np.ascontiguousarray(rows)), dtype=np.uint32, count=len(rows))
