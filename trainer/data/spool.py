"""Shuffles and deduplicates documents on disk.

The documents are sorted by a keyed hash of their text, so the order depends on the seed and on the documents,
not on the order in which they were added. Duplicates have the same hash and are adjacent in this order.

The first bits of a document's hash select one of `PARTS` files. The index of only one file is in memory at a
time: about 60 bytes per document of this file, so 100 MB for 50 million documents in all files. The hashes of
the first `RECENT` documents and the file buffers take at most another 70 MB.
"""

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

PARTS = 32
RECENT = 500_000
BUFFER_BYTES = 2**18
RECORD = struct.Struct("<QQI")  # the hash in two halves, then the size
INDEX = np.dtype([("high", "<u8"), ("low", "<u8"), ("size", "<u4")])


class Spool:
    """Collects documents in temporary files, then yields them shuffled and without duplicates.

    folder: the folder of these files, which the system deletes when the process ends. seed: determines the
    order of the documents. Iterate over the object after `close_input`.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.key = str(seed).encode()
        self.files = contextlib.ExitStack()
        self.texts = [self._file(folder) for _ in range(PARTS)]
        self.indexes = [self._file(folder) for _ in range(PARTS)]
        self.recent: set[bytes] = set()

    def _file(self, folder: Path) -> IO[bytes]:
        return self.files.enter_context(tempfile.TemporaryFile(dir=folder, buffering=BUFFER_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def add(self, data: bytes) -> int:
        """Add a document, in UTF-8; returns its number of bytes, or 0 for a document that is left out.

        Blank documents and duplicates of one of the first RECENT documents are left out. `close_input` finds
        all other duplicates.
        """
        if not data.strip():
            return 0
        digest = hashlib.blake2b(data, digest_size=16, key=self.key).digest()
        if digest in self.recent:
            return 0
        if len(self.recent) < RECENT:
            self.recent.add(digest)
        high, low = int.from_bytes(digest[:8]), int.from_bytes(digest[8:])
        part = high * PARTS >> 64
        self.texts[part].write(data)
        self.indexes[part].write(RECORD.pack(high, low, len(data)))
        return len(data)

    def close_input(self) -> tuple[int, int]:
        """End the input; returns the number of distinct documents and the sum of their bytes."""
        self.recent.clear()
        n_documents = n_bytes = 0
        for part in range(PARTS):
            self.texts[part].flush()
            self.indexes[part].flush()
            _, sizes = self._order(part)
            n_documents += len(sizes)
            n_bytes += int(sizes.sum())
        return n_documents, n_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield the distinct documents, in UTF-8, in the order of their hashes. Call `close_input` first."""
        for part in range(PARTS):
            offsets, sizes = self._order(part)
            descriptor = self.texts[part].fileno()
            for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
                yield os.pread(descriptor, size, offset)

    def _order(self, part: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and sizes, in bytes, of the distinct documents in file number `part`, sorted by hash."""
        index = _read_index(self.indexes[part])
        sizes = index["size"].astype(np.int64)
        offsets = np.cumsum(sizes) - sizes
        order = np.lexsort((index["low"], index["high"]))
        high, low = index["high"][order], index["low"][order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        return offsets[order[first]], sizes[order[first]]


def _read_index(file: IO[bytes]) -> NDArray[np.void]:
    size = os.fstat(file.fileno()).st_size
    data = os.pread(file.fileno(), size, 0)
    return np.frombuffer(data, dtype=INDEX)
