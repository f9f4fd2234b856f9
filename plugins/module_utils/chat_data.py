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

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding
from ansible_collections.nanofleet.fleet.trainer.stages import SFT

TOKENIZER = "tokenizer.json"
VERSION = 1  # increase it when the same conversations give other shards
EXAMPLE = "ansible-playbook train.yml -e stage=sft -e from_run=RUN -e conversations=FILE.jsonl"


class Source(NamedTuple):
    """A file or folder of conversations, and its weight as text; "" for 1."""

    path: Path
    weight: str


def request_findings(request: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about settings that do not belong together.

    request: stage, from_run, from_checkpoint, conversations; "" if not set.
    """
    names = ("from_run", "from_checkpoint", "conversations")
    given = [f"-e {name}={request[name]}" for name in names if request[name]]
    if request["stage"] != SFT:
        if given:
            problem = f"the stage is {request['stage']}, and {' and '.join(given)} are of stage sft."
            yield finding("NF008", given[0], problem, "add -e stage=sft, or leave them out")
        return
    if not (request["from_run"] or request["from_checkpoint"]):
        problem = "stage sft trains the model of a checkpoint further, and none is named."
        yield finding("NF009", "-e stage=sft", problem, f"add -e from_run=RUN, the base run: {EXAMPLE}")
    elif request["from_run"] and request["from_checkpoint"]:
        problem = "from_run and from_checkpoint both name a checkpoint."
        yield finding("NF021", given[0], problem, f"repeat the command without {given[1]}")
    if not request["conversations"]:
        problem = "stage sft trains on conversations, and none are given."
        yield finding("NF022", "-e stage=sft", problem, f"add -e conversations=FILE.jsonl: {EXAMPLE}")


def sources_of(text: str, folder: Path) -> list[Source]:
    """The sources in PATH[=WEIGHT],PATH[=WEIGHT]... . Relative paths begin at `folder`."""
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
    """Findings about files that are missing. tokenizer: the folder of the tokenizer."""
    for path, _ in sources:
        if not path.exists():
            problem = f"there is no file or folder {path}."
            fix = "correct the path; a relative one begins at the repository's root"
            yield finding("NF613", "conversations", problem, fix)
    if not (tokenizer / TOKENIZER).is_file():
        problem = f"there is no tokenizer in {tokenizer}: conversations need that of the base run."
        fix = "add -e data_dir=FOLDER, the data directory that the base run was trained on"
        yield finding("NF614", "data_dir", problem, fix)


def chat_digest(sources: Sequence[Source], tokenizer: Path, skip_bad: bool) -> str:
    """The first 12 hex digits of a sha256 of conversations, weights, tokenizer and options."""
    parts: list[Any] = [VERSION, skip_bad, _sha256(tokenizer / TOKENIZER)]
    for path, weight in sources:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        parts += [[_sha256(file), weight] for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def command_options(sources: Sequence[Source], tokenizer: Path, skip_bad: bool) -> list[str]:
    """The options of `python -m trainer conversations`, without --out."""
    words = []
    for path, weight in sources:
        words += ["--conversations", f"{path}={weight}" if weight else str(path)]
    return [*words, "--tokenizer", str(tokenizer), *(["--skip-bad"] if skip_bad else [])]
