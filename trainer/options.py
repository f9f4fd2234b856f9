"""Command-line options that several subcommands of the trainer have."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from trainer.config import RunConfig


def add_config_arguments(parser: argparse.ArgumentParser, left_out: Sequence[str] = ()) -> None:
    """Add an option for each setting of a run, except those in `left_out`.

    The parsed value is a text, or None if the option is not given.
    """
    group = parser.add_argument_group("settings of the run")
    for setting in dataclasses.fields(RunConfig):
        if setting.name not in left_out:
            flag = "--" + setting.name.replace("_", "-")
            help = f"{setting.metadata['help']} ({setting.default})".replace("%", "%%")
            group.add_argument(flag, metavar=str(setting.type).upper(), default=None, help=help)


def number_from_zero(text: str) -> float:
    """argparse type: a finite number, 0 or more. Raises ArgumentTypeError for anything else, nan included."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return number
