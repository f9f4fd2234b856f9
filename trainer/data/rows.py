"""Packs the shards of a data directory into files of rows of T+1 tokens, and memory-maps these files.

    info = pack(data_dir, sequence_len); rows = info.open("train")

packing.py fills the rows. Rows of conversations (chat_rows.py) are padded, and the bit TRAINED of loader.py
marks the tokens that the model is trained to predict. The sha256 of each file is stored when the file is
packed, and verified whenever `pack` finds the file. The same pass over the bytes computes the checksum of
each row for loader.py.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data import DataError
from trainer.data.chat_rows import CHAT_PACKING, chat_rows
from trainer.data.corpus import SHARDS, read_manifest
from trainer.data.files import file_sha256, locked, sync_file, sync_folder, write_json
from trainer.data.loader import row_sums
from trainer.data.packing import fill_rows
from trainer.data.progress import Progress
from trainer.data.sources import text_columns
from trainer.data.tokenizer import FILE_NAME, Tokenizer

PACKING = 1  # version of the packing algorithm, part of the digest
SPLITS = ("train", "val")
MAKER = (
    "the command that made the data directory (python -m trainer prepare or conversations, with its "
    "options). If it is on a host of a fleet, send it again instead: ansible-playbook setup.yml or, if it "
    "contains conversations, the train.yml command of the run"
)
CONVERSATIONS = "conversations"  # the kind of a manifest; that of documents has none
BLOCK_BYTES = 2**20  # per read, about


@dataclass(frozen=True)
class RowsInfo:
    """The packed rows of a data directory for one sequence length.

    path: the folder of the files. digest: a hash of everything that determines the rows (see `rows_digest`).
    sequence_len: T. vocab_size: the number of tokens of the tokenizer.
    train_rows, val_rows: the number of rows of each split.
    train_sha256, val_sha256: the sha256 of each split's file.
    packed: True if `pack` has packed the rows in this call, False if it has found them.
    seconds, tokens_per_s: duration and rate of the packing; 0 if `packed` is False.
    masked: True for rows of conversations, False for rows of documents.
    counts: {split: {key of chat_rows.COUNTED: number}} for conversations; {} for documents.
    sums: {"train" or "val": CRC-32 of each row}; {} if the files were not verified.
    """

    path: Path
    digest: str
    sequence_len: int
    vocab_size: int
    train_rows: int
    val_rows: int
    train_sha256: str
    val_sha256: str
    packed: bool
    masked: bool = False
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    sums: Mapping[str, NDArray[np.uint32]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def row_bytes(self) -> int:
        """The size of a row in the files, in bytes."""
        return (self.sequence_len + 1) * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the token ids in the files."""
        return np.dtype(np.uint32) if self.masked else row_dtype(self.vocab_size)

    def open(self, split: str) -> NDArray[Any]:
        """The rows of "train" or "val", (n, T+1), memory-mapped: only rows that are indexed are read."""
        return np.memmap(
            self.path / f"{split}.bin",
            dtype=self.dtype,
            mode="r",
            shape=(getattr(self, f"{split}_rows"), self.sequence_len + 1),
        )


def is_chat(manifest: Mapping[str, Any]) -> bool:
    """Whether the shards of a data directory hold conversations, not documents.

    manifest: content of the manifest.json of the data directory.
    """
    return manifest.get("kind") == CONVERSATIONS


