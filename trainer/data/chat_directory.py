"""Makes a data directory of conversations, which `train --stage sft` takes.

prepare_conversations([Source(Path("chats.jsonl"))], Path("chats"), Path("data/tokenizer"))

It has the layout of a data directory of documents (directory.py), with two differences. Each value of the
column `text` of a shard is a conversation, a list of messages as JSON; the conversations are shuffled once.
The manifest has the kind "conversations". Hosts receive, verify and pack both kinds alike.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data import SEED, SHARD_BYTES, DataError
from trainer.data.conversations import ConversationError, describe_bad, find_files, read_file
from trainer.data.corpus import groups_of, source_digest, write_shard
from trainer.data.directory import Clock, Prepared, make_directory
from trainer.data.files import file_sha256, locked
from trainer.data.loader import permutation
from trainer.data.progress import Progress
from trainer.data.rows import CONVERSATIONS
from trainer.data.shards import Entry, shard_name, with_splits

VAL_FRACTION = 0.05
BAD_LINES = "bad lines"
ORDER, VALIDATION = 0, 1  # what a permutation is for


@dataclass(frozen=True)
class Source:
    """A file or folder of conversations to train on.

    path: the path of the file or folder. weight: how many times an epoch contains each conversation of `path`
    that is not used for validation. 2: twice; 0.5: a random half of them, which the seed selects.
    """

    path: Path
    weight: float = 1.0


def prepare_conversations(
    sources: Sequence[Source],
    out: Path,
    tokenizer: Path,
    validation: Sequence[Path] = (),
    val_fraction: float = VAL_FRACTION,
    seed: int = SEED,
    skip_bad: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Prepared:
    """Make the data directory `out` from the conversations of `sources`; returns its figures.

    tokenizer: the folder with the tokenizer of the model to fine-tune. validation: files or folders whose
    conversations are used for validation only. If it is empty, a random part `val_fraction` of all
    conversations, at least one, is used for validation and not for training. seed: determines this part and
    the order. skip_bad: True: leave bad lines out and count them; False: raise DataError if there are any.
    shard_bytes: the approximate size of the text of a shard in bytes. Also raises DataError if a file cannot
    be read, or if no conversation is left for training or validation.
    """
    clock = Clock()
    out = out.resolve()
    given = [(path, source.weight) for source in sources for path in find_files([source.path])]
    of_validation = find_files(validation)
    names = [path for path, _ in given] + of_validation
    arguments = ([weight for _, weight in given], len(of_validation), val_fraction, seed, skip_bad)
    # Of the contents alone: the same conversations give the same manifest on every controller.
    contents = [_sha256(path) for path in names]
    digest = source_digest([], CONVERSATIONS, contents, *arguments, shard_bytes)
    clock.lap("looking")

    def make(folder: Path) -> tuple[list[Entry], Counter[str]]:
        read, bad = _read(names)
        if bad and not skip_bad:
            raise DataError(describe_bad(bad))
        train, val = _split(read, [weight for _, weight in given], val_fraction, seed)
        return _write(train, val, folder, shard_bytes), Counter({BAD_LINES: len(bad)} if bad else {})

    with locked(out / ".lock"):
        return make_directory(out, digest, make, 0, tokenizer, clock, {"kind": CONVERSATIONS})


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None


def _read(files: Sequence[Path]) -> tuple[list[list[bytes]], list[str]]:
    """The conversations of each file, as JSON, and a text for each bad line of all files."""
    read: list[list[bytes]] = []
    bad: list[str] = []
    for path in files:
        read.append([])
        for number, found in read_file(path):
            if isinstance(found, ConversationError):
                bad.append(f"{path}:{number}: {found}")
            else:
                read[-1].append(json.dumps(found, separators=(",", ":")).encode())
    return read, bad


def _split(
    read: Sequence[list[bytes]], weights: Sequence[float], val_fraction: float, seed: int
) -> tuple[list[bytes], list[bytes]]:
    """The conversations for training, weighted and shuffled, and those for validation.

    read: the conversations of each file. weights: the weights of the files for training; the files after
    these are for validation. If there are no files after these, a random part `val_fraction` of all
    conversations is used for validation. Raises DataError if no conversation is left for one of the two.
    """
    files, val = (
        [list(each) for each in read[: len(weights)]],
        [c for each in read[len(weights) :] for c in each],
    )
    if len(read) == len(weights):
        every = [(number, at) for number, each in enumerate(files) for at in range(len(each))]
        n_val = max(1, round(len(every) * val_fraction))
        chosen = {every[i] for i in permutation(len(every), seed, VALIDATION)[:n_val]} if every else set()
        val = [files[number][at] for number, at in sorted(chosen)]
        files = [
            [text for at, text in enumerate(each) if (number, at) not in chosen]
            for number, each in enumerate(files)
        ]
    train: list[bytes] = []
    for number, (each, weight) in enumerate(zip(files, weights, strict=True)):
        whole, part = divmod(round(len(each) * weight), max(1, len(each)))
        train += each * whole
        train += [each[i] for i in permutation(len(each), seed, ORDER, number)[:part]]
    if not train or not val:
        split = "training" if val else "validation"
        raise DataError(
            f"There is no conversation for {split}. At least two are needed, one for training and one for "
            "validation. A small weight (FILE=WEIGHT) can leave out all conversations of its file: raise it."
        )
    return [train[i] for i in permutation(len(train), seed, ORDER)], val


def _write(train: list[bytes], val: list[bytes], folder: Path, shard_bytes: int) -> list[Entry]:
    """Write shards for training, then one for validation, to `folder`; returns their manifest entries.

    shard_bytes: the approximate size of the text of a training shard in bytes.
    """
    entries: list[Entry] = []
    with Progress("writing shards", sum(map(len, train)) + sum(map(len, val))) as progress:
        for number, texts in enumerate([*groups_of(train, shard_bytes), val]):
            entries.append(write_shard(folder / shard_name(number), texts, progress))
    return with_splits(entries)
