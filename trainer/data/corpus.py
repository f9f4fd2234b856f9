"""Documents -> shards: a seeded shuffle over all of them, zstd parquet files, and a manifest of their hashes.

The last shard is validation. Text passes through a spool file, so memory does not grow with the corpus.
"""

import hashlib
import itertools
import json
import os
import tempfile
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.data import DataError
from trainer.data.files import file_sha256, sync_file
from trainer.data.loader import permutation
from trainer.data.progress import Progress
from trainer.data.sources import SkippedFileError, SourceFile, documents

MANIFEST = "manifest.json"
SHARDS = "shards"
MAX_DOCUMENT = 200_000  # characters
MIN_DOCUMENT = 2_000
VALIDATION_PART = 20  # one part in so many, at most a shard
MIN_VALIDATION = 65_536  # bytes; less where that would be over a fifth of the text
TURNS = 100
GROUP_DOCUMENTS = 1024
GROUP_BYTES = 8 * 2**20


class Spool:
    """Documents in one temporary file, each once, to be read back in any order."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.ends = array("Q", [0])
        self.digests: set[bytes] = set()

    def add(self, data: bytes) -> int:
        """Keep a document (UTF-8); returns its bytes, or 0 if it is blank or was already there."""
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest in self.digests or not data.strip():
            return 0
        self.digests.add(digest)
        self.file.write(data)
        self.ends.append(self.ends[-1] + len(data))
        return len(data)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each document."""
        ends = np.array(self.ends, dtype=np.int64)
        return ends[1:] - ends[:-1]

    def read(self, index: int) -> str:
        """The document of that number."""
        self.file.seek(self.ends[index])
        return self.file.read(self.ends[index + 1] - self.ends[index]).decode()


def collect(files: Sequence[SourceFile], spool: Spool, max_bytes: int, seed: int) -> Counter[str]:
    """Put the documents of `files` into `spool`, at most `max_bytes` of text (0: all of it).

    Files come in a seeded order and in turns of about a hundredth of `max_bytes`, so neither the first folder
    nor a few huge files fill the corpus. Returns how many files gave no text, by reason.
    """
    skipped: Counter[str] = Counter()
    expected = sum(file.size for file in files)
    if max_bytes:
        expected = min(expected, max_bytes)
    # Short enough documents that a small corpus, too, has a fair share of them for validation.
    limit = min(MAX_DOCUMENT, max(MIN_DOCUMENT, expected // VALIDATION_PART))
    turn_bytes = max(limit, max_bytes // TURNS) if max_bytes else float("inf")
    waiting: deque[Iterator[str]] = deque()  # at most TURNS of them, so few files are open at once

    def readers() -> Iterator[Iterator[str]]:
        for index in permutation(len(files), seed, 0):
            yield documents(files[index], limit)
        while waiting:
            yield waiting.popleft()

    taken = 0
    with Progress("reading text", expected) as progress:
        for reader in readers():
            turn = 0
            try:
                for text in reader:
                    data = text.encode()
                    if max_bytes and taken + len(data) > max_bytes:
                        return skipped
                    size = spool.add(data)
                    progress.add(size)
                    taken += size
                    turn += size
                    if turn >= turn_bytes:
                        waiting.append(reader)
                        break
            except SkippedFileError as reason:
                skipped[str(reason)] += 1
    return skipped


def plan_shards(sizes: NDArray[np.int64], shard_bytes: int) -> list[tuple[int, int]]:
    """Ranges of shuffled documents: equal training shards of about `shard_bytes`, then validation."""
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    wanted = min(shard_bytes, max(total // VALIDATION_PART, min(MIN_VALIDATION, total // 5)))
    border = min(int(np.searchsorted(ends, total - wanted)) + 1, len(sizes) - 1)
    n_train = max(1, round(int(ends[border - 1]) / shard_bytes))
    cuts = np.searchsorted(ends, [int(ends[border - 1]) * k // n_train for k in range(1, n_train)])
    borders = [0, *sorted({int(cut) for cut in cuts} - {0}), border, len(sizes)]
    return [(start, end) for start, end in itertools.pairwise(borders) if start < end]


def write_shards(spool: Spool, folder: Path, shard_bytes: int, seed: int) -> list[dict[str, Any]]:
    """Shuffle the spooled documents into shards in `folder`; returns the manifest's entry of each."""
    sizes = spool.sizes()
    order = permutation(len(spool), seed, 1)
    ranges = plan_shards(sizes[order], shard_bytes)
    entries = []
    with Progress("writing shards", int(sizes.sum())) as progress:
        for number, (start, end) in enumerate(ranges):
            path = folder / f"shard_{number:05d}.parquet"
            _write_shard(path, spool, order[start:end], progress)
            entries.append(
                {
                    "name": path.name,
                    "sha256": file_sha256(path),
                    "bytes": path.stat().st_size,
                    "documents": end - start,
                    "text_bytes": int(sizes[order[start:end]].sum()),
                    "split": "val" if number == len(ranges) - 1 else "train",
                }
            )
    return entries


def _write_shard(path: Path, spool: Spool, chosen: NDArray[np.int64], progress: Progress) -> None:
    schema = pa.schema([("text", pa.string())])
    with open(path, "wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
            for group in _groups(spool, chosen, progress):
                writer.write_table(pa.table([group], schema=schema), row_group_size=len(group))
        file.flush()
        sync_file(file.fileno())


def _groups(spool: Spool, chosen: NDArray[np.int64], progress: Progress) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for index in chosen.tolist():
        text = spool.read(index)
        group.append(text)
        n_bytes = spool.ends[index + 1] - spool.ends[index]
        size += n_bytes
        progress.add(n_bytes)
        if len(group) == GROUP_DOCUMENTS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def build_shards(
    files: Sequence[SourceFile], folder: Path, max_bytes: int, shard_bytes: int, seed: int
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Make the shards of `files` in `folder`; returns the manifest's entries and what was skipped."""
    with tempfile.TemporaryFile(dir=folder) as file:
        spool = Spool(file)
        skipped = collect(files, spool, max_bytes, seed)
        if not len(spool):
            raise DataError(
                f"No text found in {len(files)} file(s) such as {files[0].path}: "
                "give a folder with .txt, .md or .py files."
            )
        if len(spool) < 2:
            raise DataError(
                f"Too little text: {spool.ends[-1]} bytes in one document cannot be shared between training "
                "and validation. Give a folder with more .txt, .md or .py files."
            )
        return write_shards(spool, folder, shard_bytes, seed), skipped


def source_digest(files: Sequence[SourceFile], *arguments: object) -> str:
    """Changes when a file comes, goes or is written to, or an argument that shapes the shards changes."""
    digest = hashlib.sha256(repr(arguments).encode())
    for file in files:
        digest.update(f"{file.size} {file.mtime_ns} ".encode() + os.fsencode(file.path) + b"\0")
    return digest.hexdigest()


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """The manifest of a data directory; raises DataError if there is none or it is damaged."""
    path = data_dir / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["schema"] != 1:
            raise DataError(f"{path} has schema {manifest['schema']}; this release reads schema 1.")
        splits = [shard["split"] for shard in manifest["shards"]]
        if splits[-1] != "val" or set(splits[:-1]) != {"train"}:
            raise ValueError("the last shard alone must be validation")
        return manifest
    except FileNotFoundError:
        raise DataError(
            f"There is no {path}. Make it with: python -m trainer prepare --source FOLDER --out {data_dir}"
        ) from None
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is no manifest that this program wrote ({error}).") from None
