"""The stages of training: base, and supervised fine-tuning (sft) of the model of another run's checkpoint.

Nothing of the trainer is imported, so that the installed collection can build run files too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASE, SFT = "base", "sft"
# The settings that a run of stage sft inherits from the run whose model it fine-tunes, unless they are set.
INHERITED = (
    "depth",
    "aspect_ratio",
    "head_dim",
    "n_kv_head",
    "sequence_len",
    "window_pattern",
    "device_batch_size",
    "total_batch_size",
    "unembedding_lr",
    "embedding_lr",
    "matrix_lr",
    "scalar_lr",
    "dtype",
)
# The other settings that differ from those of stage base, as in nanochat (scripts/chat_sft.py).
SFT_SETTINGS: Mapping[str, Any] = {
    "stage": SFT,
    "num_iterations": 0,  # one epoch
    "init_lr_frac": 0.8,
    "warmup_steps": 0,
    "warmdown_ratio": 0.5,
    "final_lr_frac": 0.0,
    "weight_decay": 0.0,
}


def sft_settings(meta: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that fine-tunes the model of a checkpoint: {setting: value}.

    meta: content of the checkpoint's meta.json. given: settings that were set, which replace the others. The
    settings INHERITED are taken from `meta`, the others of stage sft from SFT_SETTINGS.
    """
    base = meta["config"]
    inherited = {name: base[name] for name in INHERITED if name in base}
    return {**inherited, **SFT_SETTINGS, **given, "parent": parent_of(meta)}


def parent_of(meta: Mapping[str, Any]) -> str:
    """The setting `parent` for a checkpoint: RUN_ID/step_NNNNNN/SHA256.

    SHA256 stands for the first 12 hex digits of the sha256 of the model file. meta: content of the
    checkpoint's meta.json, with run_id, step and sha256 (by file).
    """
    sums = meta["sha256"]
    weights = next(sums[name] for name in ("model.safetensors", "model.pt") if name in sums)
    return f"{meta['run_id']}/step_{int(meta['step']):06d}/{weights[:12]}"
