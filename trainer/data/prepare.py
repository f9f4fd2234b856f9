"""`python -m trainer prepare`: text or shards -> a data directory; with --rows, shards -> packed rows.

python -m trainer prepare --source docs --source more.txt --out data --vocab-size 8192
python -m trainer prepare --shards ~/.cache/nanochat --out data
python -m trainer prepare --base-url climbmix --count 9 --out data
python -m trainer prepare --rows --data-dir data --sequence-len 256
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data import PUBLIC, SEED, SHARD_BYTES, VOCAB_SIZE, DataError

if TYPE_CHECKING:
    from trainer.data.directory import Prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `prepare` to `parser`."""
    parser.description = (
        "Make a data directory: shards, a tokenizer and a manifest, from text or from nanochat's shards; "
        "with --rows, pack its shards into rows."
    )
    _add_text(parser.add_argument_group("from text"))
    _add_shards(
        parser.add_argument_group("from shards: parquet files with a column `text`, taken as they are")
    )
    out = parser.add_argument_group("from either")
    out.add_argument(
        "--out", type=Path, metavar="DIR", help="the data directory to write; kept if nothing has changed"
    )
    out.add_argument(
        "--vocab-size",
        type=int,
        default=VOCAB_SIZE,
        metavar="N",
        help="tokens of the vocabulary, special tokens included (%(default)s)",
    )
    out.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="use the tokenizer of this folder; do not train one"
    )
    rows = parser.add_argument_group("to rows")
    rows.add_argument("--rows", action="store_true", help="pack the shards of --data-dir into rows")
    rows.add_argument("--data-dir", type=Path, metavar="DIR", help="the data directory, as given to --out")
    rows.add_argument(
        "--sequence-len", type=int, metavar="T", help="length of a sequence; a row has T + 1 tokens"
    )
    rows.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads that encode text (0: all cores)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def _add_text(text: argparse._ArgumentGroup) -> None:
    text.add_argument(
        "--source",
        action="append",
        type=Path,
        metavar="PATH",
        help="a folder or file of text (.gz too), or a parquet file with a column `text`; may be given again",
    )
    text.add_argument(
        "--max-bytes",
        type=int,
        default=0,
        metavar="N",
        help="use at most N bytes of text, from all folders (0: no limit)",
    )
    text.add_argument(
        "--shard-bytes",
        type=int,
        default=SHARD_BYTES,
        metavar="N",
        help="bytes of text in a shard, about (%(default)s)",
    )
    text.add_argument("--seed", type=int, default=SEED, metavar="N", help="seed of the shuffle (%(default)s)")


