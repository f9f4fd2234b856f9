"""The tokenizer: what goes in comes out, numbers stay short, and its file is plain data."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.data import DataError
from trainer.data.tokenizer import BOS, MIN_VOCAB_SIZE, SPECIAL_TOKENS, Tokenizer

TEXTS = ["the cat sat on the mat, a yellow dog quickly jumped over it; 123456 times\n"] * 20
UNICODE = "naïve Ärger – 日本語 🚀\r\n\tمرحبا\u0000 e\u0301"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.mark.parametrize(
    "text", [UNICODE, "", " " * 5000, "-" * 5000, "a" * 5000, TEXTS[0], "<|bos|> is text"]
)
def test_encoding_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocab_size_includes_the_nine_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert len(SPECIAL_TOKENS) == 9
    assert tokenizer.bos_id == 291
    assert tokenizer.decode([tokenizer.bos_id]) == BOS


def test_training_is_deterministic_and_compresses(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(iter(TEXTS), 300).ranks == tokenizer.ranks
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_numbers_are_kept_to_two_digits() -> None:
    tokenizer = Tokenizer.train(["1234567890"] * 50, 400)
    assert max(len(piece) for piece in tokenizer.ranks) == 2


def test_a_special_token_in_text_stays_text(tokenizer: Tokenizer) -> None:
    assert max(tokenizer.encode("<|bos|>")) < tokenizer.bos_id


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(UNICODE)
    assert int(tokenizer.token_bytes[ids].sum()) == len(UNICODE.encode())
    assert tokenizer.token_bytes[-9:].tolist() == [0] * 9
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


def test_a_tokens_length_is_that_of_its_raw_bytes() -> None:
    # Tokens that are parts of characters, which decoding would show as the 3 bytes of U+FFFD.
    tokenizer = Tokenizer.train(["日本語 " * 30, "éèê " * 30], 290)
    text = "日本語 éü🚀"
    ids = tokenizer.encode(text)
    assert [len(tokenizer._encoding.decode_single_token_bytes(i)) for i in ids] == tokenizer.token_bytes[
        ids
    ].tolist()
    assert tokenizer.token_bytes[:256].tolist() == [1] * 256
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert len(tokenizer.decode([ids[-1]]).encode()) == 3 > tokenizer.token_bytes[ids[-1]]
    assert [tokenizer.token_bytes[i] for i in tokenizer.specials.values()] == [0] * 9


def test_batches_are_encoded_as_they_are_asked_for(tokenizer: Tokenizer) -> None:
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield "x" * 10_000

    encoded = tokenizer.encode_batch(texts(), 2)
    next(encoded)
    assert taken < 150
    encoded.close()


def test_batch_encoding_equals_encoding(tokenizer: Tokenizer) -> None:
    texts = [UNICODE, *TEXTS, ""]
    for threads in (1, 2):
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts, threads)] == [
            tokenizer.encode(text) for text in texts
        ]


def test_text_longer_than_the_engine_bears_is_encoded(tokenizer: Tokenizer) -> None:
    text = " " * 1_200_000 + "end"
    (ids,) = tokenizer.encode_batch([text], 1)
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.encode(text) == ids.tolist()


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tokenizer.save(tmp_path / "tokenizer")
    first = path.read_bytes()
    loaded = Tokenizer.load(tmp_path / "tokenizer")
    assert loaded.encode(UNICODE) == tokenizer.encode(UNICODE)
    assert (loaded.vocab_size, loaded.bos_id) == (tokenizer.vocab_size, tokenizer.bos_id)
    assert loaded.save(tmp_path / "again").read_bytes() == first
    assert json.loads(first)["special_tokens"] == list(SPECIAL_TOKENS)


def test_too_little_text_gives_a_smaller_vocabulary() -> None:
    tokenizer = Tokenizer.train(["ab"], 2000)
    assert tokenizer.vocab_size < 300
    assert tokenizer.bos_id == tokenizer.vocab_size - 9


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match=f"--vocab-size {MIN_VOCAB_SIZE}"):
        Tokenizer.train(TEXTS, 100)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"schema": 2}',
        '{"schema": 1, "ranks": ["?"]}',
        '{"schema": 1, "ranks": [], "special_tokens": []}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_shows_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="python -m trainer prepare"):
        Tokenizer.load(tmp_path)
