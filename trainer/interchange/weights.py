"""Weights of nanochat: reading a state dict, checking it against a model, conversion to float32."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.host.memory import is_out_of_memory
from trainer.model.gpt import GPT, GPTConfig

COMPILED = "_orig_mod."  # prefix of the names of a compiled module
EXACT = (torch.bfloat16, torch.float16)  # converts to float32 without loss
NAMED = 4  # names of a list that a message includes


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a model file: {parameter name: tensor}.

    The prefix that torch.compile adds to the names is removed. Raises ConfigError, which names the file, if
    the file cannot be read or has anything else than tensors. An out-of-memory error is not converted.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path} is damaged or holds more than tensors: torch.load refuses it with weights_only=True."
        ) from None
    except Exception as error:  # a damaged file may raise any exception in torch
        if is_out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0].splitlines() or ["it ends too early"]
        raise ConfigError(
            f"{path} cannot be loaded ({type(error).__name__}: {reason[0]}). It is damaged, or no model "
            "file of nanochat: copy the file from nanochat again."
        ) from None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise ConfigError(
            f"{path} is not a state dict: it must contain tensors by parameter name and nothing else."
        )
    return {name.removeprefix(COMPILED): tensor for name, tensor in weights.items()}


def check_fits(weights: Mapping[str, Tensor], config: GPTConfig, path: Path) -> None:
    """Raise ConfigError if names or shapes of the weights differ from those of the model of `config`.

    weights: {parameter name: tensor}. path: the file of the weights, for messages.
    """
    if config.n_layer > len(weights):
        raise ConfigError(
            f"{path} holds {len(weights)} tensors, too few for a model of {config.n_layer} layers, which its "
            "meta file names. Copy both files from nanochat again."
        )
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in GPT(config).state_dict().items()}
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    unlike = [
        f"{name} is {tuple(weights[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing)} (models of older versions of nanochat lack some)")
    if unknown:
        problems.append(f"holds {_some(unknown)}, which the model does not have")
    if unlike:
        problems.append(f"does not have its shapes: {_some(unlike)}")
    if problems:
        raise ConfigError(
            f"{path} does not hold the model that its meta file names: it {'; it '.join(problems)}. Give the "
            "model file and the meta file of one checkpoint."
        )


def to_float32(weights: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Tensor], str]:
    """Convert weights to float32.

    weights: {parameter name: tensor}. path: the file of the weights, for messages. Returns ({parameter name:
    tensor}, note); note names the tensors that were converted, "" for none. Raises ConfigError if a tensor
    has a dtype other than float16, bfloat16, float32 and float64.
    """
    changed = {name: tensor.dtype for name, tensor in weights.items() if tensor.dtype != torch.float32}
    for name, dtype in changed.items():
        if dtype not in (*EXACT, torch.float64):
            found = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{path} holds {name} as {found}. Weights must be float16, bfloat16, float32 or float64: "
                "give the checkpoint that nanochat's training wrote."
            )
    if not changed:
        return dict(weights), ""
    kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in changed.values()}))
    how = "the values are the same" if torch.float64 not in changed.values() else "float64 values are rounded"
    note = f"{_some(list(changed))} were converted from {kinds} to float32: {how}"
    return {name: tensor.float() for name, tensor in weights.items()}, note


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
