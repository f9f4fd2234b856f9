"""The parts of an evaluation, from the options of `python -m trainer eval`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError

BUNDLE = "core"  # in a data directory


@dataclass(frozen=True)
class Parts:
    """Which parts of an evaluation of a checkpoint are asked for.

    bpb: whether to compute bits per byte on the validation split.
    core: folder with the tasks of the CORE metric (a CORE bundle); None: CORE is not evaluated.
    sample: whether to generate a sample of text.
    chat: files of questions for chat tasks; empty: none.
    """

    bpb: bool
    core: Path | None
    sample: bool
    chat: tuple[Path, ...] = ()


def parts_of(args: argparse.Namespace) -> Parts:
    """The parts that the options ask for. args: options of `python -m trainer eval`.

    If none of --bpb, --core, --sample and --chat-task is given, the parts are a sample of text, bits per byte
    if --data-dir is given, and CORE if the data directory has a folder core/. Raises ConfigError if an option
    has an invalid value, or needs another option that is missing.
    """
    if args.core_max_per_task < 0 or args.eval_tokens < 0:
        raise ConfigError("--core-max-per-task and --eval-tokens take whole numbers from 0.")
    if args.bpb and args.data_dir is None:
        raise ConfigError("--bpb needs --data-dir, whose validation split it evaluates.")
    if (args.core_url or args.core_sha256) and args.core is None:
        option = "--core-url" if args.core_url else "--core-sha256"
        raise ConfigError(f"{option} needs --core DIR, the folder for the CORE bundle.")
    if args.core_sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", args.core_sha256):
        raise ConfigError("--core-sha256 takes 64 hex digits.")
    if args.core_sha256 and not args.core_url:
        raise ConfigError("--core-sha256 needs --core-url: it is the sha256 of the file that is downloaded.")
    if args.eval_tokens and not (args.bpb or args.data_dir):
        raise ConfigError("--eval-tokens needs --bpb and --data-dir: it is for bits per byte.")
    if args.chat_samples > 1 and not args.chat_temperature:
        raise ConfigError(
            "--chat-samples needs --chat-temperature above 0: without it all answers are equal."
        )
    names = [path.stem for path in args.chat_task]
    if len(set(names)) < len(names):
        twice = ", ".join(sorted({name for name in names if names.count(name) > 1}))
        raise ConfigError(
            f"--chat-task has files with the same name (without its ending): {twice}. Rename all but one."
        )
    if args.chat_samples < 1 or args.chat_max_tokens < 1:
        raise ConfigError("--chat-samples and --chat-max-tokens take whole numbers from 1.")
    if args.bpb or args.core or args.sample or args.chat_task:
        return Parts(args.bpb, args.core, args.sample, tuple(args.chat_task))
    core = args.data_dir and args.data_dir / BUNDLE
    return Parts(args.data_dir is not None, core if core and core.is_dir() else None, True)
