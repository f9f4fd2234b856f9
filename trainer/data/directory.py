"""Brings a data directory to what is asked of it, and does only what has changed since last time.

prepare_corpus([folder], out), prepare_shards(folder, out), prepare_public(base_url, count, out)

out/manifest.json            what is here, with sha256, documents, bytes; written last: with it, all is whole
out/shards/                  documents: one parquet file or more to train on, the last one for validation
out/tokenizer/tokenizer.json
out/rows/                    made of them by `pack`
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data import DataError
from trainer.data.corpus import MANIFEST, SHARDS, build_shards, read_manifest, source_digest
from trainer.data.download import download, download_sums, public_shards
from trainer.data.files import file_sha256, link_or_copy, locked, sync_folder, write_whole
from trainer.data.progress import Progress
from trainer.data.shards import SUMS, Entry, adopt, find_shards, read_sums, with_splits
from trainer.data.sources import find_files, shard_texts
from trainer.data.tokenizer import FILE_NAME, Tokenizer

TOKENIZER = "tokenizer"
DOWNLOADS = ".download"
TOKENIZER_SAMPLE_BYTES = 30_000_000  # more text hardly changes the merges

# Makes shards in a folder; returns the manifest's entries and how many files gave no text, by reason.
Make = Callable[[Path], tuple[list[Entry], Counter[str]]]


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer that is wanted: one of `size` tokens that is learnt, or the one in the folder `given`."""

    size: int
    given: Path | None


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


def prepare_corpus(
    sources: Sequence[Path],
    out: Path,
    vocab_size: int = 32768,
    max_bytes: int = 0,
    shard_bytes: int = 100_000_000,
    seed: int = 42,
    tokenizer: Path | None = None,
) -> Prepared:
    """Shards of the text in `sources`, shuffled; `tokenizer` is the folder of one to use and not to learn."""
    clock = Clock()
    out = out.resolve()
    files, skipped = find_files(sources, leave_out=out)
    clock.lap("looking")
    if not files:
        names = ", ".join(str(source) for source in sources)
        raise DataError(f"No text found in {names}: give a folder with .txt, .md or .py files.")

    def make(folder: Path) -> tuple[list[Entry], Counter[str]]:
        entries, more = build_shards(files, folder, max_bytes, shard_bytes, seed)
        return entries, skipped + more

    digest = source_digest(files, max_bytes, shard_bytes, seed)
    with locked(out / ".lock"):
        return _prepare(out, digest, make, Vocabulary(vocab_size, tokenizer), clock)


def prepare_shards(
    folder: Path,
    out: Path,
    vocab_size: int = 32768,
    sums: Path | None = None,
    tokenizer: Path | None = None,
) -> Prepared:
    """The shards of `folder` as they are: the same files, order and split. `sums` lists their sha256."""
    clock = Clock()
    out = out.resolve()
    files = find_shards(folder.resolve())
    if files[0].path.parent.is_relative_to(out):
        raise DataError(f"{folder} is where the shards would go: give another place with --out.")
    beside = files[0].path.parent / SUMS
    names = [path.path.name for path in files] if sums else []
    known = read_sums(sums or beside, names) if sums or beside.exists() else {}
    clock.lap("looking")
    digest = source_digest(files, sorted(known.items()))
    with locked(out / ".lock"):
        vocabulary = Vocabulary(vocab_size, tokenizer)
        return _prepare(out, digest, lambda to: (adopt(files, to, known), Counter()), vocabulary, clock)


def prepare_public(
    base_url: str,
    count: int,
    out: Path,
    vocab_size: int = 32768,
    sums: Path | None = None,
    val_shard: int | None = None,
    tokenizer: Path | None = None,
) -> Prepared:
    """`count` shards of the data set at `base_url`; those that are in `out` already are not asked for."""
    clock = Clock()
    out = out.resolve()
    url, names = public_shards(base_url, count, val_shard)
    given = read_sums(sums, names) if sums else {}

    def make(folder: Path) -> tuple[list[Entry], Counter[str]]:
        known = given or download_sums(url)
        downloads = out / DOWNLOADS / hashlib.sha256(url.encode()).hexdigest()[:16]  # of this URL alone
        downloads.mkdir(parents=True, exist_ok=True)
        kept = _kept(out, url, known)
        fetched = download(url, [name for name in names if name not in kept], downloads, known)
        entries = kept | {entry["name"]: entry for entry in fetched}
        for name in names:
            link_or_copy((out / SHARDS if name in kept else downloads) / name, folder / name)
        return with_splits(entries[name] for name in names), Counter()

    digest = source_digest([], url, *names, sorted(given.items()))
    with locked(out / ".lock"):
        return _prepare(out, digest, make, Vocabulary(vocab_size, tokenizer), clock, {"base_url": url})


