"""nanochat's tokenizer.pkl, a pickled tiktoken encoding, read without executing code from the file.

    tokenizer = read(Path("tokenizer.pkl"))
    data = pickled(tokenizer)                   # pickle.load gives a tiktoken.Encoding

A pickle is a program. Its instructions are checked before it runs: only those that create strings, bytes,
integers, dictionaries and one object are allowed, so it cannot call anything. The only class it may name is
tiktoken's Encoding, which is replaced by a class that only stores the fields.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import tiktoken

from trainer.data import DataError
from trainer.data.tokenizer import BOS, Tokenizer

LARGEST = 64 * 2**20  # bytes; 65,536 tokens take about one million
ENCODING = ("tiktoken.core", "Encoding")
FIELDS = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}
NAME = "rustbpe"  # name of nanochat's encoding
PROTOCOL = 4  # readable by every Python that runs nanochat

# The instructions that an object of four plain fields needs, at protocols 3 to 5.
INSTRUCTIONS = frozenset(
    [
        *("PROTO", "FRAME", "STOP", "MARK"),
        *("GLOBAL", "STACK_GLOBAL", "EMPTY_TUPLE", "NEWOBJ", "BUILD"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BININT", "BININT1", "BININT2"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    ]
)
# Exceptions of the unpickler for allowed instructions in an invalid order.
INVALID = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    MemoryError,
)


class _Encoding:
    """Replaces tiktoken's Encoding in the pickle; stores the fields and does nothing."""

    fields: Any = None

    def __setstate__(self, state: Any) -> None:
        self.fields = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ENCODING:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _Encoding


def read(path: Path) -> Tokenizer:
    """Read nanochat's tokenizer.pkl without executing code from the file.

    Raises DataError, which names the file, if it cannot be read or is not a tokenizer of nanochat.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise DataError(
                f"{path} has {size:,} bytes, and a tokenizer at most {LARGEST:,}: it is another file. Give "
                "nanochat's tokenizer.pkl."
            )
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"The tokenizer {path} cannot be read: {error.strerror}.") from None
    try:
        return _tokenizer(_fields(data))
    except DataError as error:
        raise DataError(
            f"{path} is not a tokenizer of nanochat that can be imported: {error}. Give the tokenizer.pkl "
            "that nanochat's tokenizer training wrote."
        ) from None


def pickled(tokenizer: Tokenizer) -> bytes:
    """The bytes of a tokenizer.pkl: a pickled tiktoken.Encoding, as nanochat writes it."""
    encoding = tiktoken.Encoding(
        NAME,
        pat_str=tokenizer.pattern,
        mergeable_ranks={piece: rank for rank, piece in enumerate(tokenizer.ranks)},
        special_tokens=tokenizer.specials,
    )
    return pickle.dumps(encoding, protocol=PROTOCOL)


def _fields(data: bytes) -> dict[str, Any]:
    """The four fields of the pickled encoding, by name.

    Raises DataError if one is missing or of another type.
    """
    _check_instructions(data)
    try:
        encoding = _Unpickler(io.BytesIO(data)).load()
    except INVALID as error:
        raise DataError(f"its pickle cannot be read ({error})") from None
    if not isinstance(encoding, _Encoding):
        raise DataError(f"it holds a {type(encoding).__name__}, not an encoding of tiktoken's")
    fields = encoding.fields
    if isinstance(fields, str):
        raise DataError(f"it has only the name of tiktoken's encoding {fields!r}, without its tokens")
    if not isinstance(fields, dict) or fields.keys() != FIELDS.keys():
        raise DataError(f"its encoding must have exactly the fields {', '.join(FIELDS)}")
    for name, kind in FIELDS.items():
        if type(fields[name]) is not kind:
            raise DataError(f"its {name} is a {type(fields[name]).__name__}, not a {kind.__name__}")
    return fields


def _check_instructions(data: bytes) -> None:
    """Raise DataError if the pickle is incomplete or has an instruction that is not allowed.

    Allowed are INSTRUCTIONS. A memo index above the number of instructions so far is refused, because the
    unpickler would allocate memory for all entries up to this index.
    """
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if instruction.name not in INSTRUCTIONS:
                raise DataError(f"its pickle uses {instruction.name}, which plain data does not need")
            # The unpickler allocates all entries of its memo up to the one that is written.
            if instruction.name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
                raise DataError(
                    f"its pickle stores a value at place {argument:,} after only {count:,} instructions"
                )
    except (ValueError, LookupError) as error:
        raise (
            error if isinstance(error, DataError) else DataError(f"it is no whole pickle ({error})")
        ) from None


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer with the four `fields` of an encoding.

    Raises DataError if the ids have a gap, if the special tokens are not the last ones, or if a byte or
    <|bos|> is missing.
    """
    ranks, specials = fields["mergeable_ranks"], fields["special_tokens"]
    for name, kind, table in (("mergeable_ranks", bytes, ranks), ("special_tokens", str, specials)):
        if not all(type(piece) is kind and piece and type(token) is int for piece, token in table.items()):
            wrong = f"a key is empty or not {kind.__name__}, or a value is no whole number"
            raise DataError(f"in its {name}, {wrong}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError("the ids of its mergeable_ranks are not 0, 1, 2 and so on, each once")
    if sorted(specials.values()) != list(range(len(ranks), len(ranks) + len(specials))):
        raise DataError(f"the ids of its special tokens do not follow on its other {len(ranks):,} tokens")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{len(missing)} of the 256 single bytes have no token, such as {missing[0]:#04x}")
    if BOS not in specials:
        raise DataError(f"it has no {BOS}, with which every document begins")
    try:
        return Tokenizer(sorted(ranks, key=ranks.get), fields["pat_str"], sorted(specials, key=specials.get))
    except ValueError as error:
        raise DataError(f"tiktoken refuses its pattern ({str(error).splitlines()[0]})") from None
