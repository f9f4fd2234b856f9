"""Import of a nanochat checkpoint into a run directory.

adopt_checkpoint(pair, tokenizer, Path("runs/mine"))
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import storage
from trainer.checkpoint.storage import State
from trainer.config import ConfigError, RunConfig
from trainer.data.files import file_sha256
from trainer.data.tokenizer import Tokenizer
from trainer.interchange.layout import Pair
from trainer.interchange.meta import model_config, read_meta, run_config
from trainer.interchange.weights import check_fits, read_state_dict, to_float32


@dataclass
class Adopted:
    """An imported checkpoint.

    path: the directory of the written checkpoint. config: settings of the run that resumes from it.
    unchanged: whether the run directory had the same checkpoint already. note: which tensors were converted
    to float32; "" for none.
    """

    path: Path
    config: RunConfig
    unchanged: bool
    note: str


def adopt_checkpoint(pair: Pair, tokenizer: Tokenizer, run_dir: Path, restart: bool = False) -> Adopted:
    """Write the nanochat checkpoint `pair` to `run_dir`, where a run resumes from it.

    tokenizer: tokenizer of the model. restart: whether the written checkpoint has step 0 instead of the step
    of `pair`. Raises ConfigError if the nanochat checkpoint is damaged or does not fit the tokenizer, or if
    `run_dir` has other checkpoints.
    """
    description = read_meta(pair.meta)
    model = model_config(description, pair.meta)
    if model.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"{pair.meta} names a model for {model.vocab_size:,} tokens, and the tokenizer has "
            f"{tokenizer.vocab_size:,}: give the tokenizer of the model with --tokenizer FILE."
        )
    weights = read_state_dict(pair.model)
    check_fits(weights, model, pair.model)
    weights, note = to_float32(weights, pair.model)
    config = run_config(model, description, pair.stage)
    step = 0 if restart else pair.step
    folder = run_dir / "checkpoints"
    target = folder / f"step_{step:06d}"
    if found := storage.checkpoints(folder):
        if found == [target] and _same(target, weights, config):
            return Adopted(target, config, True, note)
        raise ConfigError(f"{run_dir} has checkpoints already ({found[0].name}): give another --run-dir.")
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".importing-", dir=run_dir) as work:
        meta: dict[str, Any] = {
            "run_id": run_dir.resolve().name,
            "step": step,
            "tokens": step * config.total_batch_size,
            "val_bpb": description.get("val_bpb") if step else None,
            "config": config.to_dict(),
            "config_digest": config.digest(),
            "model_config": dataclasses.asdict(model),
            "hashes": {"tokenizer": file_sha256(tokenizer.save(work))[:16]},
            "torch": torch.__version__,
            "time": time.time(),
            "imported": f"nanochat's {pair.folder.name}, step {pair.step}",
        }
        storage.save(folder, State(meta, weights, {}), Path(work))
    return Adopted(target, config, False, note)


def _same(path: Path, weights: dict[str, torch.Tensor], config: RunConfig) -> bool:
    """Whether the checkpoint at `path` has exactly these weights and settings."""
    try:
        state = storage.load(path)
    except storage.DamagedCheckpointError:
        return False
    if state.meta["config"] != config.to_dict() or state.model.keys() != weights.keys():
        return False
    return all(torch.equal(state.model[name], tensor) for name, tensor in weights.items())
