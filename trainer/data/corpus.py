"""Writes documents as shards (shuffled, in zstd parquet files), and reads the manifest of a data directory.

The last shard is for validation. The documents are shuffled on disk (spool.py), so memory grows little: by
about 300 bytes per file and 2 bytes per document.
"""

import hashlib
import itertools
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data import DataError
from trainer.data.files import file_sha256, read_schema_1, sync_file
from trainer.data.loader import permutation
from trainer.data.progress import Progress
from trainer.data.shards import Entry, shard_name, with_splits
from trainer.data.sources import PARTLY, SkippedFileError, SourceFile, documents
from trainer.data.spool import Spool

MANIFEST = "manifest.json"
SHARDS = "shards"
MAX_DOCUMENT = 200_000  # characters
MIN_DOCUMENT = 2_000
VALIDATION_PART = 20  # validation takes 1/20 of the text, at most one shard
MIN_VALIDATION = 65_536  # bytes, unless that is more than a fifth of the text
TURNS = 32
GROUP_DOCUMENTS = 1024
GROUP_BYTES = 8 * 2**20


@dataclass
class _Reading:
    """A file that is being read.

    documents: the remaining documents of the file. left: the number of its bytes on disk that are not
    reported as progress yet. has_begun: whether a document of the file was taken.
    """

    documents: Iterator[str]
    left: int
    has_begun: bool = False

    def part(self, n_bytes: int) -> int:
        """The bytes on disk to report as progress for `n_bytes` of text; subtracts them from `left`.

        The sum of all results is at most the size of the file, even if its text is compressed and larger.
        """
        part = min(n_bytes, self.left)
        self.left -= part
        return part


