"""Reads and checks a CORE bundle: a folder with the tasks of the CORE metric of DCLM (arXiv 2406.11794).

    bundle = read_bundle(Path("data/core"))
    bundle.tasks[0].items, bundle.digest

core.yaml            icl_tasks: label, icl_task_type, dataset_uri, num_fewshot, continuation_delimiter
eval_meta_data.csv   columns Eval Task and Random baseline, the percentage that guessing reaches
eval_data/           a JSON object per line; its fields depend on the type of the task (see class Task)

The layout is that of nanochat's eval_bundle.zip, whose files can be used as they are.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.data import DataError

TASKS, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
TASK_COLUMN, BASELINE_COLUMN = "Eval Task", "Random baseline"
CHOICE, SCHEMA, LANGUAGE = "multiple_choice", "schema", "language_modeling"
# Fields of an item by type of the task. TEXTS: fields with a text. OPTIONS: the field with a list of texts,
# of which `gold` is the index of the right one.
TEXTS = {CHOICE: ("query",), SCHEMA: ("continuation",), LANGUAGE: ("context", "continuation")}
OPTIONS = {CHOICE: "choices", SCHEMA: "context_options"}
DELIMITER = " "
SHUFFLE_SEED = 1337  # nanochat's, so that a limit selects the same items
HOW_TO_GET = (
    "Download a bundle to a new folder DIR: python -m trainer eval --checkpoint CHECKPOINT --core DIR "
    "--core-url nanochat (docs/how-to/evaluate.md)"
)

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A task of CORE.

    label: name of the task.
    kind: multiple_choice, schema or language_modeling.
    fewshot: number of solved items that a prompt shows before the item itself.
    delimiter: text between a question and its answer.
    baseline: accuracy of guessing, in percent.
    items: a dict per item (question), in the order of evaluation. Its keys are query, choices and gold in a
        task multiple_choice; context_options, continuation and gold in a task schema; context and
        continuation in a task language_modeling. gold is the index of the right option.
    where: path of the data file, for messages.
    """

    label: str
    kind: str
    fewshot: int
    delimiter: str
    baseline: float
    items: Sequence[Item]
    where: str = ""

    def centered(self, accuracy: float) -> float:
        """`accuracy`, from 0 to 1, on a scale on which guessing is 0 and all right is 1."""
        return (accuracy - 0.01 * self.baseline) / (1 - 0.01 * self.baseline)


@dataclass(frozen=True)
class Bundle:
    """The tasks of CORE in a folder.

    tasks: the tasks in the order of core.yaml. digest: sha256 (hex) of the names and contents of all files
    that were read.
    """

    tasks: tuple[Task, ...]
    digest: str

    def limited(self, max_per_task: int) -> Bundle:
        """A bundle with the first `max_per_task` items of each task; 0: with all items.

        Raises DataError if a task then has fewer than `fewshot` + 1 items, which each of its prompts needs.
        """
        tasks = []
        for task in self.tasks:
            items = task.items[:max_per_task] if max_per_task else task.items
            if len(items) <= task.fewshot:
                has, fix = f"has {len(items)} items", ""
                if len(items) < len(task.items):
                    has = f"is limited to {len(items)} of {len(task.items)} items"
                    fix = (
                        " Raise the limit: core_max_per_task (eval.yml), core_metric_max_per_task "
                        "(train.yml), or by hand --core-max-per-task or --core-metric-max-per-task."
                    )
                raise DataError(
                    f"{task.where}: the task {task.label} {has}, but it shows {task.fewshot} examples before "
                    f"each item and needs {task.fewshot + 1} items or more.{fix}"
                )
            tasks.append(dataclasses.replace(task, items=items))
        return dataclasses.replace(self, tasks=tuple(tasks))


def read_bundle(folder: Path) -> Bundle:
    """Read the bundle in `folder` and check every item. Items are shuffled as nanochat does.

    Raises DataError if a file is missing or has an invalid value. The message names the file and the line.
    """
    if not folder.is_dir():
        raise DataError(f"There is no CORE bundle {folder}. {HOW_TO_GET}.")
    digest = hashlib.sha256()

    def read(path: Path) -> str:
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise DataError(
                f"The CORE bundle {folder} lacks {path.relative_to(folder)}. Copy the bundle again, or: "
                f"{HOW_TO_GET}."
            ) from None
        except OSError as error:
            raise DataError(f"Cannot read {path}: {error.strerror}.") from None
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + hashlib.sha256(raw).digest())
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            raise DataError(f"{path}, line {line}: not UTF-8. {HOW_TO_GET}.") from None

    entries = _read_entries(folder / TASKS, read(folder / TASKS))
    baselines = _read_baselines(folder / BASELINES, read(folder / BASELINES))
    tasks = []
    for where, entry in entries:
        label = entry["label"]
        if label not in baselines:
            raise DataError(
                f"{folder / BASELINES} has no row with {label} as {TASK_COLUMN}: add it with its "
                f"{BASELINE_COLUMN} in percent, or remove the task ({where})."
            )
        path = folder / DATA / entry["dataset_uri"]
        items = _read_items(path, read(path), entry["icl_task_type"])
        random.Random(SHUFFLE_SEED).shuffle(items)
        kind, fewshot = entry["icl_task_type"], entry["num_fewshot"]
        delimiter = entry["continuation_delimiter"]
        tasks.append(Task(label, kind, fewshot, delimiter, baselines[label], items, str(path)))
    return Bundle(tuple(tasks), digest.hexdigest())


