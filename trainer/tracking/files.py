"""The tracking files in a run directory.

facts.json     run_id, params and tags of the run
metrics.jsonl  one line for each step and evaluation: step, figures, time
system.jsonl   one line for each sample of the host of rank 0: number of the sample as `step`, figures, time
samples/       generated texts, step_000100.txt
plots/         drawn from metrics.jsonl at the end
tracker.json   what the server has received; only the sender writes it
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.files import is_full, sync_file, write_json

FACTS, METRICS, SYSTEM, CURSOR = "facts.json", "metrics.jsonl", "system.jsonl", "tracker.json"
SAMPLES, PLOTS = "samples", "plots"
KEPT_AT_THE_END = (FACTS, METRICS, SYSTEM, "run.json", "outcome.json", "sample.txt")


@dataclass(frozen=True)
class Facts:
    """The content of facts.json: run_id, digest of the configuration, and params and tags for MLflow.

    run_id and digest together identify a run.
    """

    run_id: str
    digest: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / FACTS, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> Facts:
        """Read facts.json. Raises OSError or ValueError if it is missing or damaged."""
        raw = json.loads((run_dir / FACTS).read_text(encoding="utf-8"))
        try:
            return cls(str(raw["run_id"]), str(raw["digest"]), dict(raw["params"]), dict(raw["tags"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it lacks {error}") from None


@dataclass
class Cursor:
    """The content of tracker.json: the figures and files of a run that the server has received.

    steps: figure -> its last step that was sent. artifacts: file -> size and time of the file that was sent.
    A resumed run repeats steps and writes equal figures for them. MLflow cannot delete points, so the sender
    does not send such points again.
    """

    uri: str
    run_id: str
    digest: str
    mlflow_run: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    status: str = ""

    @classmethod
    def load(cls, run_dir: Path, uri: str, facts: Facts) -> Cursor:
        """Read tracker.json; returns a new cursor if it is missing, damaged or of another server or run."""
        new = cls(uri, facts.run_id, facts.digest)
        try:
            old = cls(**json.loads((run_dir / CURSOR).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return new
        return old if (old.uri, old.run_id, old.digest) == (uri, facts.run_id, facts.digest) else new

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / CURSOR, asdict(self))

    def clear(self) -> None:
        """Forget all that was sent, because the server has lost the run."""
        self.mlflow_run, self.status = "", ""
        self.steps.clear()
        self.artifacts.clear()

    def new_points(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The figures of a parsed line that were not yet sent: name -> value."""
        figures = figures_of(line).items()
        return {name: value for name, value in figures if line["step"] > self.steps.get(name, -1)}


class JsonLines:
    """Appends JSON lines to a file, unbuffered.

    While the disk is full, lines are kept in memory; the first later write that succeeds includes them.
    """

    def __init__(self, path: Path, last_step: float = math.inf) -> None:
        """Open the file and drop its lines after `last_step`, because a resumed run repeats these steps."""
        self.last_step = -1
        self.figures = 0  # in the file
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as kept:
            for raw, line in read_lines(path):
                if line["step"] <= last_step:
                    kept.write(raw)
                    self.last_step = int(line["step"])
                    self.figures += len(figures_of(line))
            sync_file(kept)
        os.replace(temporary, path)
        self._kept = bytearray()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Append a line with step, `values` and time. A value that is not finite becomes null."""
        figures = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.figures += len(figures_of(figures))
        self._kept += json.dumps({"step": step, **figures, "time": time}).encode() + b"\n"
        try:
            while self._kept:
                del self._kept[: self._file.write(self._kept)]
        except OSError as error:
            if not is_full(error):
                raise


class NewLines:
    """Reads the lines that are appended to a JsonLines file; reads a file that replaces it from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0
        self._ahead = 0

    def read(self, limit: int) -> list[dict[str, Any]]:
        """At most `limit` lines after those that are committed; [] if the file does not exist."""
        lines: list[dict[str, Any]] = []
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                self._ahead = self._offset
                for raw in file:
                    if not raw.endswith(b"\n") or len(lines) == limit:
                        break
                    self._ahead += len(raw)
                    if (line := parse(raw)) is not None:
                        lines.append(line)
        except FileNotFoundError:
            return []
        return lines

    def commit(self) -> None:
        """Mark the lines of the last `read` as done: the next `read` returns those after them."""
        self._offset = self._ahead


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a parsed line: name -> value of all its numbers except step and time."""
    return {
        name: float(value)
        for name, value in line.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (raw bytes, parsed line) for each complete line of a JsonLines file; nothing if it is missing."""
    if path.exists():
        with open(path, "rb") as file:
            for raw in file:
                if raw.endswith(b"\n") and (line := parse(raw)) is not None:
                    yield raw, line


def parse(raw: bytes) -> dict[str, Any] | None:
    """Parse a line of a JsonLines file. None if it is not a JSON object with the numbers step and time."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    return line if all(isinstance(line.get(name), int | float) for name in ("step", "time")) else None
