"""The files of an evaluation in its --out folder. All are results of one checkpoint, written atomically.

eval.json   the result of each part: bpb, core, chat, sample; a later command adds parts
core.json   right answers per finished CORE task, so that an interrupted evaluation continues after it
core.csv    a line per CORE task, as nanochat writes it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data.files import locked, write_json, write_whole
from trainer.eval.core import CoreResult, TaskResult
from trainer.eval.core_bundle import Bundle

RESULT, CORE, TABLE = "eval.json", "core.json", "core.csv"
SCHEMA = 1
WHAT = {
    "checkpoint": "checkpoint",
    "bundle": "CORE bundle",
    "max_per_task": "value of --core-max-per-task",
}


class Results:
    """The results of an evaluation, in the files eval.json, core.json and core.csv of a folder.

    folder: the folder, which is made if it is missing; None: nothing is written. parts: {part: its result},
    as in eval.json, for those of the parts bpb, core, chat and sample that were evaluated.
    """

    def __init__(self, folder: Path | None, checkpoint: Mapping[str, Any]) -> None:
        """Read eval.json in `folder`, if it exists, and make the folder if it is missing.

        If `folder` is None, nothing is read or made. checkpoint: identifies the checkpoint by the keys step,
        run_id and sha256 ({file: sha256}). Raises ConfigError if eval.json cannot be read, is damaged, has
        another schema or is of another checkpoint, or if the folder cannot be made; DataError if no file can
        be written there.
        """
        self.folder, self.checkpoint = folder, dict(checkpoint)
        self.parts: dict[str, Any] = self._read(RESULT, {"checkpoint": self.checkpoint}).get("parts", {})
        self._core: dict[str, Any] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--out {folder} cannot be created: {error.strerror}.") from None
        with self._lock():
            pass  # a problem is shown before the evaluation, not after it

    def add(self, part: str, result: Any) -> None:
        """Set the result of the part `part`, such as "bpb", in eval.json. result: JSON values."""
        self.parts[part] = result
        if self.folder is not None:
            with self._lock():  # another command may have added a part meanwhile
                written = self._read(RESULT, {"checkpoint": self.checkpoint}).get("parts", {})
                self.parts = {**self.parts, **written, part: result}
                content = {"schema": SCHEMA, "checkpoint": self.checkpoint, "parts": self.parts}
                write_json(self.folder / RESULT, content)

    def _lock(self) -> AbstractContextManager[None]:
        """Context in which this process holds the lock of the folder; without a folder, it does nothing.

        Raises DataError if the folder cannot be written.
        """
        return locked(self.folder / ".lock") if self.folder else nullcontext()

    def begin_core(self, bundle: Bundle, max_per_task: int) -> dict[str, list[int]]:
        """Read core.json; returns the CORE tasks that an interrupted evaluation has finished.

        Call it before `add_task` and `add_core`. bundle: the tasks. max_per_task: the most items of a task;
        0: all. Returns {label: [number of right answers, number of items]}. Raises ConfigError if core.json
        has results of another bundle or another `max_per_task`, or is damaged.
        """
        key = {"checkpoint": self.checkpoint, "bundle": bundle.digest, "max_per_task": max_per_task}
        self._core = {"schema": SCHEMA, **key, "tasks": self._read(CORE, key).get("tasks", {})}
        tasks = self._core["tasks"]
        if not isinstance(tasks, dict) or not all(map(_is_count, tasks.values())):
            path = self.folder and self.folder / CORE
            raise ConfigError(f"{path} is damaged. Remove it, and evaluate again.")
        return dict(tasks)

    def add_task(self, label: str, result: TaskResult) -> None:
        """Write the result of the CORE task `label` to core.json, so that the task is not evaluated again."""
        self._core["tasks"][label] = [result.correct, result.items]
        if self.folder is not None:
            write_json(self.folder / CORE, self._core)

    def add_core(self, result: CoreResult, max_per_task: int) -> None:
        """Set the result of CORE in eval.json, and write core.csv.

        max_per_task: the most items of a task; 0: all.
        """
        self.add("core", {**result.to_dict(), "max_per_task": max_per_task, "bundle": self._core["bundle"]})
        if self.folder is not None:
            write_whole(self.folder / TABLE, result.to_csv().encode())

    def _read(self, name: str, key: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the file `name`; {} if it is missing.

        Raises ConfigError if the file cannot be read, is damaged, has another schema, or has other values
        than `key` under the keys of `key`.
        """
        if self.folder is None:
            return {}
        path = self.folder / name
        try:
            content = dict(json.loads(path.read_bytes()))
            version = content["schema"]
            other = [field for field, value in key.items() if content[field] != value]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}). Remove it, and evaluate again.") from None
        if version != SCHEMA:
            raise ConfigError(f"{path} has the schema {version}; this release reads {SCHEMA}. Remove it.")
        if other:
            what = " and ".join(WHAT[name] for name in other)
            raise ConfigError(
                f"{path} has results for another {what}. Give another --out, or remove the files in "
                f"{self.folder}."
            )
        return content


def _is_count(found: Any) -> bool:
    """Whether `found` is a valid list [number of right answers, number of items]."""
    is_pair = isinstance(found, list) and [type(number) for number in found] == [int, int]
    return is_pair and 0 <= found[0] <= found[1] and found[1] > 0
