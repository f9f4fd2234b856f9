"""Checks whether a run may begin with, or resume from, the state of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.storage import State
from trainer.config import HORIZON, IDENTITY, RUNTIME, ConfigError, RunConfig
from trainer.data import DataError
from trainer.model.gpt import GPTConfig
from trainer.optim.lr_schedule import describe_extension

NEW_RUN = "Give a new run its own directory (with the playbooks -e run_id=NAME, by hand --run-dir DIR)"
DEFAULT_NAME = re.compile(r"d\d+-[0-9a-f]{8}")  # another release may name the same run differently


def check_begins(state: State, model: GPTConfig, hashes: Mapping[str, str], run_id: str) -> None:
    """Raise ConfigError or DataError if imported weights do not fit the model or tokenizer of the run.

    state: the imported checkpoint. model: the model of the run. hashes: {name: hash} of the run's data (see
    `Dataset.hashes`). run_id: name of the run, for the message.
    """
    saved = state.meta["model_config"]
    differing = [
        f"{name} is {saved[name]!r} in the checkpoint and {value!r} in the run"
        for name, value in dataclasses.asdict(model).items()
        if saved[name] != value
    ]
    if differing:
        raise ConfigError(
            f"The imported weights of the run {run_id} are of another model: {'; '.join(differing)}. Use "
            "the train command that `import` printed. To print it again, repeat the import command."
        )
    tokenizer = state.meta["hashes"].get("tokenizer")
    if hashes.get("tokenizer", tokenizer) != tokenizer:
        raise DataError(
            f"The run {run_id} would start with weights for another tokenizer than that of its data. Import "
            "their tokenizer: python -m trainer import --from-nanochat PATH --data-dir DIR"
        )


def check_continues(state: State, config: RunConfig, hashes: Mapping[str, str], run_id: str) -> None:
    """Raise ConfigError or DataError if the run cannot resume from the checkpoint `state`.

    The checkpoint must have the run_id, the settings of section `identity` and the data of the run. Its
    run_id may differ if the checkpoint was imported, or if both are default names such as d8-1a2b3c4d.
    config, run_id: settings and name of the run. hashes: {name: hash} of its data (see `Dataset.hashes`).
    """
    started = str(state.meta.get("run_id", run_id))
    by_default = DEFAULT_NAME.fullmatch(started) and DEFAULT_NAME.fullmatch(run_id)
    if started != run_id and not by_default and "imported" not in state.meta:
        raise ConfigError(
            f"The checkpoints are of the run {started}, and this run is {run_id}. {NEW_RUN}, or resume "
            f"{started} (with the playbooks -e run_id={started}, by hand --run-id {started})."
        )
    differing = config.differences(RunConfig.from_strings(state.meta["config"]), IDENTITY)
    if differing:
        raise ConfigError(
            f"The run {started} was started with another configuration: {'; '.join(differing)}. "
            f"{NEW_RUN}, or use the old values to resume it."
        )
    other = [name for name, value in state.meta.get("hashes", {}).items() if hashes.get(name, value) != value]
    if other:
        raise DataError(
            f"The run {started} was started on other data ({', '.join(other)}). {NEW_RUN}, or "
            "restore the old data."
        )


def planned_steps(meta: Mapping[str, Any], config: RunConfig, num_iterations: int) -> int:
    """The number of steps of a run that resumes from a checkpoint.

    meta: content of the checkpoint's meta.json. config: settings of the run. num_iterations: the number of
    steps that this release derives from `config`. The result is the number in `meta`, because another release
    may have derived another number. It is `num_iterations` if a setting of section `horizon` has changed, or
    if `meta` has no number of steps.
    """
    if "num_iterations" not in meta or config.differences(RunConfig.from_strings(meta["config"]), HORIZON):
        return num_iterations
    return int(meta["num_iterations"])


def describe_changes(state: State, config: RunConfig, num_iterations: int, run_id: str) -> str:
    """Sentences on the changes in a run that resumes from `state`: more steps, other settings; "" for none.

    config, run_id: settings and name of the run. num_iterations: the number of steps that the run has now.
    Raises ConfigError if the run would become shorter, because its learning rates have followed the schedule
    of the longer run.
    """
    before = int(state.meta.get("num_iterations", num_iterations))
    if num_iterations < max(before, state.step):
        raise ConfigError(
            f"The run {run_id} has {before:,} steps, of which {state.step:,} are done. The command asks for "
            f"{num_iterations:,} steps, but a run can become longer, not shorter. To resume it, ask for "
            f"{max(before, state.step)} steps or more (with the playbooks -e steps=N, by hand "
            f"--num-iterations N). {NEW_RUN}."
        )
    sentences = []
    if before < num_iterations:
        rates = (config.warmup_steps, config.warmdown_ratio, config.final_lr_frac)
        sentences.append(describe_extension(state.step, before, num_iterations, *rates))
    changed = config.differences(RunConfig.from_strings(state.meta["config"]), RUNTIME)
    if changed:
        sentences.append(f"Resumed with other settings: {'; '.join(changed)}.")
    return " ".join(sentences)
