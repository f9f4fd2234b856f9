"""Export of a checkpoint to a nanochat base directory.

export(Path("runs/mine/checkpoints/step_000100"), Path("out"), model_tag="d8")
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from trainer.checkpoint import storage
from trainer.config import RUN_ID_PATTERN, ConfigError, RunConfig
from trainer.data import DataError
from trainer.data.files import file_sha256, sync_file, sync_folder
from trainer.data.tokenizer import Tokenizer
from trainer.interchange import pickled_tokenizer
from trainer.interchange.layout import FOLDERS, TOKEN_BYTES, TOKENIZER, Pair
from trainer.interchange.meta import upstream_meta
from trainer.interchange.weights import check_fits, to_float32
from trainer.model.gpt import GPTConfig


@dataclass
class Exported:
    """The result of an export.

    pair: the checkpoint in nanochat's format. written: files that were written. unchanged: files that existed
    with the same content. note: which tensors were converted to float32; "" for none.
    """

    pair: Pair
    written: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    note: str = ""


def export(step_dir: Path, out: Path, model_tag: str = "", overwrite: bool = False) -> Exported:
    """Write the checkpoint in `step_dir` and its tokenizer to the nanochat base directory `out`.

    model_tag: name of the model's folder in `out`; "": d<number of layers>. overwrite: whether to replace
    existing files that have other content. Raises ConfigError if there are such files and `overwrite` is
    False, or if the checkpoint cannot be exported, and DataError if its tokenizer cannot be read; then no
    file is written. Files with the same content are kept.
    """
    try:
        meta = storage.read_meta(step_dir, storage.MODEL_FILES)
    except storage.DamagedCheckpointError as error:
        raise ConfigError(f"{error} {storage.USE_ANOTHER}") from None
    model = GPTConfig(**meta["model_config"])
    tag = model_tag or f"d{model.n_layer}"
    if not RUN_ID_PATTERN.fullmatch(tag):
        raise ConfigError(
            f"--model-tag is {tag!r}: it takes 1 to 63 letters, digits, dots, dashes and underscores, and "
            "starts with a letter or digit."
        )
    model_file = storage.model_file(step_dir, meta)
    weights = storage.read_tensors(model_file)
    check_fits(weights, model, model_file)
    weights, note = to_float32(weights, model_file)
    tokenizer = Tokenizer.load(step_dir / "tokenizer")
    if tokenizer.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{step_dir} has a model for {model.vocab_size:,} tokens and a tokenizer of "
            f"{tokenizer.vocab_size:,}: they must be equal. Export another checkpoint."
        )
    config = RunConfig(**meta["config"])
    pair = Pair(out / FOLDERS[config.stage] / tag, meta["step"])
    description = upstream_meta(meta, config, model)
    # nanochat finds a checkpoint by its model file, so that is written last.
    contents: dict[Path, Callable[[BinaryIO], object]] = {
        out / TOKENIZER: lambda file: file.write(pickled_tokenizer.pickled(tokenizer)),
        out / TOKEN_BYTES: lambda file: storage.save_tensors(torch.from_numpy(tokenizer.token_bytes), file),
        pair.meta: lambda file: file.write((json.dumps(description, indent=2) + "\n").encode()),
        pair.model: lambda file: storage.save_tensors(weights, file),
    }
    result = Exported(pair, note=note)
    if _is_there(out / TOKENIZER, tokenizer, overwrite):
        del contents[out / TOKENIZER]
        result.unchanged.append(out / TOKENIZER)
    if _has_token_bytes(out / TOKEN_BYTES, tokenizer):
        del contents[out / TOKEN_BYTES]
        result.unchanged.append(out / TOKEN_BYTES)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=out) as name:
        staged = {path: Path(name, path.name) for path in contents}
        for path, write in contents.items():
            with open(staged[path], "wb") as file:
                write(file)
                sync_file(file)
        for path in contents:
            if path == out / TOKENIZER:
                continue
            if path.exists() and file_sha256(path) == file_sha256(staged[path]):
                del staged[path]
                result.unchanged.append(path)
            elif path.exists() and not overwrite:
                raise ConfigError(
                    f"{path} exists and differs from the export. Give another "
                    f"{'--out' if path == out / TOKEN_BYTES else '--model-tag'}, or replace the file with "
                    "--overwrite."
                )
        for path, new in staged.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new, path)
            sync_folder(path.parent)
            result.written.append(path)
    return result


def _has_token_bytes(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether the file `path` has the lengths of this tokenizer's tokens in bytes.

    The values are compared, not the files: a file of nanochat with the same values may differ.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return torch.equal(found, torch.from_numpy(tokenizer.token_bytes))
    except Exception:  # no such file, or any exception that a damaged one raises in torch
        return False


def _is_there(path: Path, tokenizer: Tokenizer, overwrite: bool) -> bool:
    """Whether the file `path` contains this tokenizer; False if the file does not exist.

    Raises ConfigError if the file contains another tokenizer or none, unless `overwrite` is True.
    """
    if not path.exists():
        return False
    try:
        if pickled_tokenizer.read(path) == tokenizer:
            return True
        problem = f"{path} is another tokenizer than the checkpoint's."
    except DataError as error:
        problem = str(error)
    if overwrite:
        return False
    raise ConfigError(f"{problem} Models in {path.parents[1]} need it: give another --out, or --overwrite.")
