"""The files of a nanochat base directory, and the choice of a checkpoint in it.

BASE/base_checkpoints/d8/model_000100.pt         weights by parameter name
                        /meta_000100.json        configuration of the model
    /chatsft_checkpoints/d8/...                  the same files of a fine-tuned model
    /tokenizer/tokenizer.pkl  token_bytes.pt     tokenizer, and the number of bytes of each token
    /base_data_climbmix/shard_00000.parquet ...  documents; base_data is the older name
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError
from trainer.stages import BASE, SFT

CHECKPOINTS = "base_checkpoints"
FOLDERS = {BASE: CHECKPOINTS, SFT: "chatsft_checkpoints"}  # of each stage
TOKENIZER = Path("tokenizer", "tokenizer.pkl")
TOKEN_BYTES = Path("tokenizer", "token_bytes.pt")
MODEL_FILE = re.compile(r"model_(\d{6,})\.pt")


@dataclass(frozen=True)
class Pair:
    """A checkpoint of nanochat: a model file and a meta file.

    folder: the folder that has both files. step: the number in their names.
    """

    folder: Path
    step: int

    @property
    def stage(self) -> str:
        """The stage of training, base or sft, by the name of the folder that contains `folder`."""
        return SFT if self.folder.resolve().parent.name == FOLDERS[SFT] else BASE

    @property
    def model(self) -> Path:
        """The path of the model file."""
        return self.folder / f"model_{self.step:06d}.pt"

    @property
    def meta(self) -> Path:
        """The path of the meta file."""
        return self.folder / f"meta_{self.step:06d}.json"


def find_pair(path: Path, model_tag: str = "", step: int | None = None, stage: str = BASE) -> Pair:
    """Find a checkpoint of nanochat at `path`: a model_*.pt, a folder of such files, or a base directory.

    model_tag, stage: used for a base directory only. stage: base for a base model, sft for a fine-tuned
    model. model_tag: name of the model's folder; "": the folder d<number> with the largest number, as in
    nanochat, or the newest folder if no name is like this. step: step of the checkpoint; None: the last step.
    Raises ConfigError if there is no such checkpoint.
    """
    if path.is_file():
        match = MODEL_FILE.fullmatch(path.name)
        if not match:
            raise ConfigError(f"{path} is not named like the checkpoints of nanochat: model_000100.pt.")
        if step is not None and step != int(match[1]):
            raise ConfigError(f"{path} is of step {int(match[1])}: remove --step {step}, or give the folder.")
        return _whole(Pair(path.parent, int(match[1])))
    if not path.is_dir():
        raise ConfigError(f"There is no file or folder {path}.")
    folder = path if _steps(path) else _tagged(path / FOLDERS[stage], model_tag)
    steps = _steps(folder)
    if not steps:
        raise ConfigError(f"There is no checkpoint (such as model_000100.pt) in {folder}.")
    if step is not None and step not in steps:
        raise ConfigError(f"There is no step {step} in {folder}, only {', '.join(map(str, sorted(steps)))}.")
    return _whole(Pair(folder, max(steps) if step is None else step))


def find_tokenizer(path: Path) -> Path:
    """The path of tokenizer.pkl in the nanochat base directory that is `path` or contains `path`.

    Raises ConfigError if there is no such file.
    """
    if not path.exists():
        raise ConfigError(f"There is no file or folder {path}.")
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    # A folder of checkpoints is two levels below the base directory.
    bases = (
        [folder]
        if any((folder / name).is_dir() for name in FOLDERS.values())
        else [folder, *folder.parents][:3]
    )
    for base in bases:
        if (base / TOKENIZER).is_file():
            return base / TOKENIZER
    raise ConfigError(
        f"There is no {TOKENIZER} in {path}"
        + (" or the two folders above it" if len(bases) > 1 else "")
        + ": give a nanochat base directory, or the tokenizer with --tokenizer FILE."
    )


def _whole(pair: Pair) -> Pair:
    if not pair.meta.is_file():
        raise ConfigError(
            f"{pair.model} has no {pair.meta.name} beside it, which describes the model: copy that file to "
            "the same folder."
        )
    return pair


def _steps(folder: Path) -> set[int]:
    matches = (MODEL_FILE.fullmatch(file.name) for file in folder.glob("model_*.pt"))
    return {int(match[1]) for match in matches if match}


def _tagged(checkpoints: Path, model_tag: str) -> Path:
    """The folder of the model `model_tag` in the folder `checkpoints`.

    Without a tag: the folder d<number> with the largest number, or the newest folder if no name is like this.
    Raises ConfigError if there is no such folder.
    """
    tags = [folder for folder in checkpoints.glob("*") if folder.is_dir()]
    if not tags:
        raise ConfigError(
            f"There is no checkpoint in {checkpoints.parent}: no {checkpoints.name}, no model_*.pt. Give a "
            "base directory of nanochat, or a folder of its checkpoints."
        )
    if model_tag:
        if checkpoints / model_tag not in tags:
            names = ", ".join(sorted(folder.name for folder in tags))
            raise ConfigError(f"There is no model {model_tag} in {checkpoints}, only {names}.")
        return checkpoints / model_tag
    depths = {folder: match[1] for folder in tags if (match := re.match(r"d(\d+)", folder.name))}
    if depths:
        return max(depths, key=lambda folder: (int(depths[folder]), folder.name))
    return max(tags, key=lambda folder: folder.stat().st_mtime)
