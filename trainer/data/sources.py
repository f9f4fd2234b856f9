"""Finds text files under given folders and reads the documents in them.

A text file, or a value of the column `text` of a parquet file, is one document, or several documents if it is
long. Manual pages are rendered by mandoc, or skipped if mandoc is not installed. Hidden files and
symlinks are ignored. Files that are not UTF-8 text are skipped and counted.
"""

import codecs
import gzip
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer.data import DataError
from trainer.data.manual_pages import find_mandoc, is_manual, is_manual_path, render_manual
from trainer.data.progress import Progress
from trainer.data.text import split_text

HEAD_BYTES = 8192
BLOCK_BYTES = 2**20
BATCH_DOCUMENTS = 256
BATCH_BYTES = 2 * 2**20
BUFFER_BYTES = 2**20
TEXT_COLUMN = "text"

BINARY = "binary or not UTF-8"
UNREADABLE = "unreadable"
EMPTY = "empty"
MANUAL = "manual page(s), which need mandoc on PATH"
PARTLY = "read only up to a damaged place"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that may contain text. There may be millions of these objects.

    name: the full path. size: the size in bytes. mtime_ns: the time of the last change in ns. Size and time
    serve to detect changes.
    """

    name: str
    size: int
    mtime_ns: int

    @property
    def path(self) -> Path:
        """The full path of the file."""
        return Path(self.name)


class SkippedFileError(Exception):
    """Raised for a file that is skipped: it has no usable text, cannot be read, or needs a missing program.

    The message is the reason; skipped files are counted by reason.
    """


def find_files(
    sources: Sequence[Path], leave_out: Path | None = None
) -> tuple[list[SourceFile], Counter[str]]:
    """Find all regular files under `sources`; returns (files, number of skipped files by reason).

    The files are in a fixed order, each once. Hidden files, symlinks and __pycache__ are ignored. leave_out:
    the folder to which the shards are written, resolved; it is ignored too. Raises DataError if a source does
    not exist, is a folder that cannot be read, or is in `leave_out`.
    """
    found: list[SourceFile] = []
    skipped: Counter[str] = Counter()
    linked: set[tuple[int, int]] = set()  # files with several hard links

    def take(name: str) -> None:
        try:
            status = os.lstat(name)
        except OSError:
            skipped[UNREADABLE] += 1
            return
        identity = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode) or identity in linked:
            return
        if status.st_nlink > 1:
            linked.add(identity)
        if status.st_size:
            found.append(SourceFile(name, status.st_size, status.st_mtime_ns))
        else:
            skipped[EMPTY] += 1
        progress.add(1)

    with Progress("looking for text", unit=" files") as progress:
        for root in _roots(sources, leave_out):
            if root.is_file():
                take(str(root))
                continue
            for folder, subfolders, names in os.walk(root, onerror=lambda _: skipped.update([UNREADABLE])):
                subfolders[:] = sorted(
                    name for name in subfolders if not _is_left_out(name) and Path(folder, name) != leave_out
                )
                for name in sorted(names):
                    if not name.startswith("."):
                        take(os.path.join(folder, name))
    return found, skipped


def _roots(sources: Sequence[Path], leave_out: Path | None) -> list[Path]:
    """The resolved `sources` that are not within another source.

    Raises DataError if a source is missing, cannot be read, or is in `leave_out`, the output folder.
    """
    roots: list[Path] = []
    for source in sources:
        if not source.exists():
            raise DataError(f"There is no file or folder {source}.")
        root = source.resolve()
        if leave_out and root.is_relative_to(leave_out):
            raise DataError(f"{source} is the output folder. Give another one with --out.")
        if root.is_dir() and not os.access(root, os.R_OK | os.X_OK):
            raise DataError(
                f"The folder {source} cannot be read by this user. Change its permissions (chmod)."
            )
        if root not in roots:
            roots.append(root)

    def is_found_below(root: Path) -> bool:
        """Whether the walk of another source finds `root`: no folder between the two is ignored."""
        above = [parent for parent in root.parents if parent in roots]
        return any(not any(map(_is_left_out, root.relative_to(parent).parts)) for parent in above)

    return [root for root in roots if not is_found_below(root)]


def _is_left_out(name: str) -> bool:
    """Whether the walk of a source ignores a folder of this name."""
    return name.startswith(".") or name == "__pycache__"


def documents(file: SourceFile, limit: int) -> Iterator[str]:
    """Yield the documents of `file`. limit: maximum characters of a document; longer text is split.

    Raises SkippedFileError, perhaps after some documents, if the file is not text or cannot be read, or if it
    is a manual page and mandoc is missing or fails. For a parquet file, raises DataError as `text_columns`
    does.
    """
    if file.path.suffix == ".parquet":
        for batch in shard_texts(file.path):
            for text in batch:
                yield from split_text(text, limit)
        return
    try:
        blocks: Iterable[str] = _text_blocks(file.path)
        if is_manual_path(file.path):
            blocks = ["".join(blocks)]  # mandoc needs the whole page
        for block in blocks:
            yield from split_text(_without_markup(file.path, block), limit)
    except UnicodeDecodeError:
        raise SkippedFileError(BINARY) from None
    except (OSError, EOFError, zlib.error):
        raise SkippedFileError(UNREADABLE) from None


def _without_markup(path: Path, text: str) -> str:
    """`text`, rendered by mandoc if it is a manual page.

    Raises SkippedFileError if mandoc is not installed.
    """
    if not is_manual(path, text):
        return text
    mandoc = find_mandoc()
    if mandoc is None:
        raise SkippedFileError(MANUAL)
    return render_manual(mandoc, text)


def _text_blocks(path: Path) -> Iterator[str]:
    """Yield the text of a file (.gz too) in blocks of whole lines, to limit the memory used.

    Raises SkippedFileError for a binary file, UnicodeDecodeError if the file is not UTF-8, OSError if it
    cannot be read; also EOFError or zlib.error for a damaged .gz file.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    carry = ""
    with _open(path) as file:
        raw = file.read(HEAD_BYTES)
        if b"\0" in raw:
            raise SkippedFileError(BINARY)
        raw += file.read(BLOCK_BYTES)
        while raw:
            if b"\0" in raw:
                raise SkippedFileError(BINARY)
            block = carry + decoder.decode(raw)
            cut = block.rfind("\n") + 1 or len(block)
            raw = file.read(BLOCK_BYTES)
            if raw:
                yield block[:cut]
                carry = block[cut:]
            else:
                carry = block
    yield carry + decoder.decode(b"", final=True)


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def shard_texts(path: Path) -> Iterator[list[str]]:
    """Yield lists of documents from a parquet file: the column `text` without nulls and empty strings.

    Raises DataError as `text_columns` does.
    """
    for column in text_columns(path):
        yield [text for text in column.to_pylist() if text]


