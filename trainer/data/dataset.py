"""Opens a data directory for training: packed rows, tokenizer and hashes. Missing rows are packed first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trainer.data import DataError
from trainer.data.corpus import MANIFEST
from trainer.data.files import file_sha256
from trainer.data.loader import Split
from trainer.data.rows import SPLITS, RowsInfo, pack
from trainer.data.tokenizer import FILE_NAME, Tokenizer


@dataclass(frozen=True)
class Dataset:
    """The training data of a rank.

    tokenizer: the tokenizer of the data directory.
    info: files, counts and digest of the packed rows.
    train, val: the rows of each split, (n, T+1) token ids.
    hashes: {"manifest", "tokenizer" or "rows": the first 16 hex digits of a sha256}. They must be equal on
        all ranks.
    """

    tokenizer: Tokenizer
    info: RowsInfo
    train: Split | NDArray[Any]
    val: Split | NDArray[Any]
    hashes: dict[str, str]

    @classmethod
    def open(cls, data_dir: Path, sequence_len: int) -> Dataset:
        """Open `data_dir` with rows of `sequence_len` + 1 tokens. Missing or damaged rows are packed.

        Raises DataError if the data are missing, damaged or too little.
        """
        if not data_dir.is_dir():
            raise DataError(
                f"There is no data directory {data_dir}. Make it with: python -m trainer prepare "
                f"--source FOLDER --out {data_dir}  (of conversations: python -m trainer conversations; on a "
                "host of a fleet: ansible-playbook setup.yml)"
            )
        info = pack(data_dir, sequence_len)
        hashes = {
            "manifest": file_sha256(data_dir / MANIFEST)[:16],
            "tokenizer": file_sha256(data_dir / "tokenizer" / FILE_NAME)[:16],
            "rows": info.digest[:16],
        }
        train, val = (
            Split(info.open(name), info.sums[name], str(info.path / f"{name}.bin"), info.masked)
            for name in SPLITS
        )
        return cls(Tokenizer.load(data_dir / "tokenizer"), info, train, val, hashes)
