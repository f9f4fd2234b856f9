"""Upstream's tokenizer and shards as a data directory of ours."""

from __future__ import annotations

from pathlib import Path

from trainer.data import DataError
from trainer.data.files import locked
from trainer.data.tokenizer import FILE_NAME, Tokenizer


def adopt_tokenizer(tokenizer: Tokenizer, data_dir: Path) -> Path:
    """Make `tokenizer` that of `data_dir`; DataError if it has another one, which rows may be packed with."""
    path = data_dir / "tokenizer" / FILE_NAME
    with locked(data_dir / ".lock"):
        if path.exists() and Tokenizer.load(path.parent) != tokenizer:
            raise DataError(f"{path} is another tokenizer: give another --data-dir.")
        return tokenizer.save(path.parent)
