"""`python -m trainer prepare`: text -> shards, tokenizer and manifest; with --rows, shards -> packed rows.

python -m trainer prepare --source docs --source more.txt --out data --vocab-size 8192
python -m trainer prepare --rows --data-dir data --sequence-len 256
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.data import DataError
from trainer.data.corpus import MANIFEST, SHARDS, build_shards, read_manifest, source_digest
from trainer.data.files import file_sha256, locked, sync_folder, write_whole
from trainer.data.progress import Progress
from trainer.data.rows import pack
from trainer.data.sources import find_files, shard_texts
from trainer.data.tokenizer import FILE_NAME, MIN_VOCAB_SIZE, Tokenizer

TOKENIZER_SAMPLE_BYTES = 30_000_000  # more text hardly changes the merges


@dataclass
class Prepared:
    """What the closing summary says."""

    documents: int
    text_bytes: int
    shards: int
    val_bytes: int
    vocab_size: int
    reused: str  # "", "shards" or "all"
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, step: str) -> None:
        """What has passed since the last lap was `step`."""
        now = time.monotonic()
        self.seconds[step] = now - self.last
        self.last = now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the subcommand's options."""
    parser.description = (
        "Make shards, a tokenizer and a manifest from text; with --rows, pack them into rows."
    )
    text = parser.add_argument_group("from text")
    text.add_argument(
        "--source",
        action="append",
        type=Path,
        metavar="PATH",
        help="a folder or file of text (.gz too), or a parquet file with a column `text`; may be given again",
    )
    text.add_argument("--out", type=Path, metavar="DIR", help="where to write; reused if nothing has changed")
    text.add_argument(
        "--vocab-size",
        type=int,
        default=32768,
        metavar="N",
        help="tokens, special ones included (%(default)s)",
    )
    text.add_argument(
        "--max-bytes",
        type=int,
        default=0,
        metavar="N",
        help="take at most so much text, from all over (0: all)",
    )
    text.add_argument(
        "--shard-bytes",
        type=int,
        default=100_000_000,
        metavar="N",
        help="text in a shard, about (%(default)s)",
    )
    text.add_argument("--seed", type=int, default=42, metavar="N", help="of the shuffle (%(default)s)")
    rows = parser.add_argument_group("to rows")
    rows.add_argument("--rows", action="store_true", help="pack the shards of --data-dir into rows")
    rows.add_argument("--data-dir", type=Path, metavar="DIR", help="what --out was")
    rows.add_argument("--sequence-len", type=int, metavar="T", help="tokens a row predicts")
    rows.add_argument("--threads", type=int, default=0, metavar="N", help="cores to encode on (0: all)")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Do what the options ask; returns the exit code: 0, or 2 after a sentence on what is wrong."""
    try:
        _check(args)
        return _run_rows(args) if args.rows else _run_corpus(args)
    except DataError as error:
        print(f"prepare: {error}", file=sys.stderr)
    except OSError as error:
        where = error.filename or args.out or args.data_dir
        print(f"prepare: Cannot read or write {where}: {error.strerror or error}.", file=sys.stderr)
    return 2


def _check(args: argparse.Namespace) -> None:
    if args.rows:
        if not args.data_dir or args.sequence_len is None:
            raise DataError("--rows needs --data-dir DIR and --sequence-len T.")
        return
    if not args.source or not args.out:
        raise DataError("Give the text with --source PATH and the place for the shards with --out DIR.")
    for name, value, least in (
        ("--vocab-size", args.vocab_size, MIN_VOCAB_SIZE),
        ("--max-bytes", args.max_bytes, 0),
        ("--shard-bytes", args.shard_bytes, 1),
        ("--seed", args.seed, 0),
    ):
        if value < least:
            raise DataError(f"{name} {value} is too small: give {least} or more.")


def _run_rows(args: argparse.Namespace) -> int:
    info = pack(args.data_dir, args.sequence_len, args.threads)
    if args.json:
        keys = ("digest", "train_rows", "val_rows", "packed", "seconds")
        print(json.dumps({key: getattr(info, key) for key in keys}))
        return 0
    how = "packed" if info.packed else "reused"
    print(f"rows: digest={info.digest} train_rows={info.train_rows} val_rows={info.val_rows} ({how})")
    if info.packed:
        print(f"rows: {info.seconds:.1f} s, {info.tokens_per_s:,.0f} tokens/s")
    return 0


def _run_corpus(args: argparse.Namespace) -> int:
    result = prepare_corpus(
        args.source, args.out, args.vocab_size, args.max_bytes, args.shard_bytes, args.seed
    )
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    if result.reused == "all":
        print(f"prepare: nothing has changed, {args.out} is used as it is")
    elif result.reused:
        print("prepare: the text has not changed, its shards are used as they are")
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(result.skipped.items()))
    print(
        f"prepare: {result.documents:,} documents, {result.text_bytes / 1e6:,.2f} MB of text"
        + (f" (files left out: {skipped})" if skipped else "")
    )
    print(
        f"prepare: {result.shards} shards, the last one ({result.val_bytes / 1e6:,.2f} MB) for validation; "
        f"a vocabulary of {result.vocab_size:,}"
    )
    if result.vocab_size < args.vocab_size:
        print(f"prepare: the text has too few repeated pieces for a vocabulary of {args.vocab_size:,}")
    print("prepare: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in result.seconds.items()))
    return 0


def prepare_corpus(
    sources: Sequence[Path],
    out: Path,
    vocab_size: int = 32768,
    max_bytes: int = 0,
    shard_bytes: int = 100_000_000,
    seed: int = 42,
) -> Prepared:
    """Bring the data directory `out` to what `sources` say; does only what has changed since last time."""
    clock = Clock()
    out = out.resolve()
    files, skipped = find_files(sources, leave_out=out)
    clock.lap("looking")
    if not files:
        names = ", ".join(str(source) for source in sources)
        raise DataError(f"No text found in {names}: give a folder with .txt, .md or .py files.")
    digest = source_digest(files, max_bytes, shard_bytes, seed)
    with locked(out / ".lock"):
        for leftover in out.glob(".preparing-*"):
            shutil.rmtree(leftover)
        manifest = _unchanged(out, digest)
        if manifest and _same_tokenizer(out, manifest, vocab_size):
            return _prepared(out, manifest, "all", clock)
        reused = "shards" if manifest else ""
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=out) as name:
            work = Path(name)
            if not manifest:
                (work / SHARDS).mkdir()
                entries, more = build_shards(files, work / SHARDS, max_bytes, shard_bytes, seed)
                manifest = _manifest(entries, digest, skipped + more)
                clock.lap("shards")
            tokenizer = _learn((out if reused else work) / SHARDS, manifest, vocab_size)
            manifest["tokenizer_sha256"] = file_sha256(tokenizer.save(work / "tokenizer"))
            manifest["requested_vocab_size"] = vocab_size
            clock.lap("tokenizer")
            _put_in_place(work, out, manifest)
    return _prepared(out, manifest, reused, clock)


def _manifest(entries: list[dict[str, Any]], digest: str, skipped: Counter[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "shards": entries,
        "documents": sum(entry["documents"] for entry in entries),
        "text_bytes": sum(entry["text_bytes"] for entry in entries),
        "source_digest": digest,
        "skipped": dict(sorted(skipped.items())),
    }


def _prepared(out: Path, manifest: dict[str, Any], reused: str, clock: Clock) -> Prepared:
    return Prepared(
        documents=manifest["documents"],
        text_bytes=manifest["text_bytes"],
        shards=len(manifest["shards"]),
        val_bytes=manifest["shards"][-1]["text_bytes"],
        vocab_size=Tokenizer.load(out / "tokenizer").vocab_size,
        reused=reused,
        skipped=manifest.get("skipped", {}),
        seconds=clock.seconds | {"all": sum(clock.seconds.values())},
    )


def _unchanged(out: Path, digest: str) -> dict[str, Any] | None:
    """The manifest in `out` if it was made from the same sources and its shards are there."""
    try:
        manifest = read_manifest(out)
        whole = all((out / SHARDS / s["name"]).stat().st_size == s["bytes"] for s in manifest["shards"])
    except (DataError, OSError):
        return None
    return manifest if whole and manifest.get("source_digest") == digest else None


def _same_tokenizer(out: Path, manifest: dict[str, Any], vocab_size: int) -> bool:
    path = out / "tokenizer" / FILE_NAME
    return (
        manifest.get("requested_vocab_size") == vocab_size
        and path.exists()
        and file_sha256(path) == manifest["tokenizer_sha256"]
    )


def _learn(shards: Path, manifest: dict[str, Any], vocab_size: int) -> Tokenizer:
    """A tokenizer for the training shards."""
    train = [entry for entry in manifest["shards"] if entry["split"] == "train"]
    expected = min(sum(entry["text_bytes"] for entry in train), TOKENIZER_SAMPLE_BYTES)
    with Progress("learning the tokenizer", expected) as progress:
        return Tokenizer.train(_sample([shards / entry["name"] for entry in train], progress), vocab_size)


def _sample(shards: Sequence[Path], progress: Progress) -> Iterator[str]:
    """The first documents of the shuffled shards, as many as the tokenizer learns from."""
    for path in shards:
        for batch in shard_texts(path):
            for text in batch:
                yield text
                progress.add(len(text.encode()))
                if progress.done >= TOKENIZER_SAMPLE_BYTES:
                    return


def _put_in_place(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    """Take the old manifest away, move what is new, write the manifest: with one, a directory is whole."""
    (out / MANIFEST).unlink(missing_ok=True)
    for name in (SHARDS, "tokenizer"):
        if (work / name).exists():
            if (out / name).exists():
                shutil.rmtree(out / name)
            os.replace(work / name, out / name)
    sync_folder(out)
    write_whole(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
