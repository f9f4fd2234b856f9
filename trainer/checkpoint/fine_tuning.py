"""How a run of stage sft (fine-tuning) begins: with the weights and optimizer state of another run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint import storage
from trainer.checkpoint.exchange import pop_common_state
from trainer.checkpoint.storage import State
from trainer.config import ConfigError, RunConfig
from trainer.data import DataError
from trainer.data.rows import RowsInfo
from trainer.model.gpt import GPTConfig
from trainer.stages import SFT, parent_of


def check_data(config: RunConfig, info: RowsInfo, data_dir: Path) -> None:
    """Raise DataError if the data do not fit the stage: sft needs conversations, base needs documents.

    config: settings of the run. info: describes the rows in the data directory `data_dir`.
    """
    if config.stage == SFT and not info.masked:
        raise DataError(
            f"{data_dir} holds documents, and stage sft trains on conversations. Make a data directory of "
            "conversations and give it with --data-dir: python -m trainer conversations --conversations FILE "
            f"--data-dir {data_dir} --out DIR. To train on documents, leave out --stage sft."
        )
    if config.stage != SFT and info.masked:
        raise DataError(
            f"{data_dir} holds conversations, and stage base trains on documents. Fine-tune a model on them "
            "with --stage sft, or give the data directory that python -m trainer prepare has made."
        )


def initial_state(path: Path | None, config: RunConfig, model: GPTConfig, hashes: Mapping[str, str]) -> State:
    """The state at step 0 of a run of stage sft: weights and optimizer state of another run's checkpoint.

    path: the directory of the checkpoint. config, model: settings and model of this run. hashes: {name: hash}
    of this run's data (see `Dataset.hashes`). Step, losses and sync state of the other run are left out. The
    optimizer state is empty if the checkpoint has none, as after an import from nanochat. Raises ConfigError
    if `path` is None, if the setting parent names another checkpoint, if the checkpoint cannot be loaded, or
    if its model differs from `model` in more than sequence_len. Raises DataError if the checkpoint has
    another tokenizer than the data.
    """
    if path is None:
        raise ConfigError(
            f"A run of stage sft begins with a checkpoint ({config.parent or 'of stage base'}): give it with "
            "--from-checkpoint DIR."
        )
    state = storage.load(path)
    if config.parent != parent_of(state.meta):
        raise ConfigError(
            f"The run fine-tunes the checkpoint {config.parent} (run, step, and start of the sha256 of its "
            f"weights), and --from-checkpoint {path} is {parent_of(state.meta)}. Give the folder of "
            f"{config.parent}. To fine-tune {path}, start a new run: --stage sft with another --run-dir, "
            "without --run-file."
        )
    saved = state.meta["model_config"]
    differing = [
        f"{name} is {saved[name]!r} in the checkpoint and {value!r} in the run"
        for name, value in dataclasses.asdict(model).items()
        if name != "sequence_len" and saved[name] != value
    ]
    if differing:
        raise ConfigError(
            f"The model of the run differs from that of {path}: {'; '.join(differing)}. Do not set depth, "
            "aspect_ratio, head_dim, n_kv_head and window_pattern: they come from the checkpoint. If "
            f"vocab_size differs, make the data with the tokenizer in {path / 'tokenizer'}."
        )
    tokenizer = state.meta.get("hashes", {}).get("tokenizer")
    if tokenizer is not None and hashes.get("tokenizer", tokenizer) != tokenizer:
        raise DataError(
            f"The conversations were made with another tokenizer than that of {path}. Make them again with: "
            "python -m trainer conversations --conversations FILE.jsonl --out DIR "
            f"--tokenizer {path / 'tokenizer'}"
        )
    for tensors in state.optim.values():
        pop_common_state(tensors)  # of the sync mode of the other run
    optim = {name: tensors for name, tensors in state.optim.items() if tensors}
    return State({"step": 0}, state.model, optim)