def _kept(out: Path, url: str, sums: Mapping[str, str]) -> dict[str, Entry]:
    """The entries of the shards in `out` that came from `url` and are still right."""
    try:
        manifest = read_manifest(out)
    except DataError:
        return {}
    if manifest.get("base_url") != url:
        return {}
    entries = {
        shard["name"]: {k: v for k, v in shard.items() if k != "split"} for shard in manifest["shards"]
    }
    return {
        name: entry
        for name, entry in entries.items()
        if sums.get(name, entry["sha256"]) == entry["sha256"] and _is_there(out, entry)
    }


def _prepare(
    out: Path,
    digest: str,
    make: Make,
    vocabulary: Vocabulary,
    clock: Clock,
    notes: Mapping[str, Any] | None = None,
) -> Prepared:
    """Make shards and tokenizer, as far as `out` has none of that digest; the caller holds its lock."""
    for leftover in out.glob(".preparing-*"):
        shutil.rmtree(leftover)
    given = Tokenizer.load(vocabulary.given) if vocabulary.given else None
    manifest = _unchanged(out, digest)
    if manifest and _same_tokenizer(out, manifest, given, vocabulary.size):
        return _prepared(out, manifest, "all", clock)
    reused = "shards" if manifest else ""
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=out) as name:
        work = Path(name)
        if not manifest:
            (work / SHARDS).mkdir()
            entries, skipped = make(work / SHARDS)
            manifest = _manifest(entries, digest, skipped) | dict(notes or {})
            clock.lap("shards")
        tokenizer = given or _learn((out if reused else work) / SHARDS, manifest, vocabulary.size)
        manifest["tokenizer_sha256"] = file_sha256(tokenizer.save(work / TOKENIZER))
        manifest["requested_vocab_size"] = tokenizer.vocab_size if given else vocabulary.size
        clock.lap("tokenizer")
        _put_in_place(work, out, manifest)
    shutil.rmtree(out / DOWNLOADS, ignore_errors=True)
    return _prepared(out, manifest, reused, clock)


def _manifest(entries: list[Entry], digest: str, skipped: Counter[str]) -> dict[str, Any]:
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
        vocab_size=Tokenizer.load(out / TOKENIZER).vocab_size,
        reused=reused,
        skipped=manifest.get("skipped", {}),
        seconds=clock.seconds | {"all": sum(clock.seconds.values())},
    )


def _unchanged(out: Path, digest: str) -> dict[str, Any] | None:
    """The manifest in `out` if it was made from the same sources and its shards are there."""
    try:
        manifest = read_manifest(out)
    except DataError:
        return None
    whole = all(_is_there(out, entry) for entry in manifest["shards"])
    return manifest if whole and manifest.get("source_digest") == digest else None


def _is_there(out: Path, entry: Entry) -> bool:
    path = out / SHARDS / entry["name"]
    return path.exists() and path.stat().st_size == entry["bytes"]


def _same_tokenizer(out: Path, manifest: dict[str, Any], given: Tokenizer | None, vocab_size: int) -> bool:
    path = out / TOKENIZER / FILE_NAME
    if not path.exists() or file_sha256(path) != manifest["tokenizer_sha256"]:
        return False
    if given:
        return path.read_bytes() == given.to_json()
    return bool(manifest.get("requested_vocab_size") == vocab_size)


def _learn(shards: Path, manifest: dict[str, Any], vocab_size: int) -> Tokenizer:
    """A tokenizer for the training shards."""
    train = [entry for entry in manifest["shards"] if entry["split"] == "train"]
    expected = min(sum(entry["text_bytes"] for entry in train), TOKENIZER_SAMPLE_BYTES)
    with Progress("learning the tokenizer", expected) as progress:
        return Tokenizer.train(_sample([shards / entry["name"] for entry in train], progress), vocab_size)


def _sample(shards: Sequence[Path], progress: Progress) -> Iterator[str]:
    """What the tokenizer learns from: the first documents of each shard, as many as are enough together."""
    for number, path in enumerate(shards, 1):
        enough = TOKENIZER_SAMPLE_BYTES * number // len(shards)
        for batch in shard_texts(path):
            for text in batch:
                if progress.done >= enough:
                    break
                yield text
                progress.add(len(text.encode()))
            if progress.done >= enough:
                break


def _put_in_place(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    """Take the old manifest away, move what is new, write the manifest: with one, a directory is whole."""
    (out / MANIFEST).unlink(missing_ok=True)
    for name in (SHARDS, TOKENIZER):
        if (work / name).exists():
            if (out / name).exists():
                shutil.rmtree(out / name)
            os.replace(work / name, out / name)
    sync_folder(out)
    write_whole(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
