"""The options of `python -m trainer chat` and those that `serve` shares with it. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.options import number_from_zero

FORMATS = ("auto", "float32", "bfloat16", "int8")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --checkpoint, --run-dir, --dtype and --threads to `parser`."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoint", type=Path, metavar="DIR", help="a step_NNNNNN directory")
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="a run, for its newest checkpoint")
    parser.add_argument(
        "--dtype",
        choices=FORMATS,
        default="auto",
        help="format of the weights; auto: the faster of float32 and bfloat16",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of torch (0: as the CPU quota allows)"
    )


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `chat` to `parser`."""
    add_model_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this once, and end")
    parser.add_argument(
        "--temperature",
        type=number_from_zero,
        default=0.6,
        metavar="X",
        help="0: always the most likely token (%(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        metavar="N",
        help="draw from the N most likely tokens; 0: from all (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="tokens of an answer at most (%(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the sampling (default: a new one)")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand `serve` to `parser`."""
    add_model_arguments(parser)
    parser.add_argument(
        "--follow", action="store_true", help="with --run-dir: load each new checkpoint of the run"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="TCP port (%(default)s)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the key that clients must send"
    )
    parser.add_argument(
        "--queue", type=int, default=64, metavar="N", help="requests that wait at most (%(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=16, metavar="N", help="answers that are generated together (%(default)s)"
    )
