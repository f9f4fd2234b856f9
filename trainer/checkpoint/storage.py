"""Checkpoints: step_NNNNNN directories on the coordinator, each written whole or not at all.

step_000100/model.safetensors     parameters by name; model.pt up to schema 2
            optim.pt              {parameter name: {state name: tensor}}, of the whole model
            tokenizer/            a copy, so that the directory alone is enough to generate text
            meta.json             schema, step, config, losses, and the sha256 of every file above

A checkpoint needs no state of schedules, data order or random generators. Learning rates are computed from
configuration and step, the batch of a step from seed and step; samples of text have a generator of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trainer.config import SCHEMA, ConfigError, RunConfig, check_schema, migrate, note_of_dropped
from trainer.data.files import file_sha256, sync_file, sync_folder, write_json, write_whole
from trainer.data.tokenizer import FILE_NAME, Tokenizer
from trainer.host.memory import is_out_of_memory
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import ParameterState

MODEL, PICKLED_MODEL = "model.safetensors", "model.pt"
PICKLED_SCHEMA = 2  # the last one with a PICKLED_MODEL
MODEL_FILES = (MODEL, f"tokenizer/{FILE_NAME}")
FILES = (*MODEL_FILES, "optim.pt")
USE_ANOTHER = "Use another checkpoint, or a copy of this one (ansible-playbook fetch.yml)."
# Errors that mean a damaged file. After another error the file may be intact.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


@dataclass
class TrainState:
    """The progress of a run between two steps, without its parameters.

    step: number of completed steps.
    first_loss, loss: loss of the first and of the last step, in nats per token; None before the first step.
    smooth_loss: moving average of the loss, not corrected for its start at 0 (nanochat's smooth_train_loss).
    training_seconds: seconds of all steps so far, in all attempts.
    val_bpb, val_bpb_step: result of the last evaluation in bits per byte, and the steps completed before it.
    best_val_bpb: the lowest result of an evaluation so far.
    checkpoint: path of the newest checkpoint, relative to the run directory.
    """

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    smooth_loss: float | None = None
    training_seconds: float = 0.0
    val_bpb: float | None = None
    val_bpb_step: int | None = None
    best_val_bpb: float | None = None
    checkpoint: str | None = None

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> TrainState:
        """The progress in `meta`, the content of a checkpoint's meta.json. The field `checkpoint` is None."""
        names = {each.name for each in fields(cls)} - {"checkpoint"}
        return cls(**{name: meta[name] for name in names if name in meta})


class DamagedCheckpointError(ConfigError):
    """Raised for a damaged checkpoint; the message names the file."""


@dataclass
class State:
    """The state of a run after a step, as a checkpoint contains it.

    meta: content of meta.json, such as step. model: {parameter name: tensor}. optim: {parameter name: {state
    name: tensor}}, for the whole model. A state name with the prefix COMMON (see exchange.py) belongs to the
    sync mode, any other state name to the optimizer.
    """

    meta: dict[str, Any]
    model: dict[str, Tensor]
    optim: dict[str, ParameterState]

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.meta.get("step", 0))


