"""Conversion between nanochat's meta_000100.json and the meta.json of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, RunConfig
from trainer.model.gpt import GPTConfig
from trainer.stages import BASE, SFT, SFT_SETTINGS

# Settings with the same name in both programs that define the training. Those that depend on the machine
# (evaluation, saving, micro-batch) are not converted.
SCHEDULE = (
    "target_param_data_ratio",
    "unembedding_lr",
    "embedding_lr",
    "matrix_lr",
    "scalar_lr",
    "weight_decay",
    "warmup_steps",
    "warmdown_ratio",
    "final_lr_frac",
)
SHAPE = ("depth", "aspect_ratio", "head_dim", "window_pattern")
HORIZON = ("num_iterations", "target_flops")
UNSET = -1  # nanochat's value for "choose automatically"; ours is 0
UPSTREAM_ASPECT_RATIO = 64
LARGEST = 2**31


def read_meta(path: Path) -> dict[str, Any]:
    """The content of a meta file of nanochat: a dict with the key model_config.

    Raises ConfigError, which names the file, if the file cannot be read or is not a meta file.
    """
    try:
        meta = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("model_config"), dict):
        raise ConfigError(
            f"{path} is not a meta file of nanochat: it has no model_config. Copy nanochat's meta file again."
        )
    return meta


def model_config(meta: Mapping[str, Any], path: Path) -> GPTConfig:
    """The shape of the model that a meta file of nanochat describes.

    meta: content of the file; its model_config is used. path: path of the file, for messages. Raises
    ConfigError if model_config does not have exactly the fields of GPTConfig, or has an invalid value.
    """
    values = meta["model_config"]
    fields = {field.name: type(field.default) for field in dataclasses.fields(GPTConfig)}
    unknown = [name for name in values if name not in fields]
    missing = [name for name in fields if name not in values]
    if unknown:
        raise ConfigError(
            f"The model_config in {path} has unknown fields ({', '.join(unknown)}): it describes another "
            "model, which cannot be imported."
        )
    if missing:
        raise ConfigError(
            f"The model_config in {path} lacks {', '.join(missing)}: it is of an older nanochat, whose model "
            "computes something else and cannot be imported."
        )
    for name, kind in fields.items():
        value = values[name]
        if type(value) is not kind or (isinstance(value, int) and value >= LARGEST):
            wanted = f"a whole number below {LARGEST:,}" if kind is int else "a string"
            raise ConfigError(
                f"The model_config in {path} has {value!r} for {name}, which must be {wanted}. The file is "
                "damaged or from another program. Export the model from nanochat again."
            )
    try:
        return GPTConfig(**values)
    except ValueError as error:
        raise ConfigError(f"The model_config in {path} is invalid: {error}.") from None


def run_config(model: GPTConfig, meta: Mapping[str, Any], stage: str = BASE) -> RunConfig:
    """The settings of a run of `stage` that trains `model`.

    meta: content of a meta file of nanochat; its total_batch_size and user_config (settings) are used. A
    setting that is missing or not valid there has its default in `stage`. Raises ConfigError if no
    aspect_ratio gives the width of the model.
    """
    given = meta.get("user_config")
    user = given if isinstance(given, dict) else {}
    settings: dict[str, Any] = {
        **(SFT_SETTINGS if stage == SFT else {}),
        "depth": model.n_layer,
        "aspect_ratio": _aspect_ratio(model, user.get("aspect_ratio")),
        "head_dim": model.head_dim,
        "n_kv_head": 0 if model.n_kv_head == model.n_head else model.n_kv_head,
        "sequence_len": model.sequence_len,
        "window_pattern": model.window_pattern,
        "total_batch_size": _batch(meta.get("total_batch_size"), model.sequence_len),
    }
    for name in (*SCHEDULE, *HORIZON, *(("init_lr_frac",) if stage == SFT else ())):
        value = 0 if name in HORIZON and user.get(name) == UNSET else user.get(name)
        with contextlib.suppress(ConfigError):  # an invalid value leaves the default
            RunConfig.from_strings({name: value})
            settings[name] = value
    if settings.get("num_iterations"):
        settings.pop("target_flops", None)  # the number of steps has priority, as in nanochat
    return RunConfig.from_strings(settings)


def upstream_meta(meta: Mapping[str, Any], config: RunConfig, model: GPTConfig) -> dict[str, Any]:
    """The content of nanochat's meta file for a checkpoint.

    meta: content of the checkpoint's meta.json. config, model: settings and model of the run. Keys of the
    result: step, val_bpb, model_config, user_config, device_batch_size, max_seq_len, total_batch_size,
    nanofleet.
    """
    step = int(meta["step"])
    tokens = meta.get("tokens", 0)
    batch = tokens // step if step else config.total_batch_size
    user = {name: getattr(config, name) for name in (*SHAPE, *SCHEDULE, "device_batch_size")}
    if config.stage == SFT:
        user["init_lr_frac"] = config.init_lr_frac
    return {
        "step": step,
        "val_bpb": meta.get("val_bpb"),
        "model_config": dataclasses.asdict(model),
        "user_config": {
            **user,
            "max_seq_len": config.sequence_len,
            **{name: getattr(config, name) or UNSET for name in (*HORIZON, "total_batch_size")},
        },
        "device_batch_size": config.device_batch_size,
        "max_seq_len": config.sequence_len,
        "total_batch_size": batch or None,
        "nanofleet": {name: meta.get(name) for name in ("run_id", "loss", "num_iterations")},
    }


def _aspect_ratio(model: GPTConfig, asked: Any) -> int:
    """An aspect_ratio that gives the width of the model, preferably `asked`.

    Raises ConfigError if no ratio that is tried gives this width.
    """
    for ratio in (asked, UPSTREAM_ASPECT_RATIO, model.n_embd // model.n_layer):
        if type(ratio) is not int or not 1 <= ratio < LARGEST:
            continue
        shape = GPTConfig.from_depth(
            model.n_layer, model.vocab_size, aspect_ratio=ratio, head_dim=model.head_dim
        )
        if shape.n_embd == model.n_embd:
            return ratio
    raise ConfigError(
        f"The model has {model.n_layer} layers, heads of the width {model.head_dim} and the width "
        f"{model.n_embd}. No value of the setting aspect_ratio gives this width, so a run cannot train it."
    )


def _batch(asked: Any, sequence_len: int) -> int:
    """Tokens of a step: `asked` if it is a multiple of `sequence_len`, else the default.

    The default is rounded down to a multiple of `sequence_len`, but to one sequence at least.
    """
    if type(asked) is int and asked >= sequence_len and asked % sequence_len == 0:
        return asked
    return max(1, RunConfig.total_batch_size // sequence_len) * sequence_len
