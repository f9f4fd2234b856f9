"""Checkpoints: step_NNNNNN directories on the coordinator, each written whole or not at all.

step_000100/model.safetensors     parameters by name; model.pt up to schema 2
            optim.pt              {parameter name: {state name: tensor}}, sharded state gathered
            tokenizer/            so that a checkpoint can be sampled from alone
            meta.json             schema, step, config, losses, and the sha256 of every file above

Learning rates follow from configuration and step, the batch of a step from seed and step, and samples have
their own generator: step and seed are the whole state of schedules, data and randomness.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trainer.config import (
    HORIZON,
    IDENTITY,
    RUNTIME,
    SCHEMA,
    ConfigError,
    RunConfig,
    check_schema,
    migrate,
    note_of_dropped,
)
from trainer.data import DataError
from trainer.data.files import file_sha256, sync_file, sync_folder, write_json, write_whole
from trainer.data.tokenizer import FILE_NAME, Tokenizer
from trainer.distributed.process_group import Collectives
from trainer.host.memory import is_out_of_memory
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.lr_schedule import describe_extension
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

MODEL, PICKLED_MODEL = "model.safetensors", "model.pt"
PICKLED_SCHEMA = 2  # the last one with a PICKLED_MODEL
MODEL_FILES = (MODEL, f"tokenizer/{FILE_NAME}")
FILES = (*MODEL_FILES, "optim.pt")
COMMON = "outer_"  # prefix of the state of the sync mode, in optim.pt


ANOTHER = "Give the new run another name (with the playbooks -e run_id=NAME, by hand another --run-dir)"
DEFAULT_NAME = re.compile(r"d\d+-[0-9a-f]{8}")  # another release may name the same run differently
# Errors that mean a damaged file; after others it may be intact and unreadable now.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


class DamagedCheckpointError(ConfigError):
    """Raised for a damaged checkpoint; the message names the file."""


@dataclass
class State:
    """The state of a run at a step: the content of a checkpoint, and of the broadcast at the start.

    `meta` is the content of meta.json, `model` the parameters by name, `optim` the optimizer state by
    parameter name.
    """

    meta: dict[str, Any]
    model: dict[str, Tensor]
    optim: dict[str, ParameterState]

    @property
    def step(self) -> int:
        return int(self.meta.get("step", 0))


# -- on the disk -------------------------------------------------------------------------------------------


def save(folder: Path, state: State, tokenizer_dir: Path, keep: int = 2) -> Path:
    """Write `state` as the checkpoint of its step to `folder`; returns the path of the checkpoint.

    Then deletes all checkpoints but the newest `keep` and the best. Raises OSError; earlier checkpoints are
    then unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    target = folder / f"step_{state.step:06d}"
    temporary = folder / f".{target.name}.tmp"
    try:
        (temporary / "tokenizer").mkdir(parents=True)
        _write_tensors(temporary / MODEL, {name: _without_buffer(t) for name, t in state.model.items()})
        _write_tensors(
            temporary / "optim.pt",
            {
                name: {key: _without_buffer(t) for key, t in tensors.items()}
                for name, tensors in state.optim.items()
            },
        )
        write_whole(temporary / "tokenizer" / FILE_NAME, (tokenizer_dir / FILE_NAME).read_bytes())
        meta = {
            **state.meta,
            "schema": SCHEMA,
            "sha256": {name: file_sha256(temporary / name) for name in FILES},
        }
        write_json(temporary / "meta.json", meta)
        if target.exists():
            _remove(target)
        os.replace(temporary, target)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    spared = best(folder)
    for old in checkpoints(folder)[keep:]:
        if old != spared:
            _remove(old)
    return target


