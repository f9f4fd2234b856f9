"""Loads a checkpoint for generation: an engine, the tokenizer, and the run and step of the checkpoint.

loaded = load(newest_in(run_dir), "auto"); loaded.engine; loaded.name == "d8-1a2b3c4d, step 500"
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.chat.engine import Engine, Tools
from trainer.chat.precision import set_format
from trainer.checkpoint.storage import checkpoints, load_model, read_meta
from trainer.config import ConfigError
from trainer.data.conversations import special
from trainer.data.tokenizer import Tokenizer
from trainer.host.gemm_library import choose_library
from trainer.host.numerics import limit_threads
from trainer.stages import BASE, SFT

NOTICE = "This model is not fine-tuned on conversations, so it continues text rather than answers."


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory that is ready to answer.

    engine: generates the tokens of an answer. tokenizer: converts text to tokens and back.
    checkpoint: the directory of the checkpoint. run_id, step: the run and the step that it belongs to.
    fine_tuned: whether the run has the stage sft, in which a model is trained on conversations.
    dtype: format of the weights: float32, bfloat16 or int8.
    """

    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Path
    run_id: str
    step: int
    fine_tuned: bool
    dtype: str

    @property
    def name(self) -> str:
        """Run and step as text: "d8-1a2b3c4d, step 500"."""
        return f"{self.run_id}, step {self.step}"


def load_from(args: argparse.Namespace) -> Loaded:
    """Load the checkpoint that --checkpoint or --run-dir names. args: the options of `add_model_arguments`.

    Raises ConfigError if --threads is negative or there is no checkpoint. Also raises the errors of `load`.
    """
    if args.threads < 0:
        raise ConfigError(f"--threads is {args.threads}: it must be 0 or more.")
    if args.threads:
        torch.set_num_threads(args.threads)
    else:
        limit_threads()
    choose_library()
    return load(args.checkpoint or newest_in(args.run_dir), args.dtype)


def newest_in(run_dir: Path) -> Path:
    """The newest checkpoint of a run directory. Raises ConfigError if there is none."""
    found = checkpoints(run_dir / "checkpoints")
    if not found:
        raise ConfigError(
            f"There is no checkpoint in {run_dir / 'checkpoints'}. Name a run directory that has one."
        )
    return found[0]


def load(checkpoint: Path, dtype: str) -> Loaded:
    """Load and verify a checkpoint.

    checkpoint: the directory of the checkpoint. dtype: format of the weights, as for `set_format`. Raises
    ConfigError if the checkpoint is missing or damaged, DataError if its tokenizer cannot be loaded or lacks
    a special token of conversations.
    """
    meta = read_meta(checkpoint, files=())
    model, tokenizer = load_model(checkpoint)
    for name in ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"):
        special(tokenizer, name)
    chosen = set_format(model, dtype)
    return Loaded(
        Engine(model, Tools.of(tokenizer)),
        tokenizer,
        checkpoint,
        str(meta.get("run_id") or meta.get("imported") or "unnamed"),
        int(meta.get("step", 0)),
        meta["config"].get("stage", BASE) == SFT,
        chosen,
    )