def text_columns(path: Path) -> Iterator[pa.Array]:
    """Yield the column `text` of a parquet file as arrays of a few MB, whatever the size of its row groups.

    Raises DataError if the file cannot be read or is damaged, or if the column is missing, empty or does not
    hold strings. The message names the file.
    """
    empty = True
    try:
        # With a small buffer; otherwise pyarrow loads the whole column chunk of a row group.
        with pq.ParquetFile(
            path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
        ) as shard:
            _refuse_other_columns(path, shard.schema_arrow)
            for batch in shard.iter_batches(
                batch_size=_batch_documents(shard), columns=[TEXT_COLUMN], use_threads=False
            ):
                column = batch.column(0)
                column.validate(full=True)  # includes UTF-8
                empty = empty and not pc.sum(pc.binary_length(column)).as_py()
                yield column
            if empty:
                raise DataError(f"The column `{TEXT_COLUMN}` of {path} is empty.")
    except FileNotFoundError:
        raise DataError(f"There is no shard {path}.") from None
    except PermissionError:
        raise DataError(
            f"The shard {path} cannot be read by this user. Change its permissions (chmod)."
        ) from None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The shard {path} cannot be read: {reason}.") from None


def _refuse_other_columns(path: Path, schema: pa.Schema) -> None:
    if TEXT_COLUMN not in schema.names:
        columns = ", ".join(schema.names) or "none"
        raise DataError(f"{path} has no column `{TEXT_COLUMN}` (its columns: {columns}).")
    kind = schema.field(TEXT_COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"The column `{TEXT_COLUMN}` of {path} holds {kind}, not strings.")


def _batch_documents(shard: pq.ParquetFile) -> int:
    """The number of documents with about BATCH_BYTES of text together, at most BATCH_DOCUMENTS."""
    index = shard.schema_arrow.names.index(TEXT_COLUMN)
    groups = [shard.metadata.row_group(i) for i in range(shard.num_row_groups)]
    size = sum(group.column(index).total_uncompressed_size for group in groups if group.num_columns > index)
    mean = size // max(1, shard.metadata.num_rows)
    return max(1, min(BATCH_DOCUMENTS, BATCH_BYTES // max(1, mean)))
