"""Upstream's pickled tokenizer: its ids are ours, and nothing else that a pickle can say is done."""

from __future__ import annotations

import copyreg
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import upstream

from trainer.data import DataError
from trainer.data.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer
from trainer.interchange import pickled_tokenizer

TEXTS = [
    "def main(argv):\n\tfor i in range(10):\n\t\tprint(f'{i:03d}')  # ten\r\n\r\n",
    "Numbers: 123, 4567, 89.001; it's, I'm, you'll, WE'RE",
    "naïve Ärger – 日本語 🚀 مرحبا \u0000 e\u0301 \ufffd",
    "<|bos|> and <|user_start|> are text here, <|no_such|> too",
    " " * 300 + "\n\n\n" + "a" * 300 + "=" * 99,
    "",
]


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return upstream.train_tokenizer(TEXTS * 5, 400)


def written(path: Path, data: bytes) -> Path:
    (path / "tokenizer.pkl").write_bytes(data)
    return path / "tokenizer.pkl"


def refusal(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        pickled_tokenizer.read(written(tmp_path, data))
    text = str(caught.value)
    assert str(tmp_path / "tokenizer.pkl") in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_same_text_gives_the_same_ids(encoding: tiktoken.Encoding, tmp_path: Path, protocol: int) -> None:
    tokenizer = pickled_tokenizer.read(written(tmp_path, pickle.dumps(encoding, protocol)))
    assert tokenizer.vocab_size == encoding.n_vocab == 400
    assert tokenizer.bos_id == encoding.encode_single_token("<|bos|>")
    assert tokenizer.specials == {name: encoding.encode_single_token(name) for name in SPECIAL_TOKENS}
    for text in TEXTS:
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)
    assert (
        list(map(len, map(encoding.decode_single_token_bytes, range(391))))
        == tokenizer.token_bytes[:391].tolist()
    )


