"""Byte-pair encoding: rustbpe trains the merges, tiktoken applies them, a JSON file stores them.

tokenizer = Tokenizer.train(texts, vocab_size=8192); tokenizer.save(folder); Tokenizer.load(folder)
"""

import base64
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import rustbpe
import tiktoken
from numpy.typing import NDArray

from trainer.data import DataError
from trainer.data.files import read_schema_1, write_whole
from trainer.data.text import split_text
from trainer.host.cores import usable_cores

FILE_NAME = "tokenizer.json"

# The split pattern of GPT-4, but with at most two digits in a piece: three would take 1,000 tokens.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
BOS = "<|bos|>"
# The special tokens of nanochat: start of a document, turns of a conversation, calls of a Python tool.
SPECIAL_TOKENS = (
    BOS,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
# The regex engine overflows its stack on about a million blanks: longer text is encoded in pieces.
LONGEST = 200_000  # characters
JOB_CHARACTERS = 100_000
JOBS_AHEAD = 4
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


class Tokenizer:
    """A byte-level BPE tokenizer. Tokens have ids in merge order; the ids of the special tokens follow.

    ranks: the bytes of each token that is not special; the position in the list is the token id. pattern:
    regular expression that splits text into pieces. specials: names of the special tokens.
    """

    def __init__(
        self, ranks: Sequence[bytes], pattern: str = SPLIT_PATTERN, specials: Sequence[str] = SPECIAL_TOKENS
    ) -> None:
        self.ranks = list(ranks)
        self.pattern = pattern
        self.specials = {name: len(self.ranks) + i for i, name in enumerate(specials)}
        self.vocab_size = len(self.ranks) + len(self.specials)
        self.bos_id = self.specials[BOS]
        self._encoding = tiktoken.Encoding(
            "nanofleet",
            pat_str=pattern,
            mergeable_ranks={piece: rank for rank, piece in enumerate(self.ranks)},
            special_tokens=self.specials,
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train a tokenizer of `vocab_size` tokens on `texts`. The special tokens count as tokens.

        If `texts` have too few repeated pieces, the tokenizer has fewer tokens: read its attribute
        `vocab_size`. Raises DataError if the argument `vocab_size` is less than MIN_VOCAB_SIZE.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise DataError(
                f"A vocabulary of {vocab_size} is too small: the 256 bytes and {len(SPECIAL_TOKENS)} special "
                f"tokens alone are {MIN_VOCAB_SIZE}. Give --vocab-size {MIN_VOCAB_SIZE} or more."
            )
        learner = rustbpe.Tokenizer()
        pieces = (piece for text in texts for piece in split_text(text, LONGEST))
        learner.train_from_iterator(pieces, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        by_rank = sorted(learner.get_mergeable_ranks(), key=lambda entry: entry[1])
        return cls([bytes(piece) for piece, _ in by_rank])

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a tokenizer with the same split pattern, tokens and special tokens."""
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """Number of bytes of each token, int32 of shape (vocab_size,); 0 for special tokens.

        Raw bytes are counted, not those of decoded text (a token may be half a character). The sum over the
        tokens of a text is thus the length of its UTF-8.
        """
        return np.array([len(piece) for piece in self.ranks] + [0] * len(self.specials), dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without <|bos|>. Special tokens in `text` are encoded as plain text."""
        return [i for piece in split_text(text, LONGEST) for i in self._encoding.encode_ordinary(piece)]

    def encode_batch(self, texts: Iterable[str], threads: int = 0) -> Iterator[NDArray[np.uint32]]:
        """Yield the token ids of each text, in order, encoded by `threads` threads (0: one per usable core).

        `texts` is consumed lazily. A job is a list of texts with about `JOB_CHARACTERS` characters in all; at
        most `JOBS_AHEAD` jobs per thread are queued.
        """
        threads = threads or usable_cores()
        jobs = _jobs(texts)
        if threads == 1:
            for job in jobs:
                yield from self._encode_job(job)
            return
        with ThreadPoolExecutor(threads) as pool:
            running: deque[Future[list[NDArray[np.uint32]]]] = deque()
            for job in jobs:
                running.append(pool.submit(self._encode_job, job))
                if len(running) > threads * JOBS_AHEAD:
                    yield from running.popleft().result()
            while running:
                yield from running.popleft().result()

    def _encode_job(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        encode = self._encoding.encode_to_numpy
        done = []
        for text in texts:
            pieces = [encode(piece, disallowed_special=()) for piece in split_text(text, LONGEST)]
            done.append(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        return done

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the token `ids`. Invalid UTF-8 becomes the replacement character U+FFFD."""
        return self._encoding.decode(list(ids))

    def to_json(self) -> bytes:
        """The content of tokenizer.json. Equal tokenizers give equal bytes."""
        content = {
            "schema": 1,
            "pattern": self.pattern,
            "special_tokens": list(self.specials),
            "ranks": [base64.b64encode(piece).decode() for piece in self.ranks],
        }
        return (json.dumps(content, ensure_ascii=False, indent=0) + "\n").encode()

    def save(self, folder: Path | str) -> Path:
        """Write tokenizer.json to `folder`, which is created if missing; returns the path of the file."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_json())
        return path

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read tokenizer.json from `folder`.

        Raises DataError if the file is missing or damaged. The message names the file.
        """
        return read_schema_1(Path(folder) / FILE_NAME, "tokenizer", "DIR", cls._from_json)

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Create a tokenizer from `raw`, the bytes that `to_json` returned."""
        return cls._from_json(json.loads(raw))

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> Self:
        ranks = [base64.b64decode(piece, validate=True) for piece in content["ranks"]]
        if len(set(ranks)) != len(ranks) or BOS not in content["special_tokens"]:
            raise ValueError(f"a token occurs twice, or {BOS} is missing")
        return cls(ranks, content["pattern"], content["special_tokens"])


def _jobs(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group `texts` into lists of about JOB_CHARACTERS characters. A thread encodes one list per call."""
    job: list[str] = []
    size = 0
    for text in texts:
        job.append(text)
        size += len(text)
        if size >= JOB_CHARACTERS:
            yield job
            job, size = [], 0
    if job:
        yield job
