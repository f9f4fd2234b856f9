"""A stand-in for upstream nanochat, of which there is no package to install: how it writes and reads files.

It follows karpathy/nanochat of mid-2026: nanochat/checkpoint_manager.py and tokenizer.py,
scripts/base_train.py and tok_train.py. Names and shapes of the weights are the specification's,
written down here once more so that the reader does not lean on the model it is to check.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rustbpe
import tiktoken
import torch
from torch import Tensor

from trainer.data.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN


@dataclass
class GPTConfig:
    """The fields upstream's loader passes a meta file's model_config to; another one is a TypeError."""

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """What `load_state_dict(strict=True)` asks for: every name, with its shape."""
    vocab, width = math.ceil(config.vocab_size / 64) * 64, config.n_embd
    kv = config.n_kv_head * (width // config.n_head)
    layers = {"resid_lambdas": (config.n_layer,), "x0_lambdas": (config.n_layer,)}
    table: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
    }
    table |= layers | {"smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,)}
    for i in range(config.n_layer):
        block = f"transformer.h.{i}."
        for name, rows in (("c_q", width), ("c_k", kv), ("c_v", kv), ("c_proj", width)):
            table[f"{block}attn.{name}.weight"] = (rows, width)
        table[f"{block}mlp.c_fc.weight"] = (4 * width, width)
        table[f"{block}mlp.c_proj.weight"] = (width, 4 * width)
        if i % 2 == (config.n_layer - 1) % 2:
            table[f"{block}attn.ve_gate.weight"] = (config.n_kv_head, 12)
            table[f"value_embeds.{i}.weight"] = (vocab, kv)
    return table


@dataclass
class Loaded:
    """What upstream's load_model returns, with the weights in the model's place."""

    weights: dict[str, Tensor]
    config: GPTConfig
    meta: dict[str, Any]
    encoding: tiktoken.Encoding
    token_bytes: Tensor
    tag: str
    step: int


def load_model(base: Path, tag: str | None = None, step: int | None = None) -> Loaded:
    """Do with a base directory what upstream's load_model("base", cpu, ...) does."""
    if tag is None:
        depths = {
            p.name: m[1] for p in (base / "base_checkpoints").iterdir() if (m := re.match(r"d(\d+)", p.name))
        }
        tag = max(depths, key=lambda name: int(depths[name]))
    folder = base / "base_checkpoints" / tag
    if step is None:
        step = max(int(path.stem.split("_")[-1]) for path in folder.glob("model_*.pt"))
    weights = torch.load(
        folder / f"model_{step:06d}.pt", map_location="cpu"
    )  # weights_only is torch's default
    meta = json.loads((folder / f"meta_{step:06d}.json").read_text(encoding="utf-8"))
    weights = {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in weights.items()}
    weights = {k.removeprefix("_orig_mod."): v for k, v in weights.items()}
    config = GPTConfig(**meta["model_config"])
    assert {k: tuple(v.shape) for k, v in weights.items()} == shapes(config)  # strict=True
    with open(base / "tokenizer" / "tokenizer.pkl", "rb") as file:
        encoding = pickle.load(file)
    assert encoding.n_vocab == config.vocab_size
    token_bytes = torch.load(base / "tokenizer" / "token_bytes.pt", map_location="cpu")
    return Loaded(weights, config, meta, encoding, token_bytes, tag, step)


def train_tokenizer(texts: list[str], vocab_size: int) -> tiktoken.Encoding:
    """An encoding made as upstream's tokenizer makes it."""
    learner = rustbpe.Tokenizer()
    learner.train_from_iterator(iter(texts), vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    ranks = {bytes(piece): rank for piece, rank in learner.get_mergeable_ranks()}
    return tiktoken.Encoding(
        name="rustbpe",
        pat_str=learner.get_pattern(),
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)},
    )


def save(
    base: Path,
    tag: str,
    step: int,
    weights: dict[str, Tensor],
    config: GPTConfig,
    encoding: tiktoken.Encoding,
) -> Path:
    """Write a checkpoint and tokenizer as upstream's base_train and tok_train do; returns the model file."""
    folder = base / "base_checkpoints" / tag
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / f"model_{step:06d}.pt")
    meta = {
        "step": step,
        "val_bpb": 1.25,
        "model_config": dict(config.__dict__),
        "user_config": {
            "run": "dummy",
            "fp8": False,
            "depth": config.n_layer,
            "aspect_ratio": config.n_embd // config.n_layer,
            "head_dim": config.n_embd // config.n_head,
            "max_seq_len": config.sequence_len,
            "window_pattern": config.window_pattern,
            "num_iterations": 8,
            "target_flops": -1.0,
            "target_param_data_ratio": 12,
            "device_batch_size": 32,
            "total_batch_size": -1,
            "matrix_lr": 0.03,
            "embedding_lr": 0.3,
            "warmup_steps": 3,
        },
        "device_batch_size": 32,
        "max_seq_len": config.sequence_len,
        "total_batch_size": 4 * config.sequence_len,
        "dataloader_state_dict": {"pq_idx": 0, "rg_idx": 1, "epoch": 1},
        "loop_state": {"min_val_bpb": 1.25, "smooth_train_loss": 3.0, "total_training_time": 9.0},
    }
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    torch.save({"state": {}}, folder / f"optim_{step:06d}_rank0.pt")
    (base / "tokenizer").mkdir(exist_ok=True)
    with open(base / "tokenizer" / "tokenizer.pkl", "wb") as file:
        pickle.dump(encoding, file)
    pieces = [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]
    lengths = [
        0 if piece.decode(errors="replace") in encoding.special_tokens_set else len(piece) for piece in pieces
    ]
    torch.save(torch.tensor(lengths, dtype=torch.int32), base / "tokenizer" / "token_bytes.pt")
    return folder / f"model_{step:06d}.pt"
