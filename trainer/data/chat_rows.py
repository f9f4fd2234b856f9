"""Packs conversations, as they are stored in shards, into padded rows.

    counts = Counter(); rows = chat_rows(texts, tokenizer, sequence_len, counts)

The bit TRAINED of a token (loader.py) marks that the model is trained to predict this token.

The rows are packed once and then selected by loader.py, as rows of documents are: the global batch of a step
is a function of seed and step alone. nanochat packs with the same algorithm during training, from a list of
conversations that it repeats, so its order of conversations differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.conversations import MAX_TOKENS, render
from trainer.data.loader import TRAINED
from trainer.data.packing import fill_padded_rows
from trainer.data.tokenizer import Tokenizer

CHAT_PACKING = 1  # version of the packing of conversations, part of the digest
# What is counted: conversations in the rows; of these, the ones cut to the length of a row; conversations
# that were left out because nothing in a row's length is trained; targets with a loss; padding, in tokens.
COUNTED = ("conversations", "cut", "left_out", "targets", "padding")


def encode(
    texts: Iterable[str], tokenizer: Tokenizer, max_tokens: int, counts: MutableMapping[str, int]
) -> Iterator[NDArray[np.uint32]]:
    """Yield the token ids of each conversation, cut to `max_tokens`; trained tokens have the bit TRAINED.

    texts: conversations, each a list of messages as JSON. counts: receives the counts that COUNTED lists, of
    which `padding` is set to 0 here. A conversation without a trained token is left out, so that each row has
    a target. Raises DataError if the tokenizer lacks the special tokens of conversations.
    """
    counts.update(dict.fromkeys(COUNTED, 0))
    for text in texts:
        ids, mask = render(json.loads(text), tokenizer, max_tokens + 1)
        tokens = np.array(ids[:max_tokens], dtype=np.uint32)
        trained = np.array(mask[:max_tokens], dtype=np.uint32)
        if not trained.any():
            counts["left_out"] += 1
            continue
        counts["conversations"] += 1
        counts["cut"] += len(ids) > max_tokens
        counts["targets"] += int(trained.sum())
        yield tokens | trained * TRAINED


def chat_rows(
    texts: Iterable[str], tokenizer: Tokenizer, sequence_len: int, counts: MutableMapping[str, int]
) -> Iterator[NDArray[Any]]:
    """Yield the rows of conversations, uint32 of shape (sequence_len + 1,).

    texts: conversations, each a list of messages as JSON. A conversation is cut to the length of a row, or to
    MAX_TOKENS if that is less. counts: receives the counts that COUNTED lists; they are complete after the
    last row.
    """
    row_tokens = sequence_len + 1
    tokens = n_rows = 0

    def counted() -> Iterator[NDArray[np.uint32]]:
        nonlocal tokens
        for conversation in encode(texts, tokenizer, min(MAX_TOKENS, row_tokens), counts):
            tokens += len(conversation)
            yield conversation

    for row in fill_padded_rows(counted(), row_tokens, tokenizer.bos_id):
        n_rows += 1
        yield row
    counts["padding"] = n_rows * row_tokens - tokens
