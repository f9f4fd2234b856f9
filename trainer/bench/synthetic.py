"""Synthetic rows for measurements without data: token ids distributed by Zipf's law, as words in text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.data import VOCAB_SIZE
from trainer.data.dataset import Dataset
from trainer.data.rows import RowsInfo, row_dtype
from trainer.data.tokenizer import SPECIAL_TOKENS, Tokenizer

ROWS = 512
SEED = 7


def synthetic(sequence_len: int, vocab_size: int = VOCAB_SIZE) -> Dataset:
    """Create a dataset of random rows in memory. A row has about as many distinct ids as a row of text."""
    draw = np.random.default_rng(SEED)
    weights = 1 / np.arange(1, vocab_size + 1)
    ids = draw.choice(vocab_size, size=(ROWS, sequence_len + 1), p=weights / weights.sum())
    rows = ids.astype(row_dtype(vocab_size))
    merges = [number.to_bytes(1 if number < 256 else 3, "big") for number in range(vocab_size)]
    tokenizer = Tokenizer(merges[: vocab_size - len(SPECIAL_TOKENS)])
    info = RowsInfo(
        path=Path(),
        digest="synthetic",
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        train_rows=ROWS,
        val_rows=ROWS,
        train_sha256="synthetic",
        val_sha256="synthetic",
        packed=False,
    )
    hashes = dict.fromkeys(("manifest", "tokenizer", "rows"), "synthetic")
    return Dataset(tokenizer, info, rows, rows, hashes)
