"""Makes or updates a data directory. Shards and a tokenizer that still match their sources are kept.

prepare_corpus([folder], out), prepare_shards(folder, out), prepare_public(base_url, count, out)

out/manifest.json            sha256, number of documents and bytes of each shard; written last, so that its
                             presence means that the directory is complete
out/shards/                  parquet files with documents; the last one is for validation
out/tokenizer/tokenizer.json
out/rows/                    packed rows, written by `rows.pack`
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.data import SEED, SHARD_BYTES, VOCAB_SIZE, DataError
from trainer.data.corpus import MANIFEST, SHARDS, build_shards, read_manifest, source_digest
from trainer.data.download import download, download_sums, public_shards
from trainer.data.files import file_sha256, link_or_copy, locked, sync_folder, write_json
from trainer.data.manual_pages import find_mandoc
from trainer.data.progress import Progress
from trainer.data.shards import SUMS, Entry, adopt, find_shards, read_sums, with_splits
from trainer.data.sources import MANUAL, find_files, shard_texts
from trainer.data.tokenizer import FILE_NAME, Tokenizer

TOKENIZER = "tokenizer"
DOWNLOADS = ".download"
TOKENIZER_SAMPLE_BYTES = 30_000_000  # more text hardly changes the merges

# Writes shards to a folder; returns their manifest entries and the number of skipped files by reason.
Make = Callable[[Path], tuple[list[Entry], Counter[str]]]


@dataclass
class Prepared:
    """The figures of a prepared data directory, which `prepare` prints at its end.

    documents: the number of documents. text_bytes: the size of their text in bytes.
    shards: the number of shards, the validation shard included.
    val_bytes: the size of the text in the validation shard in bytes.
    vocab_size: the number of tokens of the tokenizer.
    reused: "" if shards and tokenizer are new, "shards" if the shards were kept, "all" if both were kept.
    skipped: {reason: number of skipped files}; for conversations {"bad lines": number of skipped lines}.
    seconds: {step of the preparation, or "all": seconds}.
    """

    documents: int
    text_bytes: int
    shards: int
    val_bytes: int
    vocab_size: int
    reused: str
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Clock:
    """Measures how long each step of a preparation takes. seconds: {name of the step: its seconds}."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, step: str) -> None:
        """Record the seconds since the last call, or since the construction, as those of `step`."""
        now = time.monotonic()
        self.seconds[step] = now - self.last
        self.last = now


def prepare_corpus(
    sources: Sequence[Path],
    out: Path,
    vocab_size: int = VOCAB_SIZE,
    max_bytes: int = 0,
    shard_bytes: int = SHARD_BYTES,
    seed: int = SEED,
    tokenizer: Path | None = None,
) -> Prepared:
    """Make the data directory `out`, shards and a tokenizer, from the text in `sources`; returns its figures.

    sources: files and folders. max_bytes: the limit of the text in bytes; 0: no limit. shard_bytes: the
    approximate size of the text of a shard in bytes. seed: determines the order of the documents. tokenizer:
    the folder of an existing tokenizer; None: a tokenizer of `vocab_size` tokens is trained. Raises DataError
    if a source or the tokenizer cannot be used, or if there is too little text.
    """
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

    # A file that could not be read is read again once its permissions have changed.
    unreadable = [file.name for file in files if not os.access(file.name, os.R_OK)]
    digest = source_digest(files, max_bytes, shard_bytes, seed, *([unreadable] if unreadable else []))
    with locked(out / ".lock"):
        return make_directory(out, digest, make, vocab_size, tokenizer, clock)


def prepare_shards(
    folder: Path,
    out: Path,
    vocab_size: int = VOCAB_SIZE,
    sums: Path | None = None,
    tokenizer: Path | None = None,
) -> Prepared:
    """Make the data directory `out` from the shards of `folder`, unchanged and in the order of their names.

    `sums` is a file with the sha256 of each shard (default: SHA256SUMS beside the shards, if it exists). For
    `vocab_size` and `tokenizer` see `prepare_corpus`. Raises DataError if a shard, `sums` or the tokenizer
    cannot be used, or if a sha256 differs.
    """
    clock = Clock()
    out = out.resolve()
    files = find_shards(folder.resolve())
    if files[0].path.parent.is_relative_to(out):
        raise DataError(f"{folder} is the output folder. Give another one with --out.")
    beside = files[0].path.parent / SUMS
    names = [path.path.name for path in files] if sums else []
    known = read_sums(sums or beside, names) if sums or beside.exists() else {}
    clock.lap("looking")
    digest = source_digest(files, sorted(known.items()))
    with locked(out / ".lock"):
        return make_directory(
            out, digest, lambda to: (adopt(files, to, known), Counter()), vocab_size, tokenizer, clock
        )