def drop_older(folder: Path) -> None:
    """Delete all checkpoints in `folder` but the newest and the best."""
    remove_leftovers(folder)
    spared = best(folder)
    for old in checkpoints(folder)[1:]:
        if old != spared:
            _remove(old)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint directories in `folder`, newest first."""
    found = [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def best(folder: Path) -> Path | None:
    """The checkpoint in `folder` with the lowest validation bits per byte; None if there is none.

    Only checkpoints with an evaluation at their own step count.
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

    A damaged one is logged, skipped and renamed to damaged_step_NNNNNN. Raises ConfigError if all are
    damaged, or if one is intact and cannot be loaded: a newer release wrote it, or memory is short.
    """
    found = checkpoints(folder)
    damaged: list[Path] = []
    for path in found:
        try:
            state = load(path, log)
        except DamagedCheckpointError as error:
            log(f"{error} The checkpoint before it is taken.")
            damaged.append(path)
            continue
        for other in damaged:  # it would count as one of those that are kept
            with contextlib.suppress(OSError):
                other.rename(other.with_name(f"damaged_{other.name}"))
        return state
    if found:
        raise ConfigError(
            f"None of the {len(found)} checkpoint(s) in {folder} is undamaged. Move the folder away to start "
            "from step 0."
        )
    return None


def load(path: Path, log: Callable[[str], None] | None = None) -> State:
    """Read and verify the checkpoint at `path`; `log` gets a message on settings that this release lacks.

    Raises DamagedCheckpointError naming the damaged file, ConfigError if the checkpoint cannot be loaded.
    """
    meta = read_meta(path, log=log)
    return State(meta, read_tensors(model_file(path, meta)), read_tensors(path / "optim.pt"))


def model_file(path: Path, meta: Mapping[str, Any]) -> Path:
    """The path of the parameters in the checkpoint at `path`: model.safetensors; model.pt up to schema 2."""
    return path / (PICKLED_MODEL if int(meta["schema"]) <= PICKLED_SCHEMA else MODEL)


def read_meta(
    path: Path, files: Sequence[str] = FILES, log: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The content of meta.json of the checkpoint at `path`, with settings migrated to this release.

    Verifies the sha256 of `files` first. Raises DamagedCheckpointError naming the damaged file, ConfigError
    if the checkpoint cannot be loaded.
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
        schema = int(meta["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{file} is damaged ({error}).") from None
    check_schema(schema, f"The checkpoint {path}")  # a newer release may have another layout
    try:
        hashes = {name: meta["sha256"][_saved_name(name, meta)] for name in FILES}
        config, model = dict(meta["config"]), dict(meta["model_config"])
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
    """The file name of `name`, one of FILES, in a checkpoint with the meta.json `meta`."""
    return model_file(Path(), meta).name if name == MODEL else name


def _settings(
    config: dict[str, Any], model: dict[str, Any], path: Path, log: Callable[[str], None] | None
) -> dict[str, dict[str, Any]]:
    """The keys config and model_config of a checkpoint, migrated to this release.

    `log` gets a message on settings that this release lacks. Raises ConfigError for invalid settings.
    """
    try:
        run, unknown = RunConfig.load(config)
        values, unknown_of_model = migrate(GPTConfig, model)
        settings = {"config": run.to_dict(), "model_config": dataclasses.asdict(GPTConfig(**values))}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"This release refuses the settings in {path / 'meta.json'}: {error}") from None
    if log is not None and (unknown or unknown_of_model):
        log(note_of_dropped(unknown + unknown_of_model, model | config, f"The checkpoint {path}"))
    return settings


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """A context manager that turns errors of reading `path` into a ConfigError.

    DamagedCheckpointError if the file is missing or damaged; ConfigError if it may be intact and cannot be
    loaded now.
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
    """Load model and tokenizer of the checkpoint at `path`; the model is in evaluation mode."""
    meta = read_meta(path, MODEL_FILES)
    file = model_file(path, meta)
    weights = read_tensors(file)
    try:
        with _loading(file):
            model = GPT(GPTConfig(**meta["model_config"])).to(next(iter(weights.values())).dtype)
            model.load_state_dict(weights)
    except RuntimeError:
        raise DamagedCheckpointError(f"{file} does not hold the model that meta.json names.") from None
    return model.eval(), Tokenizer.load(path / "tokenizer")


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary directories in `folder` that a killed attempt has left."""
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint.

    It is renamed first: a partly deleted directory is never taken for a checkpoint.
    """
    hidden = path.with_name(f".{path.name}.old")
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _without_buffer(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor without a larger buffer behind it, which torch.save would write too."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save_tensors(tensors: Any, file: BinaryIO) -> None:
    """Call `torch.save`. A disk error, which torch wraps in a RuntimeError, is raised as OSError."""
    try:
        torch.save(tensors, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise OSError(errno.EIO, str(error).splitlines()[0]) from None


def save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Call `save_file` of safetensors. A disk error, which is only in its message, is raised as OSError."""
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
    """Read a model file (tensors by name) or optim.pt (tensors by parameter and state name).

    Raises DamagedCheckpointError, or ConfigError if the file cannot be loaded now.
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


# -- between ranks -----------------------------------------------------------------------------------------


def gather_optimizer(group: Collectives, sync: SyncMode, optimizer: MuonAdamW) -> dict[str, ParameterState]:
    """The whole optimizer state on rank 0, gathered from the owner ranks; a part of it on the other ranks.

    It maps parameter name -> state name -> tensor. The state of the sync mode is included, with the prefix
    COMMON.
    """
    state = optimizer.state_dict()
    gathered = {name: tensors for name, tensors in state.items() if sync.owner_of(name) in (None, group.rank)}
    for owner in range(1, group.world_size):
        mine = {
            f"{name}/{key}": tensor
            for name, tensors in state.items()
            if sync.owner_of(name) == owner
            for key, tensor in tensors.items()
        }
        for path, tensor in group.send_to_coordinator(mine if group.rank == owner else {}, owner).items():
            name, _, key = path.rpartition("/")
            gathered.setdefault(name, {})[key] = tensor
    for name, tensors in sync.common_state().items():
        gathered.setdefault(name, {}).update({f"{COMMON}{key}": tensor for key, tensor in tensors.items()})
    return gathered


def pop_common_state(optim: dict[str, ParameterState]) -> dict[str, ParameterState]:
    """Remove the state of the sync mode from `optim` and return it, without the prefix COMMON."""
    common: dict[str, ParameterState] = {}
    for name, tensors in optim.items():
        for key in [key for key in tensors if key.startswith(COMMON)]:
            common.setdefault(name, {})[key.removeprefix(COMMON)] = tensors.pop(key)
    return common


def broadcast_state(group: Collectives, state: State | None) -> State:
    """Broadcast the state of rank 0, which every rank returns; the other ranks pass None."""
    if group.world_size == 1:
        assert state is not None
        return state
    flat: dict[str, Tensor] | None = None
    if state is not None:
        flat = {"meta": torch.tensor(list(json.dumps(state.meta).encode()), dtype=torch.uint8)}
        flat |= {f"model/{name}": tensor for name, tensor in state.model.items()}
        flat |= {
            f"optim/{name}/{key}": tensor
            for name, tensors in state.optim.items()
            for key, tensor in tensors.items()
        }
    flat = group.broadcast_tensors(flat)
    given = State(json.loads(flat.pop("meta").numpy().tobytes()), {}, {})
    for path, tensor in flat.items():
        kind, _, rest = path.partition("/")
        if kind == "model":
            given.model[rest] = tensor
        else:
            name, _, key = rest.rpartition("/")
            given.optim.setdefault(name, {})[key] = tensor
    return given


def check_begins(state: State, model: GPTConfig, hashes: Mapping[str, str], run_id: str) -> None:
    """Raise ConfigError or DataError if imported weights are of another model or tokenizer than the run's.

    `state` is the imported checkpoint; `model` and `hashes` are those of the run.
    """
    saved = state.meta["model_config"]
    differing = [
        f"{name} is {saved[name]!r}, the run's {value!r}"
        for name, value in dataclasses.asdict(model).items()
        if saved[name] != value
    ]
    if differing:
        raise ConfigError(
            f"The run {run_id} would start with the weights of another model: {'; '.join(differing)}. "
            "Use the settings that `import` printed."
        )
    tokenizer = state.meta["hashes"].get("tokenizer")
    if hashes.get("tokenizer", tokenizer) != tokenizer:
        raise DataError(
            f"The run {run_id} would start with weights for another tokenizer than that of its data. Import "
            "their tokenizer: python -m trainer import --from-nanochat PATH --data-dir DIR"
        )


def check_continues(state: State, config: RunConfig, hashes: Mapping[str, str], run_id: str) -> None:
    """Raise ConfigError or DataError if `state` is of another run, configuration or data than this run."""
    started = str(state.meta.get("run_id", run_id))
    by_default = DEFAULT_NAME.fullmatch(started) and DEFAULT_NAME.fullmatch(run_id)
    if started != run_id and not by_default and "imported" not in state.meta:
        raise ConfigError(
            f"The checkpoints are of the run {started}, and this run is {run_id}. {ANOTHER}, or resume "
            f"{started} by its name (by hand --run-id {started})."
        )
    differing = config.differences(saved_config(state), IDENTITY)
    if differing:
        raise ConfigError(
            f"The run {started} was started with another configuration: {'; '.join(differing)}. "
            f"{ANOTHER}, or use the old values to resume it."
        )
    other = [name for name, value in state.meta.get("hashes", {}).items() if hashes.get(name, value) != value]
    if other:
        raise DataError(
            f"The run {started} was started on other data ({', '.join(other)}). {ANOTHER}, or "
            "restore the old data."
        )


def saved_config(state: State) -> RunConfig:
    """The configuration with which a checkpoint was written."""
    return RunConfig.from_strings(state.meta["config"])


def settled_steps(meta: Mapping[str, Any], config: RunConfig, num_iterations: int) -> int:
    """The number of steps of a run: from its checkpoint, or `num_iterations` if the horizon has changed.

    The checkpoint has priority because a release may derive another number of steps from the same target.
    """
    if "num_iterations" not in meta or config.differences(RunConfig.from_strings(meta["config"]), HORIZON):
        return num_iterations
    return int(meta["num_iterations"])


def describe_changes(state: State, config: RunConfig, num_iterations: int, run_id: str) -> str:
    """Sentences on the changes in a run that resumes from `state`: more steps, other settings.

    Raises ConfigError if the run becomes shorter: its learning rates have followed the longer horizon.
    """
    before = int(state.meta.get("num_iterations", num_iterations))
    if num_iterations < max(before, state.step):
        raise ConfigError(
            f"The run {run_id} is one of {before:,} steps, of which {state.step:,} are done, and "
            f"{num_iterations:,} are asked for: a run can become longer, not shorter. To resume it, ask for "
            f"{max(before, state.step)} steps or more (with the playbooks -e steps=N, by hand "
            f"--num-iterations N). {ANOTHER}."
        )
    sentences = []
    if before < num_iterations:
        rates = (config.warmup_steps, config.warmdown_ratio, config.final_lr_frac)
        sentences.append(describe_extension(state.step, before, num_iterations, *rates))
    changed = config.differences(saved_config(state), RUNTIME)
    if changed:
        sentences.append(f"Resumed with other settings: {'; '.join(changed)}.")
    return " ".join(sentences)
