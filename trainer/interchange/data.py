"""Import of nanochat's tokenizer and shards into a data directory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from trainer.data import DataError
from trainer.data.directory import Prepared, prepare_shards
from trainer.data.files import locked
from trainer.data.shards import BASE_FOLDERS
from trainer.data.tokenizer import FILE_NAME, Tokenizer


def has_shards(path: Path) -> bool:
    """Whether `path` is a nanochat base directory with shards, or a folder of shards."""
    return any(any(folder.glob("*.parquet")) for folder in (path, *(path / name for name in BASE_FOLDERS)))


def adopt_shards(base: Path, tokenizer: Tokenizer, data_dir: Path) -> Prepared:
    """Make the data directory `data_dir` with `tokenizer` and the shards of `base`, which are not changed.

    base: a nanochat base directory or a folder of shards. Raises DataError if the shards cannot be used, or
    if `data_dir` has another tokenizer.
    """
    _check_tokenizer(tokenizer, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return prepare_shards(base, data_dir, tokenizer=Path(folder))


def adopt_tokenizer(tokenizer: Tokenizer, data_dir: Path) -> Path:
    """Write `tokenizer`, and no data shards, to `data_dir`; returns the path of the tokenizer's file.

    Raises DataError if `data_dir` has another tokenizer.
    """
    with locked(data_dir / ".lock"):
        _check_tokenizer(tokenizer, data_dir)
        return tokenizer.save(data_dir / "tokenizer")


def _check_tokenizer(tokenizer: Tokenizer, data_dir: Path) -> None:
    """Raise DataError if `data_dir` has another tokenizer, which runs may depend on."""
    path = data_dir / "tokenizer" / FILE_NAME
    if path.exists() and Tokenizer.load(path.parent) != tokenizer:
        raise DataError(f"{path} exists and differs from the tokenizer to import. Give another --data-dir.")
