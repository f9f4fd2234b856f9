"""Checkpoints of ours and upstream's base directories, and the commands that move one to the other."""

from __future__ import annotations

from pathlib import Path

import tiktoken
import torch
import upstream
from conftest import TINY

from trainer.__main__ import main
from trainer.checkpoint import storage
from trainer.checkpoint.storage import State
from trainer.config import RunConfig
from trainer.data.tokenizer import Tokenizer
from trainer.model.gpt import GPTConfig

CONFIG = RunConfig.from_strings({**TINY, "n_kv_head": 1, "depth": 3})
MODEL = GPTConfig.from_depth(3, 300, 32, aspect_ratio=16, head_dim=16, n_kv_head=1)
SHAPE = upstream.GPTConfig(32, 300, 3, 3, 1, 48, "SSSL")
IDS = torch.arange(64).reshape(2, 32) * 4


def weights_of(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = upstream.shapes(SHAPE)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def step_dir(folder: Path, tokenizer: Path, dtype: torch.dtype = torch.float32, step: int = 100) -> Path:
    """A checkpoint of ours, of a model whose vocabulary of 300 is padded to 320."""
    meta = {
        "run_id": "mine",
        "step": step,
        "tokens": step * 160,
        "loss": 3.5,
        "val_bpb": 2.5,
        "config": CONFIG.to_dict(),
        "model_config": MODEL.__dict__,
        "hashes": {},
    }
    return storage.save(folder, State(meta, weights_of(step, dtype), {}), tokenizer)


def encoding_of(tokenizer: Tokenizer) -> tiktoken.Encoding:
    """A tokenizer as upstream would have made it."""
    ranks = {piece: rank for rank, piece in enumerate(tokenizer.ranks)}
    return tiktoken.Encoding(
        "rustbpe", pat_str=tokenizer.pattern, mergeable_ranks=ranks, special_tokens=tokenizer.specials
    )


def base_directory(folder: Path, data_dir: Path) -> Path:
    """An upstream base directory with one checkpoint, d3 at step 5."""
    encoding = encoding_of(Tokenizer.load(data_dir / "tokenizer"))
    upstream.save(folder, "d3", 5, weights_of(5), SHAPE, encoding)
    return folder


def type_in(*words: object) -> int:
    return main([str(word) for word in words])


def export(checkpoint_dir: Path, out: Path, *more: str) -> int:
    return type_in("export", "--checkpoint", checkpoint_dir, "--to", "nanochat", "--out", out, *more)


def take_in(source: Path, *more: object) -> int:
    return type_in("import", "--from-nanochat", source, *more)


def bitwise(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