def collect(files: Sequence[SourceFile], spool: Spool, max_bytes: int, seed: int) -> Counter[str]:
    """Add the documents of `files` to `spool`; returns the number of skipped files by reason.

    max_bytes: the limit of the text in bytes; 0: no limit. seed: determines the order of the files. With a
    limit, the files take turns, and a turn of a file ends after about 1/32 of `max_bytes`, so that neither
    the first folder nor a few huge files fill the corpus.
    """
    skipped: Counter[str] = Counter()
    on_disk = sum(file.size for file in files)
    expected = min(on_disk, max_bytes) if max_bytes else on_disk
    by_text = expected < on_disk  # progress counts the text taken, or else the bytes of the files read
    # Documents are cut so short that validation gets several of them in a small corpus too.
    limit = min(MAX_DOCUMENT, max(MIN_DOCUMENT, expected // VALIDATION_PART))
    turn_bytes = max(limit, max_bytes // TURNS) if max_bytes else float("inf")
    waiting: deque[_Reading] = deque()  # at most TURNS of them; each has read a few MB ahead

    def readers() -> Iterator[_Reading]:
        for index in permutation(len(files), seed, 0):
            yield _Reading(documents(files[index], limit), files[index].size)
        while waiting:
            yield waiting.popleft()

    taken = 0
    with Progress("reading text", expected) as progress:
        for reader in readers():
            turn = 0
            try:
                for text in reader.documents:
                    data = text.encode()
                    if max_bytes and taken + len(data) > max_bytes:
                        return skipped
                    size = spool.add(data)
                    reader.has_begun = True
                    progress.add(size if by_text else reader.part(size))
                    taken += size
                    turn += size
                    if turn >= turn_bytes:
                        waiting.append(reader)
                        break
                else:
                    progress.add(0 if by_text else reader.left)
            except SkippedFileError as reason:
                skipped[PARTLY if reader.has_begun else str(reason)] += 1
                progress.add(0 if by_text else reader.left)
    return skipped


@dataclass(frozen=True)
class ShardPlan:
    """Assigns documents to shards: training shards of about equal size, then one for validation.

    total: the size of all text in bytes. n_train: the number of training shards. train_bytes: the size of the
    text for training in bytes.
    """

    total: int
    n_train: int
    train_bytes: int

    @classmethod
    def make(cls, total: int, shard_bytes: int) -> Self:
        """The plan for `total` bytes of text, with training shards of about `shard_bytes` each."""
        val = min(shard_bytes, max(total // VALIDATION_PART, min(MIN_VALIDATION, total // 5)))
        return cls(total, max(1, round((total - val) / shard_bytes)), total - val)

    def shard(self, start: int, end: int) -> int:
        """The number of the shard that gets the document at the bytes `start` to `end` of all text.

        Training shards are 0 to `n_train` - 1; `n_train` is the validation shard.
        """
        if start >= self.train_bytes or end == self.total:
            return self.n_train
        return start * self.n_train // self.train_bytes


def write_shards(spool: Spool, folder: Path, n_bytes: int, shard_bytes: int) -> list[Entry]:
    """Write the documents of `spool` to `folder` as shards of about `shard_bytes` of text each.

    n_bytes: the size of all documents in bytes. Returns a manifest entry for each shard: a dict with name,
    sha256, bytes, documents, text_bytes and split.
    """
    plan = ShardPlan.make(n_bytes, shard_bytes)
    entries = []
    with Progress("writing shards", n_bytes) as progress:
        for number, (_, documents) in enumerate(itertools.groupby(_planned(spool, plan), itemgetter(0))):
            texts = (data for _, data in documents)
            entries.append(write_shard(folder / shard_name(number), texts, progress))
    return with_splits(entries)


def _planned(spool: Spool, plan: ShardPlan) -> Iterator[tuple[int, bytes]]:
    start = 0
    for data in spool:
        yield plan.shard(start, start + len(data)), data
        start += len(data)


def write_shard(path: Path, documents: Iterable[bytes], progress: Progress) -> Entry:
    """Write `documents` to the parquet file `path`; returns its manifest entry without `split`.

    documents: texts in UTF-8. progress: counts the bytes of text.
    """
    schema = pa.schema([("text", pa.string())])
    n_documents = n_bytes = 0
    with open(path, "wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
            for group in groups_of(documents, GROUP_BYTES, GROUP_DOCUMENTS):
                texts = pa.array(group, pa.binary()).cast(pa.string())
                writer.write_table(pa.table([texts], schema=schema), row_group_size=len(group))
                size = sum(map(len, group))
                n_documents += len(group)
                n_bytes += size
                progress.add(size)
        sync_file(file)
    return {
        "name": path.name,
        "sha256": file_sha256(path),
        "bytes": path.stat().st_size,
        "documents": n_documents,
        "text_bytes": n_bytes,
    }


def groups_of(texts: Iterable[bytes], n_bytes: int, n_texts: int = sys.maxsize) -> Iterator[list[bytes]]:
    """Divide `texts`, in their order, into groups that end at `n_bytes` or more, or at `n_texts` texts."""
    group: list[bytes] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if len(group) == n_texts or size >= n_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def build_shards(
    files: Sequence[SourceFile], folder: Path, max_bytes: int, shard_bytes: int, seed: int
) -> tuple[list[Entry], Counter[str]]:
    """Write the text of `files` to `folder` as shards; returns (manifest entries, skipped files by reason).

    max_bytes: the limit of the text in bytes; 0: no limit. shard_bytes: the approximate size of the text of a
    shard in bytes. seed: determines the order of the documents. For the entries see `write_shards`. Raises
    DataError if there are fewer than two distinct documents.
    """
    with Spool(folder, seed) as spool:
        skipped = collect(files, spool, max_bytes, seed)
        n_documents, n_bytes = spool.close_input()
        if not n_documents:
            raise DataError(
                f"No text found in {len(files)} file(s) such as {files[0].path}: give a folder with .txt, "
                ".md or .py files" + (f", or more than --max-bytes {max_bytes}." if max_bytes else ".")
            )
        if n_documents < 2:
            raise DataError(
                f"Too little text: {n_bytes} bytes in one document cannot be divided between training and "
                "validation. Give a folder with more .txt, .md or .py files"
                + (f", or more than --max-bytes {max_bytes}." if max_bytes else ".")
            )
        return write_shards(spool, folder, n_bytes, shard_bytes), skipped


def source_digest(files: Sequence[SourceFile], *arguments: object) -> str:
    """The sha256, 64 hex digits, of the names, sizes and modification times of `files`, and of `arguments`.

    arguments: other values that determine the shards, such as options. If the manifest has the same digest,
    and all shard files have the sizes in the manifest, `prepare` keeps the shards.
    """
    digest = hashlib.sha256(repr(arguments).encode())
    for file in files:
        digest.update(f"{file.size} {file.mtime_ns} ".encode() + os.fsencode(file.name) + b"\0")
    return digest.hexdigest()


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """The content of manifest.json in `data_dir`, a dict. Raises DataError if it is missing or damaged.

    Its keys are schema, shards (list of entries, see `write_shards`), tokenizer_sha256 and others.
    """
    return read_schema_1(data_dir / MANIFEST, "manifest", str(data_dir), _checked)


def _checked(manifest: dict[str, Any]) -> dict[str, Any]:
    splits = [shard["split"] for shard in manifest["shards"]]
    if splits[-1] != "val" or set(splits[:-1]) != {"train"}:
        raise ValueError("the last shard alone must be validation")
    return manifest