def save(folder: Path, state: State, tokenizer_dir: Path, keep: int = 2) -> Path:
    """Write `state` as the checkpoint of its step to `folder`; returns the path of the checkpoint.

    tokenizer_dir: folder of tokenizer.json, which is copied. keep: number of newest checkpoints that stay;
    older ones are deleted afterwards, except the checkpoint with the lowest validation bits per byte. Raises
    OSError if the checkpoint cannot be written; earlier checkpoints are then unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_half_written(folder)
    target = folder / f"step_{state.step:06d}"
    temporary = folder / f".{target.name}.tmp"
    try:
        (temporary / "tokenizer").mkdir(parents=True)
        _write_tensors(temporary / MODEL, {name: _without_buffer(t) for name, t in state.model.items()})
        optim = {
            name: {key: _without_buffer(t) for key, t in tensors.items()}
            for name, tensors in state.optim.items()
        }
        _write_tensors(temporary / "optim.pt", optim)
        write_whole(temporary / "tokenizer" / FILE_NAME, (tokenizer_dir / FILE_NAME).read_bytes())
        hashes = {name: file_sha256(temporary / name) for name in FILES}
        write_json(temporary / "meta.json", {**state.meta, "schema": SCHEMA, "sha256": hashes})
        if target.exists():
            remove(target)
        os.replace(temporary, target)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    prune(folder, keep)
    return target


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints in `folder` except the newest `keep` and the result of `best`.

    Temporary directories are deleted too, but not a copy that is being received (checkpoint/transfer.py).
    """
    _remove_half_written(folder)
    spared = best(folder)
    for old in checkpoints(folder)[keep:]:
        if old != spared:
            remove(old)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint directories in `folder`, newest first."""
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def best(folder: Path) -> Path | None:
    """The checkpoint in `folder` with the lowest validation bits per byte; None if no checkpoint has a value.

    A checkpoint has a value only if the run was evaluated at the step of the checkpoint.
    """
    evaluated: list[tuple[float, Path]] = []
    for path in checkpoints(folder):
        try:
            meta = json.loads((path / "meta.json").read_bytes())
            if meta["val_bpb_step"] == meta["step"]:
                evaluated.append((float(meta["val_bpb"]), path))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; reported when it is loaded
    return min(evaluated, default=(0.0, None))[1]


def newest(folder: Path, log: Callable[[str], None]) -> State | None:
    """Read the newest checkpoint in `folder` that is not damaged; None if the folder has no checkpoint.

    log: called with a message for each damaged checkpoint. Damaged checkpoints newer than the result are
    renamed to damaged_step_NNNNNN. Raises ConfigError if all checkpoints are damaged, or if an undamaged
    checkpoint cannot be loaded, for example because a newer release wrote it or the host has too little
    memory.
    """
    found = checkpoints(folder)
    damaged: list[Path] = []
    for path in found:
        try:
            state = load(path, log)
        except DamagedCheckpointError as error:
            log(f"{error} The run resumes from the previous checkpoint, if that one is undamaged.")
            damaged.append(path)
            continue
        for other in damaged:  # it would count as one of those that are kept
            with contextlib.suppress(OSError):
                other.rename(other.with_name(f"damaged_{other.name}"))
        return state
    if found:
        raise ConfigError(
            f"All {len(found)} checkpoint(s) in {folder} are damaged. To start from step 0: "
            f"sudo mv {folder} {folder}-damaged, then start the run again."
        )
    return None


def load(path: Path, log: Callable[[str], None] | None = None) -> State:
    """Read and verify the checkpoint at `path`.

    log: called with a message if the checkpoint has settings that this release lacks. Raises
    DamagedCheckpointError, which names the file, if a file is damaged or missing; ConfigError if the
    checkpoint cannot be loaded for another reason.
    """
    meta = read_meta(path, log=log)
    return State(meta, read_tensors(model_file(path, meta)), read_tensors(path / "optim.pt"))


def model_file(path: Path, meta: Mapping[str, Any]) -> Path:
    """The path of the file with the parameters of the checkpoint at `path`.

    meta: content of its meta.json. The file is model.safetensors; up to schema 2 it is model.pt.
    """
    return path / (PICKLED_MODEL if int(meta["schema"]) <= PICKLED_SCHEMA else MODEL)


def read_meta(
    path: Path, files: Sequence[str] = FILES, log: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The content of meta.json of the checkpoint at `path`, with settings migrated to this release.

    files: the files of the checkpoint whose sha256 is verified. log: called with a message if the checkpoint
    has settings that this release lacks. Raises DamagedCheckpointError, which names the file, if a file is
    damaged or missing; ConfigError if the checkpoint cannot be read for another reason.
    """
    if not path.is_dir():
        raise ConfigError(f"There is no checkpoint directory {path}.")
    inside = checkpoints(path / "checkpoints") or checkpoints(path)
    if inside and not (path / "meta.json").exists():
        raise ConfigError(f"{path} is not a checkpoint but contains some: use {inside[0]}.")
    file = path / "meta.json"
    with _loading(file):
        raw = file.read_bytes()
    try:
        meta = dict(json.loads(raw))
        check_schema(int(meta["schema"]), f"The checkpoint {path}")  # a newer release may have another layout
        hashes = {name: meta["sha256"][_saved_name(name, meta)] for name in FILES}
        config, model = dict(meta["config"]), dict(meta["model_config"])
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{file} is damaged ({error}).") from None
    for name in files:
        file = path / _saved_name(name, meta)
        with _loading(file):
            actual = file_sha256(file)
        if actual != hashes[name]:
            raise DamagedCheckpointError(f"{file} is damaged: its sha256 is not the one in meta.json.")
    return meta | _settings(config, model, path, log)


def _saved_name(name: str, meta: Mapping[str, Any]) -> str:
    """The name of the file `name`, one of FILES, in a checkpoint: up to schema 2, MODEL is named model.pt.

    meta: content of the checkpoint's meta.json.
    """
    return model_file(Path(), meta).name if name == MODEL else name