def _read_entries(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The tasks in core.yaml, each with its file and line as text. Raises DataError."""
    import yaml  # only hosts that evaluate need it

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        content = loader.construct_document(root) if root else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise DataError(f"{path}{line}: not YAML ({problem}).") from None
    found = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(found, list) or not found:
        raise DataError(f"{path}: it lacks icl_tasks, the list of tasks.")
    nodes = [value for key, value in root.value if key.value == "icl_tasks"][-1]
    entries: list[tuple[str, dict[str, Any]]] = []
    labels: set[str] = set()
    for node, entry in zip(nodes.value, found, strict=True):
        where = f"{path}, line {node.start_mark.line + 1}"
        entries.append((where, checked := _checked_entry(where, entry)))
        if checked["label"] in labels:
            raise DataError(f"{where}: a second task with the label {checked['label']}.")
        labels.add(checked["label"])
    return entries


def _checked_entry(where: str, entry: Any) -> dict[str, Any]:
    """An entry of icl_tasks with its defaults, and num_fewshot as a number. Raises DataError."""
    if not isinstance(entry, dict):
        raise DataError(f"{where}: a task is a mapping with label, icl_task_type and dataset_uri.")
    for name in ("label", "icl_task_type", "dataset_uri"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise DataError(f"{where}: the task lacks {name}, a text.")
    if entry["icl_task_type"] not in TEXTS:
        raise DataError(
            f"{where}: the task {entry['label']} has the type {entry['icl_task_type']}, which is unknown: "
            f"use {', '.join(TEXTS)}."
        )
    uri = PurePosixPath(entry["dataset_uri"])
    if uri.is_absolute() or ".." in uri.parts:
        raise DataError(f"{where}: dataset_uri is {uri}: it takes a path relative to {DATA}, without '..'.")
    shots = entry.get("num_fewshot")
    if isinstance(shots, list) and len(shots) == 1:
        shots = shots[0]
    if type(shots) is not int or shots < 0:
        raise DataError(f"{where}: num_fewshot is {shots!r}: it takes one number from 0, such as [10].")
    delimiter = entry.get("continuation_delimiter", DELIMITER)
    if not isinstance(delimiter, str):
        raise DataError(f"{where}: continuation_delimiter is {delimiter!r}: it takes a text.")
    return {**entry, "num_fewshot": shots, "continuation_delimiter": delimiter}


def _read_baselines(path: Path, text: str) -> dict[str, float]:
    """The percentage that guessing reaches, by label. Raises DataError."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for column in (TASK_COLUMN, BASELINE_COLUMN):
        if column not in (reader.fieldnames or ()):
            raise DataError(f"{path}, line 1: it lacks the column {column}.")
    baselines = {}
    for row in reader:
        try:
            baseline = float(row[BASELINE_COLUMN])
            if not 0 <= baseline < 100:
                raise ValueError
        except (TypeError, ValueError):
            raise DataError(
                f"{path}, line {reader.line_num}: {BASELINE_COLUMN} is {row[BASELINE_COLUMN]!r}: it takes a "
                "percentage from 0, below 100."
            ) from None
        baselines[str(row[TASK_COLUMN])] = baseline
    return baselines


def _read_items(path: Path, text: str, kind: str) -> list[Item]:
    """The items of a data file. Raises DataError."""
    items = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                raw = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not JSON ({error}).") from None
            items.append(_checked_item(where, raw, kind))
    return items


def _checked_item(where: str, raw: Any, kind: str) -> Item:
    """The fields of an item that its type needs. Raises DataError if one is missing or has no valid value."""
    if not isinstance(raw, dict):
        raise DataError(f"{where}: an item is a JSON object.")
    item: dict[str, Any] = {name: _text(where, raw, name) for name in TEXTS[kind]}
    if kind == LANGUAGE and not item["continuation"]:
        raise DataError(f"{where}: continuation is empty, so there is nothing to predict.")
    if kind in OPTIONS:
        name = OPTIONS[kind]
        options = raw.get(name)
        if not isinstance(options, list) or len(options) < 2:
            raise DataError(f"{where}: {name} is missing, or no list of 2 texts or more.")
        item[name] = [_text(where, {name: option}, name) for option in options]
        gold = raw.get("gold")
        if type(gold) is not int or not 0 <= gold < len(options):
            raise DataError(f"{where}: gold is {gold!r}: it takes a number from 0 to {len(options) - 1}.")
        item["gold"] = gold
    return item


def _text(where: str, raw: Mapping[str, Any], name: str) -> str:
    """A field as text; numbers are written as Python writes them. Raises DataError."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: the item lacks {name}, a text.")
    return str(value)