def prepare_public(
    base_url: str,
    count: int,
    out: Path,
    vocab_size: int = VOCAB_SIZE,
    sums: Path | None = None,
    val_shard: int | None = None,
    tokenizer: Path | None = None,
) -> Prepared:
    """Download `count` shards of the data set at `base_url` and make the data directory `out` from them.

    Valid shards that `out` already has are kept. For `base_url` and `val_shard` see `public_shards`; for the
    other arguments see `prepare_shards`. Raises DataError if an argument is invalid or a download fails.
    """
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
        return make_directory(out, digest, make, vocab_size, tokenizer, clock, {"base_url": url})


def _kept(out: Path, url: str, sums: Mapping[str, str]) -> dict[str, Entry]:
    """The manifest entries, by name, of the shards in `out` that came from `url` and are still valid.

    A shard is valid if its file has the right size and its sha256 is that of `sums`, if `sums` lists it.
    """
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


def make_directory(
    out: Path,
    digest: str,
    make: Make,
    vocab_size: int,
    tokenizer_dir: Path | None,
    clock: Clock,
    notes: Mapping[str, Any] | None = None,
) -> Prepared:
    """Make the shards, the tokenizer and the manifest of `out`; returns its figures.

    The caller holds the lock of `out`.
    digest: the digest of sources and options (`source_digest`). Shards of this digest are kept if all their
        files exist and have their sizes, unless manual pages were skipped and mandoc is installed now.
    make: writes the shards to a folder; returns (manifest entries, number of skipped files by reason).
    vocab_size: the number of tokens of a tokenizer to train.
    tokenizer_dir: the folder of an existing tokenizer to copy; None: a tokenizer is trained. If the
        shards are kept, an undamaged tokenizer in `out` is kept too, if it equals the existing tokenizer or,
        with None, was made for `vocab_size` tokens.
    clock: records the seconds of each part of the preparation.
    notes: more entries for the manifest.
    Raises DataError if `out` has data of another kind: text where conversations are to be written, or the
    reverse.
    """
    _check_kind(out, dict(notes or {}).get("kind"))
    for leftover in out.glob(".preparing-*"):
        shutil.rmtree(leftover)
    given = Tokenizer.load(tokenizer_dir) if tokenizer_dir else None
    manifest = _unchanged(out, digest)
    if manifest and _same_tokenizer(out, manifest, given, vocab_size):
        return _prepared(out, manifest, "all", clock)
    reused = "shards" if manifest else ""
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=out) as name:
        work = Path(name)
        if not manifest:
            (work / SHARDS).mkdir()
            entries, skipped = make(work / SHARDS)
            manifest = _manifest(entries, digest, skipped) | dict(notes or {})
            clock.lap("shards")
        tokenizer = given or _learn((out if reused else work) / SHARDS, manifest, vocab_size)
        manifest["tokenizer_sha256"] = file_sha256(tokenizer.save(work / TOKENIZER))
        manifest["requested_vocab_size"] = tokenizer.vocab_size if given else vocab_size
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
    """The manifest in `out` if it has this source digest and its shard files have their sizes, else None.

    Also None if manual pages were skipped because mandoc was missing, and mandoc is installed now.
    """
    try:
        manifest = read_manifest(out)
    except DataError:
        return None
    whole = all(_is_there(out, entry) for entry in manifest["shards"])
    readable_now = MANUAL in manifest.get("skipped", {}) and find_mandoc()
    return manifest if whole and not readable_now and manifest.get("source_digest") == digest else None


def _check_kind(out: Path, kind: str | None) -> None:
    """Raise DataError if `out` has data of another kind. kind: as in the manifest; None: text."""
    try:
        existing = read_manifest(out).get("kind")
    except DataError:
        return
    if existing != kind:
        raise DataError(
            f"{out} has {existing or 'the text of base runs'}, which the new data would replace. Give "
            "another folder."
        )


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
    """Train a tokenizer of `vocab_size` tokens on the first documents of the training shards."""
    train = [entry for entry in manifest["shards"] if entry["split"] == "train"]
    expected = min(sum(entry["text_bytes"] for entry in train), TOKENIZER_SAMPLE_BYTES)
    with Progress("training the tokenizer", expected) as progress:
        return Tokenizer.train(_sample([shards / entry["name"] for entry in train], progress), vocab_size)


def _sample(shards: Sequence[Path], progress: Progress) -> Iterator[str]:
    """Yield the first documents of each shard, about TOKENIZER_SAMPLE_BYTES in all."""
    for number, path in enumerate(shards, 1):
        enough = TOKENIZER_SAMPLE_BYTES * number // len(shards)
        for batch in shard_texts(path):
            for text in batch:
                if progress.n >= enough:
                    break
                yield text
                progress.add(len(text.encode()))
            if progress.n >= enough:
                break


def _put_in_place(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    """Delete the old manifest, move the new folders from `work` to `out`, write the new manifest last."""
    (out / MANIFEST).unlink(missing_ok=True)
    for name in (SHARDS, TOKENIZER):
        if (work / name).exists():
            if (out / name).exists():
                shutil.rmtree(out / name)
            os.replace(work / name, out / name)
    sync_folder(out)
    write_json(out / MANIFEST, manifest)