def _settings(
    config: dict[str, Any], model: dict[str, Any], path: Path, log: Callable[[str], None] | None
) -> dict[str, dict[str, Any]]:
    """The keys config and model_config of meta.json, migrated to this release. Raises ConfigError."""
    try:
        run, unknown = RunConfig.load(config)
        values, unknown_of_model = migrate(GPTConfig, model)
        settings = {"config": run.to_dict(), "model_config": dataclasses.asdict(GPTConfig(**values))}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"The settings in {path / 'meta.json'} are not valid in this release: {str(error).rstrip('.')}. "
            "Use the release that wrote the checkpoint."
        ) from None
    if log is not None and (unknown or unknown_of_model):
        log(note_of_dropped(unknown + unknown_of_model, model | config, f"The checkpoint {path}"))
    return settings


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Context manager that converts errors of reading the file `path`.

    A damaged or missing file: DamagedCheckpointError. Another OSError, or too little memory: ConfigError.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise ConfigError(
                f"This host has too little memory to load {path}, which is unchanged. "
                "Stop other programs there, or resume on a host with more memory."
            ) from None
        if not isinstance(error, OSError):
            raise
        if error.errno in DAMAGE:
            raise DamagedCheckpointError(f"{path} is missing or damaged: {error.strerror}.") from None
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. The file is unchanged: check its permissions and disk."
        ) from None


def load_model(path: Path) -> tuple[GPT, Tokenizer]:
    """Load model and tokenizer of the checkpoint at `path`; the model is in evaluation mode.

    Raises DamagedCheckpointError if a file is damaged or missing, ConfigError if the model cannot be loaded
    for another reason.
    """
    try:
        meta = read_meta(path, MODEL_FILES)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error} {USE_ANOTHER}") from None
    file = model_file(path, meta)
    weights = read_tensors(file)
    try:
        with _loading(file):
            model = model_from(meta["model_config"], weights)
    except RuntimeError:
        raise DamagedCheckpointError(f"{file} does not hold the model that meta.json names.") from None
    return model, Tokenizer.load(path / "tokenizer")


def model_from(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> GPT:
    """A model in evaluation mode. config: fields of GPTConfig. weights: {parameter name: tensor}.

    Raises RuntimeError if the weights do not fit the model that `config` describes.
    """
    model = GPT(GPTConfig(**config)).to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    return model.eval()


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary directories in `folder` that a killed attempt has left."""
    _remove_half_written(folder)
    for copy in folder.glob(".step_*.copy"):
        shutil.rmtree(copy, ignore_errors=True)


def _remove_half_written(folder: Path) -> None:
    for leftover in (*folder.glob(".step_*.tmp"), *folder.glob(".step_*.old")):
        shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    """Rename a checkpoint, then delete it: a partly deleted directory is never taken for a checkpoint."""
    hidden = path.with_name(f".{path.name}.old")
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _without_buffer(tensor: Tensor) -> Tensor:
    """`tensor` as a contiguous CPU tensor with a storage of its size: torch.save writes the whole storage."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save_tensors(tensors: Any, file: BinaryIO) -> None:
    """Write `tensors` to the open `file` by `torch.save`.

    A disk error, which torch wraps in a RuntimeError, is raised as OSError.
    """
    try:
        torch.save(tensors, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise OSError(errno.EIO, str(error).splitlines()[0]) from None


def save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write `tensors`, {name: tensor}, to the file `path` by `save_file` of safetensors.

    A disk error, which safetensors reports as a SafetensorError, is raised as OSError.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path)  # replaces it by a file for its owner alone
        path.chmod(mode)
    except safetensors.SafetensorError as error:
        code = re.search(r"\bcode: (\d+)|os error (\d+)", str(error))
        number = int(code[1] or code[2]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from None


def _write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    if path.name == MODEL:
        save_safetensors(tensors, path)
    else:
        with open(path, "wb") as file:
            save_tensors(tensors, file)
    with open(path, "rb") as written:
        sync_file(written)


def read_tensors(path: Path) -> Any:
    """Read the tensors that `save_tensors` or `save_safetensors` has written to the file `path`.

    Returns {parameter name: tensor} for a model file, {parameter name: {state name: tensor}} for optim.pt.
    Raises DamagedCheckpointError if the file is damaged or missing; ConfigError if it cannot be loaded for
    another reason, such as too little memory.
    """
    try:
        with _loading(path):
            if path.name == MODEL:
                return safetensors.torch.load_file(path, backend="pread")
            return torch.load(path, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except safetensors.SafetensorError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from None
    except pickle.UnpicklingError:
        raise DamagedCheckpointError(f"{path} cannot be read: it holds more than tensors.") from None
    except (RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from None
