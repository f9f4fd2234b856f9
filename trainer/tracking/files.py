"""The tracking files in a run directory.

facts.json     run_id, experiment, params and tags of the run
metrics.jsonl  one line for each step and evaluation: step, figures (numbers by name, such as loss), Unix time
system.jsonl   one line for each sample of the host of rank 0: number of the sample as `step`, figures, time
samples/       generated texts, step_000100.txt
core/          accuracy by task of an evaluation of CORE, step_000100.csv
plots/         drawn from metrics.jsonl at the end
tracker.json   what the server has received; only the sender writes it
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.data.files import is_full, write_json, write_whole
from trainer.tracking.names import metric_of

FACTS, METRICS, SYSTEM, CURSOR = "facts.json", "metrics.jsonl", "system.jsonl", "tracker.json"
SAMPLES, CORE, PLOTS = "samples", "core", "plots"
EARLIER_EXPERIMENT = "nanofleet"  # of runs whose facts.json names none
KEPT_AT_THE_END = (FACTS, METRICS, SYSTEM, "run.json", "outcome.json", "sample.txt")


@dataclass(frozen=True)
class Facts:
    """The content of facts.json: what identifies and describes the run on an MLflow server.

    run_id: name of the run. digest: digest of its settings. Both together identify a run.
    params, tags: {name: text} for MLflow (see `facts_of`).
    experiment: name of the MLflow experiment.
    """

    run_id: str
    digest: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    experiment: str = EARLIER_EXPERIMENT

    def save(self, run_dir: Path) -> None:
        """Write facts.json to the run directory."""
        write_json(run_dir / FACTS, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> Facts:
        """Read facts.json, also that of an earlier release.

        Raises OSError if the file cannot be read, ValueError if its content is invalid.
        """
        raw = json.loads((run_dir / FACTS).read_text(encoding="utf-8"))
        try:
            experiment = str(raw.get("experiment", EARLIER_EXPERIMENT))
            params, tags = dict(raw["params"]), dict(raw["tags"])
            return cls(str(raw["run_id"]), str(raw["digest"]), params, tags, experiment)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it lacks {error}") from None
        except AttributeError:
            raise ValueError("it is not a JSON object") from None


@dataclass
class Cursor:
    """The content of tracker.json: which figures and files of a run the server has received.

    uri: address of the server, without user and password. run_id, digest: those of the run's Facts.
    mlflow_run: MLflow's id of the run; "" before it is known.
    steps: {metric: the last step that was sent}.
    artifacts: {file: size and time of the file that was sent}.
    status: the final status that was sent; "" before.
    A resumed run repeats steps and writes equal figures for them; the sender does not send these again,
    because MLflow cannot delete points. Earlier releases sent figures under their names in metrics.jsonl. If
    a run of such a release is sent again, the server keeps its earlier points under those names, and also has
    all points under the present names.
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
        """Read tracker.json; returns a new cursor if it is missing, damaged or of another server or run.

        run_dir: the folder of tracker.json. uri: address of the server, without user and password. facts: the
        content of the run's facts.json.
        """
        new = cls(uri, facts.run_id, facts.digest)
        try:
            old = cls(**json.loads((run_dir / CURSOR).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return new
        return old if (old.uri, old.run_id, old.digest) == (uri, facts.run_id, facts.digest) else new

    def save(self, run_dir: Path) -> None:
        """Write tracker.json to the run directory."""
        write_json(run_dir / CURSOR, asdict(self))

    def new_points(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The figures of a line that were not sent yet: {metric: value}.

        line: parsed line of metrics.jsonl, with step, time and figures.
        """
        figures = {
            metric_of(name): float(value)
            for name, value in line.items()
            if name not in ("step", "time") and isinstance(value, int | float)
        }
        return {name: value for name, value in figures.items() if line["step"] > self.steps.get(name, -1)}


class JsonLines:
    """Appends JSON lines to a file, unbuffered.

    While the disk is full, lines are kept in memory; the first later write that succeeds includes them.
    """

    def __init__(self, path: Path, last_step: float = math.inf) -> None:
        """Open the file `path` to append lines.

        last_step: lines of later steps are dropped (see `drop_after`). The attribute `last_step` is the step
        of the last line; -1 if the file has no line.
        """
        self._path, self._unwritten = path, bytearray()
        self._cut(last_step)
        self._file = self._open()

    def drop_after(self, step: float) -> None:
        """Drop the lines of later steps than `step`, because these steps are trained again.

        On a full disk the lines remain.
        """
        if self.last_step > step:
            self._file.close()
            try:
                self._cut(step)
            except OSError as error:
                if not is_full(error):
                    raise
            self._file = self._open()

    def _open(self) -> io.FileIO:
        return open(self._path, "ab", buffering=0)

    def _cut(self, last_step: float) -> None:
        """Replace the file by one without the lines after `last_step` and without an incomplete last line."""
        written = self._path.read_bytes() if self._path.exists() else b""
        lines = (written + self._unwritten).splitlines(keepends=True)
        last = -1
        while lines:
            line = parse(lines[-1])
            if line and line["step"] <= last_step:
                last = int(line["step"])
                break
            lines.pop()
        write_whole(self._path, b"".join(lines))
        self.last_step = last
        self._unwritten.clear()

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Append a line of JSON. A value that is not finite becomes null.

        step: number of the step. values: values by name, such as {"loss": 3.2}. time: Unix time.
        """
        figures = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.append(json.dumps({"step": step, **figures, "time": time}).encode() + b"\n", step)

    def append(self, raw: bytes, step: int) -> None:
        """Append a line of the step `step`. raw: the line as bytes, with its newline."""
        self._unwritten += raw
        self.last_step = step
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not is_full(error):
                raise


class NewLines:
    """Iterates over the lines of a JsonLines file after the first `offset` bytes; the caller moves `offset`.

    If the file has been replaced by another, `offset` is set to 0.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self._inode = path, 0, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield (parsed line, offset of its end) for each line after `offset`; nothing without the file.

        The parsed line is a dict (see `parse`).
        """
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self.offset:
                self._inode, self.offset = stat.st_ino, 0
            end = file.seek(self.offset)
            for raw in file:
                end += len(raw)
                if (line := parse(raw)) is not None:
                    yield line, end


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (raw bytes, parsed line) for each complete line of a JsonLines file; nothing if it is missing."""
    if path.exists():
        with open(path, "rb") as file:
            yield from ((raw, line) for raw in file if (line := parse(raw)) is not None)


def parse(raw: bytes) -> dict[str, Any] | None:
    """Parse a line to a dict: {"step": number, "time": Unix time, figure: value}.

    None if the line is incomplete or is not a JSON object with the numbers step and time.
    """
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    valid = isinstance(line, dict) and all(isinstance(line.get(key), int | float) for key in ("step", "time"))
    return line if valid else None
