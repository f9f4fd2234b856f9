"""Verifies existing shards, such as those of nanochat, and links or copies them to a data directory.

The source folder has `shard_00000.parquet`, `shard_00001.parquet`, ...; the last one by name is for
validation.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from trainer.data import DataError
from trainer.data.files import file_sha256, link_or_copy
from trainer.data.progress import Progress
from trainer.data.sources import SourceFile, text_columns
from trainer.host.cores import usable_cores

SUMS = "SHA256SUMS"
# Where nanochat keeps its shards in its base directory, the newer data set first.
BASE_FOLDERS = ("base_data_climbmix", "base_data")
MOST_READERS = 4  # more do not make a disk faster

Entry = dict[str, Any]


def shard_name(number: int) -> str:
    """The file name of shard `number`, as nanochat writes it: `shard_00000.parquet`."""
    return f"shard_{number:05d}.parquet"


def find_shards(folder: Path) -> list[SourceFile]:
    """The parquet files in `folder`, sorted by name.

    If `folder` is nanochat's base directory, these are the files in its folder of shards. Raises DataError if
    there are fewer than two files, or if `folder` is missing or cannot be read.
    """
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder}." if not folder.exists() else f"{folder} is not a folder."
        )
    places = [folder, *(folder / name for name in BASE_FOLDERS)]
    try:
        for place in places:
            names = sorted(path for path in place.glob("*.parquet") if not path.name.startswith("."))
            if names:
                break
    except OSError as error:
        raise DataError(f"Cannot read the folder {folder}: {error.strerror}.") from None
    if len(names) < 2:
        found = f"only {names[0]}" if names else f"no .parquet file in {folder}"
        raise DataError(
            f"There is {found}: at least two shards are needed, {shard_name(0)} to train on and "
            f"{shard_name(1)} for validation. For other text use --source instead of --shards."
        )
    stats = [(path, path.stat()) for path in names]
    return [SourceFile(str(path), status.st_size, status.st_mtime_ns) for path, status in stats]


def inspect(path: Path, progress: Progress | None = None) -> Entry:
    """The manifest entry of the shard `path`: a dict with name, sha256, bytes, documents and text_bytes.

    The entry lacks the key `split`. The file is read twice, for its hash and for its text; progress counts
    the bytes of both reads. Raises DataError if the file is not a shard of text; the message names the file.
    """
    try:
        sha256 = file_sha256(path, None if progress is None else progress.add)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"The shard {path} cannot be read: {error.strerror}.") from None
    documents = text_bytes = counted = 0
    for column in text_columns(path):
        lengths = pc.binary_length(column)
        documents += pc.sum(pc.greater(lengths, 0)).as_py() or 0
        text_bytes += pc.sum(lengths).as_py() or 0
        if progress is not None:  # compression reduces text to about a third
            step = min(column.nbytes // 3, size - counted)
            counted += step
            progress.add(step)
    if progress is not None:
        progress.add(size - counted)
    return {
        "name": path.name,
        "sha256": sha256,
        "bytes": size,
        "documents": documents,
        "text_bytes": text_bytes,
    }


def adopt(files: Sequence[SourceFile], folder: Path, sums: Mapping[str, str]) -> list[Entry]:
    """Link or copy `files` to `folder`; returns their manifest entries. The last file is for validation.

    sums: {file name: expected sha256}. For the entries see `inspect`; they also have the key `split`. Raises
    DataError if a sha256 differs, or if a file is not a shard of text.
    """
    total = 2 * sum(file.size for file in files)
    with (
        Progress("checking shards", total) as progress,
        ThreadPoolExecutor(min(usable_cores(), MOST_READERS)) as pool,
    ):
        try:
            entries = list(
                pool.map(functools.partial(inspect, progress=progress), [file.path for file in files])
            )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for file, entry in zip(files, entries, strict=True):
        wanted = sums.get(entry["name"], entry["sha256"])
        if entry["sha256"] != wanted:
            raise DataError(
                f"The shard {file.path} is damaged: its sha256 is {entry['sha256']}, {SUMS} has {wanted}. "
                "Copy it again, or remove its line there if the file is right."
            )
    with Progress("copying shards", total // 2) as progress:
        for file, entry in zip(files, entries, strict=True):
            target = folder / entry["name"]
            if not link_or_copy(file.path, target, progress.add) and file_sha256(target) != entry["sha256"]:
                raise DataError(
                    f"The copy of {file.path} differs from it. The file may have changed: try again."
                )
    return with_splits(entries)


def with_splits(entries: Iterable[Entry]) -> list[Entry]:
    """The manifest entries with one more key, `split`: "val" for the last entry, "train" for the others."""
    named = list(entries)
    return [entry | {"split": "val" if entry is named[-1] else "train"} for entry in named]


def read_sums(path: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Read a file in the format of `sha256sum`; returns {file name: sha256}.

    names: file names that `path` must list. Raises DataError if `path` cannot be read, lists no file, or
    lacks one of `names`.
    """
    try:
        sums = parse_sums(path.read_text(encoding="utf-8"))
        missing = [name for name in names if name not in sums]
        if missing or not sums:
            lacks = f"{len(missing)} shard(s), such as {missing[0]}" if missing else "any file"
            raise DataError(
                f"{path} does not list {lacks}. Make it in the folder of the shards: "
                "sha256sum *.parquet > SHA256SUMS"
            )
        return sums
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not a list of checksums. Make it in the folder of the shards: "
            "sha256sum *.parquet > SHA256SUMS"
        ) from None


def parse_sums(text: str) -> dict[str, str]:
    """Parse the lines `<64 hex digits>  name`; returns {file name: sha256}. Other lines are ignored."""
    lines = re.findall(r"^([0-9a-fA-F]{64}) [ *](?:.*/)?([^/\n]+?)\r?$", text, re.MULTILINE)
    return {name: sha256.lower() for sha256, name in lines}
