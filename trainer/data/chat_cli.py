"""`python -m trainer conversations`: files of conversations -> a data directory for `train --stage sft`.

python -m trainer conversations --conversations chats.jsonl --conversations more=2 --data-dir data --out chats
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data import SEED, DataError

if TYPE_CHECKING:
    from trainer.data.directory import Prepared
    from trainer.data.rows import RowsInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `conversations` to `parser`."""
    parser.description = (
        "Make a data directory of conversations, on which train --stage sft fine-tunes a model. A line of a "
        "file is a list of messages, each with role and content, user and assistant in turn."
    )
    parser.add_argument(
        "--conversations",
        action="append",
        required=True,
        metavar="PATH[=WEIGHT]",
        help="a JSONL file, or a folder of them; an epoch has each conversation WEIGHT times (1); may be "
        "given again",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the data directory to write")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="the folder of the tokenizer of the model to fine-tune"
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="take the tokenizer of this data directory"
    )
    parser.add_argument(
        "--val",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="a file or folder of conversations for validation only; may be given again",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        metavar="X",
        help="without --val, the fraction of conversations that is for validation (0.05)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave bad lines out and count them, instead of ending"
    )
    parser.add_argument(
        "--sequence-len", type=int, metavar="T", help="also pack rows of T + 1 tokens; else training does it"
    )
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="seed of the order (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `conversations`; returns its exit code: 0, or 2 after an error that is printed."""
    try:
        return _run(args)
    except DataError as error:
        print(f"conversations: {error}", file=sys.stderr)
    except OSError as error:
        where, reason = error.filename or args.out, error.strerror or error
        print(f"conversations: Cannot read or write {where}: {reason}.", file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> int:
    from trainer.data.chat_directory import VAL_FRACTION, Source, prepare_conversations
    from trainer.data.rows import pack

    if bool(args.tokenizer) == bool(args.data_dir):
        raise DataError(
            "Give the tokenizer of the model to fine-tune, by one of these: --data-dir DIR, the data "
            "directory that it was trained on, or --tokenizer DIR, such as the folder tokenizer of its "
            "checkpoint."
        )
    if args.val and args.val_fraction is not None:
        raise DataError("--val-fraction is for runs without --val: give one of them.")
    fraction = VAL_FRACTION if args.val_fraction is None else args.val_fraction
    if not 0 < fraction < 1:
        raise DataError(f"--val-fraction is {fraction:g}: it must be above 0 and below 1.")
    if args.seed < 0:
        raise DataError(f"--seed is {args.seed}: it must be at least 0.")
    tokenizer = args.tokenizer or args.data_dir / "tokenizer"
    sources = [Source(*split_weight(text)) for text in args.conversations]
    done = prepare_conversations(sources, args.out, tokenizer, args.val, fraction, args.seed, args.skip_bad)
    info = pack(args.out, args.sequence_len) if args.sequence_len is not None else None
    if args.json:
        counts = {"rows": {"train": info.train_rows, "val": info.val_rows}, **info.counts} if info else {}
        print(json.dumps(asdict(done) | counts))
    else:
        _print(args, done, info)
    return 0


def split_weight(text: str) -> tuple[Path, float]:
    """Parse `text`, which is PATH or PATH=WEIGHT; returns (path, weight).

    The weight is 1 if `text` has none or is itself an existing path. Raises DataError if the weight is not a
    number above 0.
    """
    path, equals, number = text.rpartition("=")
    if not equals or Path(text).exists():
        return Path(text), 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise DataError(f"--conversations {text}: the weight after = must be a number above 0.")
    return Path(path), weight


def _print(args: argparse.Namespace, done: Prepared, info: RowsInfo | None) -> None:
    if done.reused == "all":
        print(f"conversations: nothing has changed, {args.out} is used as it is")
    from trainer.data.conversations import MAX_TOKENS  # imports numpy

    bad = sum(done.skipped.values())
    print(
        f"conversations: {done.documents:,} of them in {done.shards} shards, the last one for validation"
        + (f"; bad lines left out: {bad:,}" if bad else "")
    )
    for split, counts in info.counts.items() if info else ():
        rows = getattr(info, f"{split}_rows")
        tokens = rows * (args.sequence_len + 1)
        print(
            f"conversations: {split}: {rows:,} rows, {counts['targets'] / tokens:.0%} of their tokens are "
            f"trained on, {counts['padding'] / tokens:.0%} are padding; {counts['conversations']:,} "
            f"conversations, {counts['cut']:,} of them cut, {counts['left_out']:,} left out because nothing "
            f"of the assistant is in their first {min(MAX_TOKENS, args.sequence_len + 1):,} tokens"
        )
