"""The request for a fine-tuning: which settings belong together, and the files of conversations.

Used on the controller only, before a host is contacted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import sha256_of
from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding
from ansible_collections.nanofleet.fleet.trainer.stages import SFT

TOKENIZER = "tokenizer.json"
VERSION = 1  # increase it when the same conversations give other shards
EXAMPLE = "ansible-playbook train.yml -e stage=sft -e from_run=RUN -e conversations=FILE.jsonl"


class Source(NamedTuple):
    """A file or folder of conversations.

    path: the path of the file or folder. weight: the number of times that an epoch contains each of its
    conversations, as text; "" for 1.
    """

    path: Path
    weight: str


def request_findings(request: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about settings of a fine-tuning that are missing, or that cannot be combined.

    request: {setting: value} of stage, from_run, from_checkpoint and conversations; "" if a setting is not
    set.
    """
    names = ("from_run", "from_checkpoint", "conversations")
    given = [f"-e {name}={request[name]}" for name in names if request[name]]
    if request["stage"] != SFT:
        if given:
            settings = " and ".join(given)
            problem = f"stage is {request['stage']}, but only fine-tuning (stage=sft) uses {settings}."
            fix = f"to fine-tune, add -e stage=sft; else repeat the command without {settings}"
            yield finding("NF008", given[0], problem, fix)
        return
    if not (request["from_run"] or request["from_checkpoint"]):
        problem = (
            "Fine-tuning (stage=sft) starts from the model of an earlier run, and the command names no run."
        )
        fix = (
            f"name it with from_run: {EXAMPLE}  (ansible-playbook status.yml shows the active or newest run)"
        )
        yield finding("NF009", "-e stage=sft", problem, fix)
    elif request["from_run"] and request["from_checkpoint"]:
        problem = (
            "from_run and from_checkpoint both set the model from which to start; only one of them can be "
            "used."
        )
        fix = (
            f"to start from the newest checkpoint of the run {request['from_run']}, repeat the command "
            f"without -e from_checkpoint={request['from_checkpoint']}; to start from this checkpoint, repeat "
            f"it without -e from_run={request['from_run']}"
        )
        yield finding("NF021", given[0], problem, fix)
    if not request["conversations"]:
        problem = (
            "Fine-tuning (stage=sft) trains on conversations, and the command names no file of conversations."
        )
        yield finding(
            "NF022", "-e stage=sft", problem, "repeat the command with -e conversations=FILE.jsonl added"
        )


def sources_of(text: str, folder: Path) -> list[Source]:
    """The files and folders in the setting `conversations`: PATH[=WEIGHT], separated by commas.

    text: the value of the setting. folder: where relative paths begin.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        path, weight = part, ""
        if not _path(part, folder).exists() and "=" in part:
            path, _, weight = part.rpartition("=")
        found.append(Source(_path(path, folder), weight))
    return found


def _path(text: str, folder: Path) -> Path:
    return folder / os.path.expanduser(text)


def file_findings(sources: Sequence[Source], tokenizer: Path) -> Iterator[Finding]:
    """A finding for each path of conversations that does not exist, and one if there is no tokenizer.

    sources: the files and folders of conversations. tokenizer: the folder in which tokenizer.json must be.
    """
    for path, _ in sources:
        if not path.exists():
            problem = f"There is no file or folder {path} on the controller."
            fix = "repeat the command with the right path, best an absolute one: -e conversations=PATH"
            yield finding("NF613", "conversations", problem, fix)
    if not (tokenizer / TOKENIZER).is_file():
        problem = (
            f"The folder {tokenizer} has no {TOKENIZER}. Fine-tuning needs the tokenizer of the base run, "
            "with whose checkpoint it starts."
        )
        fix = (
            "repeat the command with -e data_dir=FOLDER, the folder on the controller with the data of the "
            "base run (the one that was given to setup.yml; data/ by default)"
        )
        yield finding("NF614", "data_dir", problem, fix)


def chat_digest(sources: Sequence[Source], tokenizer: Path, skip_bad: bool) -> str:
    """12 hex digits that change with the conversations, their weights, the tokenizer and `skip_bad`.

    sources: the files and folders of conversations. tokenizer: the folder of the tokenizer. skip_bad:
    whether bad lines are left out. The digits are the first ones of a sha256. Raises OSError if a file cannot
    be read.
    """
    parts: list[Any] = [VERSION, skip_bad, sha256_of(tokenizer / TOKENIZER)]
    for path, weight in sources:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        parts += [[sha256_of(file), weight] for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def command_options(sources: Sequence[Source], tokenizer: Path, skip_bad: bool) -> list[str]:
    """The options of `python -m trainer conversations` for these sources, without --out.

    sources: the files and folders of conversations. tokenizer: the folder of the tokenizer. skip_bad: whether
    bad lines are left out.
    """
    words = []
    for path, weight in sources:
        words += ["--conversations", f"{path}={weight}" if weight else str(path)]
    return [*words, "--tokenizer", str(tokenizer), *(["--skip-bad"] if skip_bad else [])]
