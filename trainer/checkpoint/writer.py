"""Checkpoints beside the training: a copy of the state is taken at once, its files are written meanwhile.

saver = Saver(run_dir / "checkpoints", data_dir / "tokenizer", keep=2, say=print)
saver.save(state)              # returns when the copy is taken; saver.saved names what is whole on the disk
saver.save(state, last=True)   # the loop is over: no copy, the state must stay as it is until it is written
saver.wait()                   # until it is written, as long as a slow disk takes

A disk without room for one ends no training: older checkpoints make room, else it goes on, says so, and tries
again. The last one waits for room for some minutes, since nothing comes after it.

Every checkpoint is written by a thread of its own, so that whoever ends the process can wait for it.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint import storage
from trainer.checkpoint.storage import State
from trainer.data.files import is_full
from trainer.optim.muon_adamw import ParameterState

AGAIN_SECONDS = 60.0  # after which a checkpoint that found no room is tried again
LOOK_SECONDS = 5.0  # between looks for room, by the last one
LAST_SECONDS = 300.0  # that the last one waits for room
REMIND_SECONDS = 600.0
SLACK_BYTES = 2**18  # of a checkpoint's files beside its tensors
SLOWEST_BYTES_A_SECOND = 10 * 2**20  # of a disk: what is slower is taken for one that stands still
SETTLE_SECONDS = 60.0  # for a write of any size, beside that


class CheckpointWriter:
    """Writes one checkpoint at a time. `problem` is a sentence once one could not be written.

    `shortage` is one while the disk has no room.
    """

    def __init__(self, folder: Path, tokenizer_dir: Path, keep: int, log: Callable[[str], None]) -> None:
        self.saved: Path | None = None
        self.problem: str | None = None
        self.shortage: str | None = None
        self._short_at = self._reminded_at = 0.0
        self.folder, self._tokenizer_dir, self._keep, self._log = folder, tokenizer_dir, keep, log
        self._copies: dict[str, Tensor] = {}  # reused, so that a save finds its memory mapped already
        self._writer: threading.Thread | None = None
        self._step = 0  # of what is being written
        self._allowed = 0.0  # seconds for it
        self._due_at = 0.0  # when they are over

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, in time."""
        return self._writer is not None and self._writer.is_alive() and self.problem is None

    @property
    def wants_retry(self) -> bool:
        """Whether it is time to look for room again."""
        return self.shortage is not None and time.monotonic() - self._short_at >= AGAIN_SECONDS

    def save(self, state: State, last: bool = False) -> None:
        """Begin to save `state`, after the one before. With `last` nothing changes it until it is written."""
        if not self.wait():
            return
        began = time.monotonic()
        written = state if last else self._copy(state)
        held = time.monotonic() - began
        patience = LAST_SECONDS if last else 0.0
        self._step = state.step
        self._allowed = patience + SETTLE_SECONDS + _size(state) / SLOWEST_BYTES_A_SECOND
        self._due_at = time.monotonic() + self._allowed
        arguments = (written, None if last else held, patience)
        self._writer = threading.Thread(target=self._write, args=arguments, name="saver", daemon=True)
        self._writer.start()

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until what was saved is on the disk, at most `seconds`; returns whether nothing is under way.

        A write that takes longer than a slow disk would is a problem, and is not waited for any more.
        """
        if self._writer is None:
            return True
        left = max(0.0, self._due_at - time.monotonic())
        self._writer.join(min(seconds, left))
        if not self._writer.is_alive():
            return True
        if left <= seconds:
            self.problem = (
                f"The checkpoint of step {self._step} is not written to {self.folder} after "
                f"{self._allowed:.0f} s: its disk stands still, or writes less than "
                f"{SLOWEST_BYTES_A_SECOND / 2**20:.0f} MB/s. Look at that disk (df, dmesg) and train again."
            )
        return False

    def _write(self, state: State, held: float | None, patience: float) -> None:
        began = time.monotonic()
        try:
            while not self._fits(state):
                if time.monotonic() - began >= patience:
                    self.problem = self.shortage if patience else None
                    return
                time.sleep(LOOK_SECONDS)
            began = time.monotonic()
            self.saved = storage.save(self.folder, state, self._tokenizer_dir, self._keep)
        except Exception as error:  # in a thread: whatever it is, all ranks must be told
            if is_full(error) and not patience:  # someone else has filled it meanwhile
                self._fall_short(state)
                return
            reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.problem = (
                f"The checkpoint of step {state.step} cannot be written to {self.folder}: {reason}."
            )
            return
        self.shortage = None
        beside = "" if held is None else f" beside the training, which waited {held:.2f} s"
        self._log(f"Saved {self.folder.name}/{self.saved.name} in {time.monotonic() - began:.1f} s{beside}.")

    def _fits(self, state: State) -> bool:
        """Whether there is room for `state`, which older checkpoints make if they must."""
        needed = _size(state)
        self.folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.folder).free < needed:
            storage.drop_older(self.folder)
        if shutil.disk_usage(self.folder).free >= needed:
            return True
        self._fall_short(state)
        return False

    def _fall_short(self, state: State) -> None:
        """Say that there is no room, now and then."""
        now = self._short_at = time.monotonic()
        there = storage.checkpoints(self.folder)
        newest = f"the newest stays {there[0].name}" if there else "there is none before it"
        first = self.shortage is None
        self.shortage = (
            f"No room for the checkpoint of step {state.step}: it takes {_size(state) / 1e9:.3f} GB, "
            f"{self.folder} has {shutil.disk_usage(self.folder).free / 1e9:.3f} GB free; {newest}. "
            "Make room there."
        )
        if first or now - self._reminded_at >= REMIND_SECONDS:
            self._reminded_at = now
            self._log(f"warning: {self.shortage} It is tried again each minute.")

    def _copy(self, state: State) -> State:
        model = self._copies_of("model", state.model)
        optim = {name: self._copies_of(name, tensors) for name, tensors in state.optim.items()}
        return State(state.meta, model, optim)

    def _copies_of(self, room: str, tensors: Mapping[str, Tensor]) -> ParameterState:
        copies = {}
        for name, tensor in tensors.items():
            place = f"{room}/{name}"
            if place not in self._copies or self._copies[place].shape != tensor.shape:
                self._copies[place] = torch.empty_like(tensor, device="cpu")
            copies[name] = self._copies[place].copy_(tensor.detach())
        return copies


def _size(state: State) -> int:
    """Bytes that a checkpoint of `state` takes on the disk, or a little more."""
    tensors = [*state.model.values(), *(t for kept in state.optim.values() for t in kept.values())]
    return int(1.01 * sum(tensor.nbytes for tensor in tensors)) + SLACK_BYTES