def _add_shards(shards: argparse._ArgumentGroup) -> None:
    shards.add_argument(
        "--shards",
        type=Path,
        metavar="DIR",
        help="a folder of shards, or nanochat's base directory; the last shard by name is for validation",
    )
    shards.add_argument(
        "--base-url",
        metavar="URL",
        help=f"download shards from URL/shard_00000.parquet, ...; or a data set's name: {', '.join(PUBLIC)}",
    )
    shards.add_argument(
        "--count", type=int, metavar="N", help="number of shards to download, the validation shard included"
    )
    shards.add_argument(
        "--val-shard",
        type=int,
        metavar="K",
        help="number of the validation shard (default: the last of a named data set, else N-1)",
    )
    shards.add_argument(
        "--sha256",
        type=Path,
        metavar="FILE",
        help="expected sha256, as sha256sum writes it (default: SHA256SUMS beside the shards, if it exists)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `prepare`; returns its exit code.

    0: done; 2: an error, which is printed on standard error; 130: Ctrl-C.
    """
    try:
        _check(args)
        return _run_rows(args) if args.rows else _run_corpus(args)
    except DataError as error:
        print(f"prepare: {error}", file=sys.stderr)
    except OSError as error:
        where = error.filename or args.out or args.data_dir
        reason = error.strerror or error
        print(
            f"prepare: Cannot read or write {where}: {reason}. Fix that and type the same again.",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("prepare: stopped; type the same again to continue.", file=sys.stderr)
        return 130
    return 2


def _check(args: argparse.Namespace) -> None:
    from trainer.data.tokenizer import MIN_VOCAB_SIZE

    if args.rows:
        if not args.data_dir or args.sequence_len is None:
            raise DataError("--rows needs --data-dir DIR and --sequence-len T.")
        if args.threads < 0:
            raise DataError(f"--threads {args.threads} is too small: give 0 or more.")
        paths = (args.source, args.shards, args.base_url, args.out, args.tokenizer, args.sha256)
        numbers = (args.count, args.val_shard, args.vocab_size, args.max_bytes, args.shard_bytes, args.seed)
        if any(paths) or numbers != (None, None, VOCAB_SIZE, 0, SHARD_BYTES, SEED):
            raise DataError(
                "--rows packs the shards of --data-dir. It takes --data-dir, --sequence-len, --threads and "
                "--json: remove the other options, or --rows."
            )
        return
    if args.data_dir or args.sequence_len is not None or args.threads:
        raise DataError("--data-dir, --sequence-len and --threads are for --rows: add it, or remove them.")
    given = [name for name in ("source", "shards", "base_url") if getattr(args, name)]
    if len(given) != 1 or not args.out:
        raise DataError(
            "Give the text with --source PATH, or shards with --shards DIR or --base-url URL, one of the "
            "three; and the output folder with --out DIR."
        )
    for name, value, least in (
        ("--vocab-size", args.vocab_size, MIN_VOCAB_SIZE),
        ("--max-bytes", args.max_bytes, 0),
        ("--shard-bytes", args.shard_bytes, 1),
        ("--seed", args.seed, 0),
        ("--val-shard", args.val_shard or 0, 0),
    ):
        if value < least:
            raise DataError(f"{name} {value} is too small: give {least} or more.")
    if args.source and (args.sha256 or args.count is not None):
        raise DataError("--sha256 and --count are for shards: remove them, or --source.")
    if not args.source and (args.max_bytes, args.shard_bytes, args.seed) != (0, SHARD_BYTES, SEED):
        raise DataError(
            "--max-bytes, --shard-bytes and --seed apply to text; shards are used unchanged. To make new "
            "shards of their text, give their folder with --source."
        )
    if not args.base_url and (args.count is not None or args.val_shard is not None):
        raise DataError("--count and --val-shard are for --base-url: remove them. --shards takes all shards.")
    if args.base_url and args.count is None:
        raise DataError("--base-url needs --count N: how many shards to download.")


def _run_rows(args: argparse.Namespace) -> int:
    from trainer.data.rows import pack

    info = pack(args.data_dir, args.sequence_len, args.threads)
    if args.json:
        keys = ("digest", "train_rows", "val_rows", "train_sha256", "val_sha256", "packed", "seconds")
        print(json.dumps({key: getattr(info, key) for key in keys}))
        return 0
    how = "packed" if info.packed else "reused"
    print(f"rows: digest={info.digest} train_rows={info.train_rows} val_rows={info.val_rows} ({how})")
    if info.packed:
        print(f"rows: {info.seconds:.1f} s, {info.tokens_per_s:,.0f} tokens/s")
    return 0


def _run_corpus(args: argparse.Namespace) -> int:
    from trainer.data.sources import PARTLY

    result = _prepare(args)
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    if result.reused == "all":
        print(f"prepare: nothing has changed, {args.out} is used as it is")
    elif result.reused:
        print("prepare: the text has not changed, its shards are used as they are")
    skipped = dict(result.skipped)
    partly = skipped.pop(PARTLY, 0)
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    print(
        f"prepare: {result.documents:,} documents, {result.text_bytes / 1e6:,.2f} MB of text"
        + (f" (files left out: {left_out})" if left_out else "")
        + (f" (files {PARTLY}: {partly:,})" if partly else "")
    )
    print(
        f"prepare: {result.shards} shards, the last one ({result.val_bytes / 1e6:,.2f} MB) for validation; "
        f"a vocabulary of {result.vocab_size:,}"
    )
    if result.vocab_size < args.vocab_size and not args.tokenizer:
        print(f"prepare: the text has too few repeated pieces for a vocabulary of {args.vocab_size:,}")
    print("prepare: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in result.seconds.items()))
    return 0


def _prepare(args: argparse.Namespace) -> Prepared:
    from trainer.data.directory import prepare_corpus, prepare_public, prepare_shards

    if args.shards:
        return prepare_shards(args.shards, args.out, args.vocab_size, args.sha256, args.tokenizer)
    if args.base_url:
        return prepare_public(
            args.base_url, args.count, args.out, args.vocab_size, args.sha256, args.val_shard, args.tokenizer
        )
    return prepare_corpus(
        args.source, args.out, args.vocab_size, args.max_bytes, args.shard_bytes, args.seed, args.tokenizer
    )