def test_what_is_written_is_what_upstream_writes(encoding: tiktoken.Encoding, tmp_path: Path) -> None:
    data = pickle.dumps(encoding, 4)
    tokenizer = pickled_tokenizer.read(written(tmp_path, data))
    assert pickled_tokenizer.pickled(tokenizer) == data
    loaded = pickle.loads(pickled_tokenizer.pickled(tokenizer))
    assert type(loaded) is tiktoken.Encoding
    assert loaded.name == "rustbpe"
    assert [loaded.encode_ordinary(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    tokenizer.save(tmp_path / "ours")
    assert Tokenizer.load(tmp_path / "ours") == tokenizer


# -- hostile pickles ---------------------------------------------------------------------------------------


class Calls:
    """Pickled, it calls `function` with `arguments` when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def text_of(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def named(module: str, name: str) -> bytes:
    """STACK_GLOBAL of a name, as protocol 4 has it."""
    return text_of(module) + text_of(name) + b"\x93"


ENCODING = named("tiktoken.core", "Encoding")
MARKER = "NANOFLEET_TEST_WAS_CALLED"


def hostile() -> Iterator[tuple[str, bytes]]:
    """Pickles that set MARKER in the environment, or worse, when a plain pickle.load reads them."""
    command = f"os.environ[{MARKER!r}] = '1'"
    evaluate = f"__import__('os').environ.__setitem__({MARKER!r}, '1')"
    yield "REDUCE of exec", pickle.dumps(Calls(exec, f"import os; {command}"))
    yield "REDUCE of eval", pickle.dumps(Calls(eval, evaluate))
    yield "REDUCE of putenv at protocol 0", pickle.dumps(Calls(os.putenv, MARKER, "1"), 0)
    yield "REDUCE nested in the fields", pickle.dumps({"name": [Calls(eval, evaluate)]})
    yield "INST", b"(S'" + evaluate.replace("'", '"').encode() + b"'\nibuiltins\neval\n."
    yield "OBJ", b"\x80\x04(" + named("builtins", "eval") + text_of(evaluate[:200]) + b"o."
    yield "NEWOBJ of another class", b"\x80\x04" + named("builtins", "set") + b")\x81."
    yield "NEWOBJ_EX", b"\x80\x04" + ENCODING + b")}\x92."
    yield "GLOBAL alone", b"cos\nsystem\n."
    yield "a dotted name", b"\x80\x04" + named("tiktoken.core", "functools.partial") + b")\x81."
    yield "the encoding's own method", b"\x80\x04" + named("tiktoken.core", "Encoding.__init__") + b"."
    yield "REDUCE of the encoding", b"\x80\x04" + ENCODING + b")R."
    yield "EXT1", b"\x80\x02\x82\xf0" + b"(" + text_of(evaluate[:200]) + b"tR."
    yield "PERSID", b"Pevil\n."
    yield "BINPERSID", b"\x80\x04" + text_of("evil") + b"Q."
    yield "BUILD of the class itself", b"\x80\x04" + ENCODING + b"}" + text_of("x") + text_of("y") + b"sb."
    yield "a place of the memory far out", b"\x80\x04}r" + struct.pack("<I", 2**31 - 1) + b"."
    yield "a string longer than the file", b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x."
    yield "bytes longer than the file", b"\x80\x04B" + struct.pack("<I", 2**31) + b"x."
    yield "a frame longer than the file", b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}."
    yield "a bytearray of any length", b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"."
    yield "a number of any length", b"\x80\x04\x8b" + struct.pack("<i", 2**30) + b"."
    yield "memory that was never written", b"\x80\x04h\x07."
    yield "a stack that runs empty", b"\x80\x04s."
    yield "an unhashable key", b"\x80\x04}}}s."
    yield "items for what takes none", b"\x80\x04" + ENCODING + b")\x81" + text_of("x") + text_of("y") + b"s."
    yield "no instruction at all", b""
    yield "no pickle", b"PK\x03\x04 this is a zip file"
    yield "no end", pickle.dumps({"name": "x"})[:-1]


@pytest.mark.parametrize("data", [pytest.param(data, id=kind) for kind, data in hostile()])
def test_nothing_in_a_pickle_is_executed(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MARKER, raising=False)
    assert "is not a tokenizer of nanochat" in refusal(tmp_path, data)
    assert MARKER not in os.environ


def test_the_hostile_pickles_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER, raising=False)
    cases = dict(hostile())
    for kind in ("REDUCE of exec", "REDUCE of eval", "REDUCE nested in the fields"):
        pickle.loads(cases[kind])
        assert os.environ.pop(MARKER) == "1"


def test_an_extension_someone_registered_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registered code that was used once is cached and needs no find_class any more."""
    monkeypatch.delenv(MARKER, raising=False)
    copyreg.add_extension("builtins", "eval", 0xF0)
    try:
        data = dict(hostile())["EXT1"]
        pickle.loads(data)
        assert os.environ.pop(MARKER) == "1"
        assert "EXT1" in refusal(tmp_path, data)
        assert MARKER not in os.environ
    finally:
        copyreg.remove_extension("builtins", "eval", 0xF0)
        copyreg.clear_extension_cache()


# -- encodings that are none, or none of ours --------------------------------------------------------------


def stated(state: object) -> bytes:
    """A pickle of tiktoken's encoding with this state, as tiktoken would never write it."""
    body = pickle.dumps(state, 4)
    start = 2 + (9 if body[2:3] == b"\x95" else 0)  # PROTO, and FRAME where there is one
    return b"\x80\x04" + ENCODING + b")\x81" + body[start:-1] + b"b."


BYTES = {bytes([i]): i for i in range(256)}
GOOD = {"name": "x", "pat_str": SPLIT_PATTERN, "mergeable_ranks": BYTES, "special_tokens": {"<|bos|>": 256}}


def test_the_least_tokenizer_is_taken_in(tmp_path: Path) -> None:
    tokenizer = pickled_tokenizer.read(written(tmp_path, stated(GOOD)))
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("hé") == [*"hé".encode()]


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"name": 3}, "name is a int"),
        ({"pat_str": b"x"}, "pat_str is a bytes"),
        ({"pat_str": "("}, "refuses its pattern"),
        ({"mergeable_ranks": "x"}, "mergeable_ranks is a str"),
        ({"mergeable_ranks": {}, "special_tokens": {"<|bos|>": 0}}, "256 of the 256"),
        ({"mergeable_ranks": {**BYTES, "x": 256}}, "in its mergeable_ranks, a key is empty or not bytes"),
        ({"mergeable_ranks": {**BYTES, b"": 256}}, "in its mergeable_ranks, a key is empty or not bytes"),
        ({"mergeable_ranks": {**BYTES, b"ab": {}}}, "in its mergeable_ranks, a key is empty or not bytes"),
        ({"mergeable_ranks": {**BYTES, b"ab": 300}}, "are not 0, 1, 2"),
        ({"mergeable_ranks": {**BYTES, b"ab": 255}}, "are not 0, 1, 2"),
        ({"mergeable_ranks": {b"x" * (i + 1): i for i in range(256)}}, "255 of the 256 single bytes"),
        ({"special_tokens": {"<|bos|>": 300}}, "do not follow"),
        ({"special_tokens": {"<|bos|>": 256, "<|end|>": 258}}, "do not follow"),
        ({"special_tokens": {"<|bos|>": 0}}, "do not follow"),
        ({"special_tokens": {"<|endoftext|>": 256}}, "has no <|bos|>"),
        ({"special_tokens": {}}, "has no <|bos|>"),
        ({"extra": 1}, "exactly the fields name, pat_str"),
    ],
)
def test_fields_of_another_kind_end_in_a_sentence(
    change: dict[str, Any], printed: str, tmp_path: Path
) -> None:
    assert printed in refusal(tmp_path, stated({**GOOD, **change}))


def test_other_things_end_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "only the name of tiktoken's encoding 'cl100k_base'" in refusal(tmp_path, stated("cl100k_base"))
    assert "exactly the fields name, pat_str" in refusal(tmp_path, b"\x80\x04" + ENCODING + b")\x81.")
    assert "it holds a dict" in refusal(tmp_path, pickle.dumps(GOOD, 4))
    monkeypatch.setattr(pickled_tokenizer, "LARGEST", 1000)
    path = written(tmp_path, stated(GOOD))
    with pytest.raises(DataError, match="a tokenizer at most 1,000: it is another file"):
        pickled_tokenizer.read(path)
    with pytest.raises(DataError, match="cannot be read"):
        pickled_tokenizer.read(tmp_path / "none.pkl")


def test_special_tokens_may_be_others_in_any_order(tmp_path: Path) -> None:
    data = stated({**GOOD, "special_tokens": {"<|end|>": 257, "<|bos|>": 256}})
    tokenizer = pickled_tokenizer.read(written(tmp_path, data))
    assert tokenizer.specials == {"<|bos|>": 256, "<|end|>": 257}