def row_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype of token ids: uint16 for a vocabulary of up to 65,536 tokens, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def rows_digest(manifest: dict[str, Any], tokenizer_sha256: str, sequence_len: int) -> str:
    """A sha256, 64 hex digits, of everything that determines the packed rows.

    Its input: the sha256 of each shard and of the tokenizer, the kind of the data, the sequence length, and
    the version of the packing algorithm. manifest: content of manifest.json, with the sha256 of the shards
    and the kind. tokenizer_sha256: the sha256 of tokenizer.json. sequence_len: T.
    """
    shards = [shard["sha256"] for shard in manifest["shards"]]
    content = [PACKING, shards, tokenizer_sha256, sequence_len]
    if is_chat(manifest):
        content.append([CONVERSATIONS, CHAT_PACKING])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def pack(data_dir: Path | str, sequence_len: int, threads: int = 0) -> RowsInfo:
    """Find the rows of `sequence_len` + 1 tokens in `data_dir`; pack them if they are missing or damaged.

    Several processes of a host may call this function at once: one process packs, the others wait and use
    the same files. `threads` threads encode documents (0: one per usable core); the rows do not depend on
    this number. Raises DataError if `sequence_len` is less than 2, if the data are missing, damaged or too
    little, or if the rows cannot be written.
    """
    if sequence_len < 2:
        raise DataError(f"A sequence length of {sequence_len} is too small: give 2 or more.")
    data_dir = Path(data_dir)
    manifest = read_manifest(data_dir)
    tokenizer = Tokenizer.load(data_dir / "tokenizer")
    tokenizer_sha256 = file_sha256(data_dir / "tokenizer" / FILE_NAME)
    if tokenizer_sha256 != manifest.get("tokenizer_sha256"):
        raise DataError(
            f"{data_dir / 'tokenizer' / FILE_NAME} is not the tokenizer that the manifest names: it was "
            f"replaced or is damaged. Repeat {MAKER}"
        )
    digest = rows_digest(manifest, tokenizer_sha256, sequence_len)
    folder = data_dir / "rows" / digest[:16]
    found, damage = _find(folder, digest)
    if found:
        return found
    if damage:
        print(f"warning: {damage} The rows are packed again.", file=sys.stderr, flush=True)
    try:
        with locked(data_dir / "rows" / ".lock"):
            found, _ = _find(folder, digest)
            if found:
                return found
            info = _pack(data_dir, manifest, tokenizer, digest, sequence_len, threads)
            _remove_stale(data_dir / "rows", manifest, tokenizer_sha256)
    except (OSError, DataError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            size = 4 if is_chat(manifest) else row_dtype(tokenizer.vocab_size).itemsize
            problem = (
                f"The rows cannot be written to {data_dir / 'rows'}: {error.strerror or error}. They take "
                f"{size} bytes a token. Fix that and type the same again."
            )
        if damage:
            problem = (
                f"{damage} This process cannot pack them again. Fix: python -m trainer prepare --rows "
                f"--data-dir {data_dir} --sequence-len {sequence_len} (the playbooks setup.yml and train.yml "
                f"do it too). {problem}"
            )
        raise DataError(problem) from None
    return info


def _remove_stale(rows: Path, manifest: dict[str, Any], tokenizer_sha256: str) -> None:
    """Delete the folders in `rows` that belong to other shards or another tokenizer, or that are damaged.

    Rows of other sequence lengths stay. A process that has memory-mapped a file can still read it after the
    deletion.
    """
    for folder in rows.glob("[!.]*"):
        try:
            length = json.loads((folder / "meta.json").read_bytes())["sequence_len"]
            name = rows_digest(manifest, tokenizer_sha256, length)[:16]
        except (OSError, ValueError, KeyError, TypeError):
            name = ""
        if folder.name != name:
            shutil.rmtree(folder)


def _pack(
    data_dir: Path,
    manifest: dict[str, Any],
    tokenizer: Tokenizer,
    digest: str,
    sequence_len: int,
    threads: int,
) -> RowsInfo:
    folder = data_dir / "rows" / digest[:16]
    for leftover in folder.parent.glob(".packing-*"):
        shutil.rmtree(leftover)
    temporary = folder.parent / f".packing-{digest[:16]}"
    temporary.mkdir()
    started = time.monotonic()
    try:
        meta: dict[str, Any] = {
            "digest": digest,
            "sequence_len": sequence_len,
            "vocab_size": tokenizer.vocab_size,
        }
        counts: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        if is_chat(manifest):
            meta |= {"masked": True, "counts": counts}
        for split in SPLITS:
            shards = [shard for shard in manifest["shards"] if shard["split"] == split]
            with Progress(f"packing {split} rows", sum(shard["text_bytes"] for shard in shards)) as progress:
                texts = _texts(data_dir, shards, progress)
                if is_chat(manifest):
                    rows = chat_rows(texts, tokenizer, sequence_len, counts[split])
                else:
                    documents = _encoded(texts, tokenizer, threads)
                    rows = fill_rows(documents, sequence_len + 1, tokenizer.bos_id)
                meta[f"{split}_rows"], meta[f"{split}_sha256"] = _write_rows(temporary / f"{split}.bin", rows)
        _refuse_too_little(meta, data_dir)
        write_json(temporary / "meta.json", meta)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    seconds = time.monotonic() - started
    tokens = (meta["train_rows"] + meta["val_rows"]) * (sequence_len + 1)
    return _compare(
        RowsInfo(path=folder, packed=True, seconds=seconds, tokens_per_s=tokens / seconds, **meta)
    )


def _refuse_too_little(meta: dict[str, Any], data_dir: Path) -> None:
    if meta.get("masked") and not (meta["train_rows"] and meta["val_rows"]):
        split = "val" if meta["train_rows"] else "train"
        raise DataError(
            f"No conversation of the {split} split of {data_dir} has text of an assistant in its first "
            f"{meta['sequence_len'] + 1} tokens, so there is nothing to predict. Use a greater sequence "
            "length: with the playbooks -e sequence_len=N, by hand --sequence-len N."
        )
    for split, least in () if meta.get("masked") else (("train", 2), ("val", 1)):
        if meta[f"{split}_rows"] < least:
            raise DataError(
                f"Too little text in {data_dir}: the {split} split fills {meta[f'{split}_rows']} row(s) of "
                f"{meta['sequence_len'] + 1} tokens, and at least {least} are needed. Make the data "
                "directory from more text, or use a smaller sequence length: with the playbooks "
                "-e sequence_len=N, by hand --sequence-len N."
            )


def _encoded(texts: Iterator[str], tokenizer: Tokenizer, threads: int) -> Iterator[NDArray[Any]]:
    """Yield each document of `texts`, in order, as an array: <|bos|> and the token ids of its text."""
    dtype = row_dtype(tokenizer.vocab_size)
    for ids in tokenizer.encode_batch(texts, threads):
        document = np.empty(len(ids) + 1, dtype=dtype)
        document[0] = tokenizer.bos_id
        document[1:] = ids
        yield document


def _texts(data_dir: Path, shards: list[dict[str, Any]], progress: Progress) -> Iterator[str]:
    for shard in shards:
        path = data_dir / SHARDS / shard["name"]
        if path.exists() and file_sha256(path, lambda _: progress.add(0)) != shard["sha256"]:
            raise DataError(
                f"The shard {path} is damaged: its sha256 is not the one in the manifest. Delete it, and "
                f"repeat {MAKER}"
            )
        for column in text_columns(path):
            progress.add(pc.sum(pc.binary_length(column)).as_py() or 0)
            yield from (text for text in column.to_pylist() if text)


def _write_rows(path: Path, rows: Iterator[NDArray[Any]]) -> tuple[int, str]:
    n_rows = 0
    sha256 = hashlib.sha256()
    with open(path, "wb", buffering=2**20) as file:
        for row in rows:
            data = row.tobytes()
            sha256.update(data)
            file.write(data)
            n_rows += 1
        sync_file(file)
    return n_rows, sha256.hexdigest()


def _read_info(folder: Path, digest: str) -> RowsInfo | None:
    """The RowsInfo of `folder` if its files are complete and meta.json has this `digest`, else None."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        info = RowsInfo(path=folder, packed=False, **meta)
        sizes = {split: (folder / f"{split}.bin").stat().st_size for split in SPLITS}
    except (OSError, ValueError, TypeError):
        return None
    whole = sizes == {"train": info.train_rows * info.row_bytes, "val": info.val_rows * info.row_bytes}
    return info if whole and info.digest == digest else None


def _find(folder: Path, digest: str) -> tuple[RowsInfo | None, str]:
    """The rows in `folder` and "" if their sha256 is right, else None and a sentence on the damage.

    The sentence is empty if the rows are missing or incomplete.
    """
    info = _read_info(folder, digest)
    if info is None:
        return None, ""
    try:
        return _compare(info), ""
    except (OSError, DataError) as error:
        return None, str(error)


def _compare(info: RowsInfo) -> RowsInfo:
    """Verify the sha256 of both files; returns `info` with `sums` set.

    Raises DataError if a sha256 differs.
    """
    sums = {}
    total = (info.train_rows + info.val_rows) * info.row_bytes
    with Progress("comparing rows with their sha256", total) as progress:
        for split in SPLITS:
            path = info.path / f"{split}.bin"
            sha256, sums[split] = _read_sums(path, info.row_bytes, progress)
            if sha256 != getattr(info, f"{split}_sha256"):
                raise DataError(
                    f"{path} has changed since it was packed (its sha256 differs): the file was changed, "
                    "or the disk or the memory of this host is faulty. If it happens again, test them "
                    "(smartctl -a, memtest86+)."
                )
    return replace(info, sums=sums)


def _read_sums(path: Path, row_bytes: int, progress: Progress) -> tuple[str, NDArray[np.uint32]]:
    """The sha256 (64 hex digits) of a file of rows, and the CRC-32 of each row, computed in one pass."""
    sha256, sums = hashlib.sha256(), [np.empty(0, dtype=np.uint32)]
    with open(path, "rb") as file:
        while block := file.read(max(1, BLOCK_BYTES // row_bytes) * row_bytes):
            sha256.update(block)
            sums.append(row_sums(np.frombuffer(block, dtype=np.uint8).reshape(-1, row_bytes)))
            progress.add(len(block))
    return sha256.hexdigest(), np.concatenate(sums)
