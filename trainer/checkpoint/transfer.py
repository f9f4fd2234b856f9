"""The transfer of one checkpoint from a rank to ranks of other hosts, in a thread.

The source sends a header (name, files, sizes), then the files in chunks. A receiver writes them to
.step_NNNNNN.copy, compares every sha256 with meta.json, and renames the directory at the end, so that an
incomplete copy is never taken for a checkpoint. A receiver that already has the checkpoint, or has no room
for it, discards the chunks. At the end each receiver sends "", or a sentence on its problem: why it has no
copy, or why it cannot delete older copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from trainer.checkpoint import storage
from trainer.config import ConfigError
from trainer.data.files import sync_file, sync_folder
from trainer.distributed.process_group import PeerLost
from trainer.distributed.subgroup import Subgroup

CHUNK_BYTES = 4 * 2**20
PROBLEM_BYTES = 512
NAME = re.compile(r"step_\d+")
FILE = re.compile(r"(tokenizer/)?[A-Za-z0-9_-][A-Za-z0-9._-]*")


class CheckpointTransfer:
    """Sends one checkpoint to other hosts, or receives it, in a thread.

    The attributes have their final values once `busy` is False.
    name: name of the checkpoint. size: total bytes of its files.
    sent: bytes sent or received so far; 0 if all receivers already had the checkpoint.
    seconds: duration of the transfer.
    problems: {host: a sentence on why the host has no copy, or cannot delete older copies}.
    lost: the error that ended the transfer early; "" for none.
    """

    def __init__(self, link: Subgroup, folder: Path, path: Path | None = None, prunes: bool = True) -> None:
        """Start the transfer between the members of `link`, of which one is the source.

        folder: the folder of the checkpoints on this host. path: on the source, the directory of the
        checkpoint; None on the receivers. prunes: whether a receiver afterwards deletes the checkpoints that
        the source does not have.
        """
        self._link, self._folder, self._prunes = link, folder, prunes
        self.problems: dict[str, str] = {}
        self.lost = ""
        self.sent = self.size = 0
        self.seconds = 0.0
        self.name = path.name if path else ""
        self._thread = threading.Thread(target=self._run, args=(path,), name="checkpoint copy", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the thread still sends or receives."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the transfer has ended, at most `seconds`; None: without a limit."""
        self._thread.join(seconds)

    def _run(self, path: Path | None) -> None:
        began = time.monotonic()
        try:
            if path is None:
                self._receive()
            else:
                self._send(path)
        except Exception as error:  # the thread would lose it; the run continues
            self.lost = str(error) if isinstance(error, PeerLost) else f"{type(error).__name__}: {error}"
        self.seconds = time.monotonic() - began

    # -- source ----------------------------------------------------------------------------------------

    def _send(self, path: Path) -> None:
        files: list[tuple[str, IO[bytes]]] = []
        problem = ""
        try:
            try:  # all are open before the first is sent: the run may delete the checkpoint meanwhile
                for name in _names_in(path):
                    files.append((name, open(path / name, "rb", buffering=0)))  # noqa: SIM115 - closed below
                header = self._header(path, files)
            except (OSError, ValueError, KeyError) as error:
                reason = error.strerror if isinstance(error, OSError) else "its meta.json is damaged"
                problem, header = f"{path} cannot be read: {reason}", {}
            self._exchange_header(header)
            if header and self._some_lack_it(False):
                for _, file in files:
                    problem = self._send_file(file) or problem
            self._gather_problems("")
        finally:
            for _, file in files:
                file.close()
        if problem:
            self.problems = {peer.host: problem for peer in self._receivers()}

    def _header(self, path: Path, files: list[tuple[str, IO[bytes]]]) -> dict[str, Any]:
        sizes = [(name, os.fstat(file.fileno()).st_size) for name, file in files]
        self.size = sum(size for _, size in sizes)
        best = storage.best(self._folder)
        return {
            "name": path.name,
            "files": sizes,
            "meta": hashlib.sha256((path / "meta.json").read_bytes()).hexdigest(),
            "kept": [each.name for each in storage.checkpoints(self._folder)],
            "best": _bits_per_byte(best) if best else None,
        }

    def _send_file(self, file: IO[bytes]) -> str:
        """Send an open file; returns a sentence on a read error, "" for none.

        After a read error, zeros are sent, so that receivers reject the checkpoint as damaged.
        """
        left, problem = os.fstat(file.fileno()).st_size, ""
        while left > 0:
            chunk = torch.zeros(min(left, CHUNK_BYTES), dtype=torch.uint8)
            try:
                _read_into(file, chunk)
            except OSError as error:
                problem = f"its files on the source cannot be read: {error.strerror}"
            self._link.broadcast(chunk)
            left -= len(chunk)
            self.sent += len(chunk)
        return problem

    # -- receivers -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        header = self._exchange_header(None)
        if not header:
            self._gather_problems("")
            return
        name, files = str(header["name"]), [(str(each), int(size)) for each, size in header["files"]]
        if not NAME.fullmatch(name) or not all(FILE.fullmatch(each) for each, _ in files):
            raise ValueError(f"The header names files outside of a checkpoint: {name}")
        target, problem = self._folder / name, ""
        has_it = _has(target, files, header["meta"])
        self.name, self.size = name, sum(size for _, size in files)
        if self._some_lack_it(not has_it):
            problem = self._receive_files(target, files, discard=has_it)
        if self._prunes and not problem:
            try:
                _prune(self._folder, {name, *header["kept"]}, header["best"])
            except OSError as error:
                problem = f"older copies cannot be deleted: {error.strerror}"
        self._gather_problems(problem)

    def _receive_files(self, target: Path, files: list[tuple[str, int]], discard: bool) -> str:
        """Receive the files of a checkpoint; returns a sentence on a problem, or "".

        target: the directory to write. files: (name, bytes) of each file. discard: whether to write nothing.
        All bytes are received in any case.
        """
        temporary = target.with_name(f".{target.name}.copy")
        problem = "" if discard else self._make_room(temporary)
        writes = not discard and not problem
        try:
            for name, size in files:
                problem = self._receive_file(temporary / name, size, writes and not problem) or problem
            if writes and not problem:
                storage.read_meta(temporary)
                if target.exists():
                    storage.remove(target)
                os.replace(temporary, target)
                sync_folder(target.parent)
        except (OSError, ConfigError) as error:
            problem = str((isinstance(error, OSError) and error.strerror) or error)
        finally:  # also if the source is lost
            shutil.rmtree(temporary, ignore_errors=True)
        return problem

    def _make_room(self, temporary: Path) -> str:
        """Create the directory `temporary`; returns a sentence on a problem, or "".

        If the disk has too little room, all checkpoints except the newest one and the best one are deleted.
        """
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "tokenizer").mkdir(parents=True)
            if shutil.disk_usage(self._folder).free < self.size:
                # Not `prune`: this host may be writing a checkpoint of its own at the moment.
                best = storage.best(self._folder)
                for old in storage.checkpoints(self._folder)[1:]:
                    if old != best:
                        storage.remove(old)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            return f"{self._folder} cannot be written: {error.strerror}"
        if free < self.size:
            shutil.rmtree(temporary, ignore_errors=True)
            return f"{self._folder} has {free / 1e9:.3f} GB free, and {self.size / 1e9:.3f} GB are needed"
        return ""

    def _receive_file(self, path: Path, size: int, writes: bool) -> str:
        """Receive a file of `size` bytes, and write it to `path` if `writes`; returns a problem, or ""."""
        problem, left = "", size
        try:
            with open(path, "wb") if writes else nullcontext() as file:
                while left > 0:
                    chunk = self._receive_chunk(left)
                    left -= len(chunk)
                    if file:
                        file.write(chunk.numpy().data)
                if file:
                    sync_file(file)
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}"
        while left > 0:
            left -= len(self._receive_chunk(left))
        return problem

    def _receive_chunk(self, left: int) -> Tensor:
        """Receive the next bytes of a file of which `left` bytes are still to come."""
        chunk = torch.empty(min(CHUNK_BYTES, left), dtype=torch.uint8)
        self._link.broadcast(chunk)
        self.sent += len(chunk)
        return chunk

    # -- messages --------------------------------------------------------------------------------------

    def _exchange_header(self, header: dict[str, Any] | None) -> dict[str, Any]:
        """Broadcast the header of the source, and return it; the receivers pass None."""
        text = b"" if header is None else json.dumps(header).encode()
        size = torch.tensor([len(text)])
        self._link.broadcast(size)
        data = torch.tensor(list(text), dtype=torch.uint8)
        data = data if header is not None else torch.empty(int(size), dtype=torch.uint8)
        self._link.broadcast(data)
        return dict(json.loads(data.numpy().tobytes()))

    def _some_lack_it(self, lacks: bool) -> bool:
        return any(int(row) for row in self._link.gather(torch.tensor([int(lacks)])))

    def _gather_problems(self, problem: str) -> None:
        text = problem.encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES, b"\0")
        rows = self._link.gather(torch.tensor(list(text), dtype=torch.uint8))
        found = [row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
        self.problems = {
            peer.host: sentence for peer, sentence in zip(self._link.peers, found, strict=True) if sentence
        }

    def _receivers(self) -> list[Any]:
        return [peer for peer in self._link.peers if peer.rank != self._link.source]


def _names_in(path: Path) -> list[str]:
    """The files of the checkpoint `path`. Other files in its directory, such as hidden ones, are not sent."""
    return sorted(["meta.json", *json.loads((path / "meta.json").read_bytes())["sha256"]])


def _read_into(file: IO[bytes], chunk: Tensor) -> None:
    view, done = chunk.numpy().data, 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            return  # the file has become shorter: the receivers find it damaged
        done += count


def _has(target: Path, files: list[tuple[str, int]], meta_sha256: str) -> bool:
    """Whether the directory `target` has the checkpoint already: the same meta.json, and files of equal size.

    files: (name, bytes) of each file. meta_sha256: the sha256 of meta.json.
    """
    try:
        same = hashlib.sha256((target / "meta.json").read_bytes()).hexdigest() == meta_sha256
        return same and all((target / name).stat().st_size == size for name, size in files)
    except OSError:
        return False


def _bits_per_byte(path: Path) -> float:
    return float(json.loads((path / "meta.json").read_bytes())["val_bpb"])


def _prune(folder: Path, kept: set[str], best: float | None) -> None:
    """Delete the checkpoints in `folder` whose names are not in `kept`.

    best: the lowest validation bits per byte on the source; None if the source has no value. The checkpoint
    with the lowest value in `folder` stays if this value is below `best`, or if `best` is None.
    """
    own = storage.best(folder)
    spared = own is not None and (best is None or _bits_per_byte(own) < best)
    for old in storage.checkpoints(folder):
        if old.name not in kept and not (spared and old == own):
            storage.remove(old)
