"""Rows whose CRC-32 is verified at every read, to detect bits that change on the disk or in memory.

train = Split(rows, row_sums(rows), "rows/0123456789abcdef/train.bin")
train[numbers]                                      # a copy of these rows, or RowsChangedError
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data import RowsChangedError


class Split:
    """Rows of shape (n, T+1), indexed by an array of row numbers.

    Each read verifies the rows that it returns. `sums` is the CRC-32 of each row, shape (n,); `name` is the
    path of the file, for messages.
    """

    def __init__(self, rows: NDArray[Any], sums: NDArray[np.uint32], name: str) -> None:
        self._rows, self._sums, self._name = rows, sums, name
        self.shape = rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of the rows `numbers`, shape (len(numbers), T+1).

        Raises RowsChangedError if a CRC-32 differs.
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
