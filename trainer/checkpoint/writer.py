"""Background writes of checkpoints: the state is copied at once, a thread writes the files.

writer = CheckpointWriter(run_dir / "checkpoints", data_dir / "tokenizer", keep=2, log=print)
writer.save(state)              # returns after the copy; writer.saved is the newest complete checkpoint
writer.save(state, last=True)   # without a copy: the state must not change until it is written
writer.save_later(step, size, make)    # `make` runs in the thread and returns the state, which is not copied
writer.wait()                   # until the checkpoint is written, at most as long as a slow disk takes

A full disk does not end a run: older checkpoints are deleted. If that is not enough, a warning is logged, the
run continues, and the write is retried later. The last checkpoint waits for room for some minutes.

Each checkpoint has its own thread, so that any thread that ends the process can wait for the write.
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
from trainer.distributed.process_group import Collectives
from trainer.optim.muon_adamw import ParameterState

RETRY_SECONDS = 60.0  # until a checkpoint without room is retried
CHECK_SECONDS = 5.0  # between checks for room, by the last checkpoint
LAST_SECONDS = 300.0  # for which the last checkpoint waits for room
REMIND_SECONDS = 600.0
COLLECTIVE_WAIT_SECONDS = 2.0  # between collective checks whether the last checkpoint is written
SLACK_BYTES = 2**18  # of files besides the tensors
SLOWEST_BYTES_A_SECOND = 10 * 2**20  # a slower disk counts as hanging
SETTLE_SECONDS = 60.0  # added for a write of any size


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, in a thread.

    folder: the folder of the checkpoints. tokenizer_dir: the folder of tokenizer.json, which is copied to
    each checkpoint. keep: number of newest checkpoints to keep. log: called with each message. Attributes:
    saved: path of the newest complete checkpoint; None before the first.
    problem: a sentence after a failed write; else None.
    shortage: a sentence while the disk has no room; else None.
    copies_last: whether `save` copies the state of the last checkpoint too, so that the caller may change it.
    """

    def __init__(self, folder: Path, tokenizer_dir: Path, keep: int, log: Callable[[str], None]) -> None:
        self.saved: Path | None = None
        self.problem: str | None = None
        self.shortage: str | None = None
        self.copies_last = False
        self._short_at = self._reminded_at = 0.0
        self.folder, self._tokenizer_dir, self._keep, self._log = folder, tokenizer_dir, keep, log
        self._copies: dict[str, Tensor] = {}  # reused, so that a save allocates no memory
        self._writer: threading.Thread | None = None
        self._step = 0  # of the checkpoint being written
        self._needed = 0  # bytes for it on the disk, at most
        self._allowed = 0.0  # seconds for it
        self._due_at = 0.0  # the deadline

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written and its write has not failed or timed out."""
        return self._writer is not None and self._writer.is_alive() and self.problem is None

    @property
    def wants_retry(self) -> bool:
        """Whether to save again: the disk had no room for the previous save, RETRY_SECONDS ago or more."""
        return self.shortage is not None and time.monotonic() - self._short_at >= RETRY_SECONDS

    def save(self, state: State, last: bool = False) -> None:
        """Start to write `state` in a thread, after the previous write. Returns once `state` is copied.

        last: whether this is the last checkpoint of the run. Its state is not copied unless `copies_last` is
        True, and the caller must not change it. If the disk is too full, the thread retries for LAST_SECONDS.
        If the previous write does not end in time, nothing is written (see `wait`).
        """
        if not self.wait():
            return
        began = time.monotonic()
        copies = self.copies_last or not last
        written = self._copy(state) if copies else state
        pause = None if last else time.monotonic() - began
        self._start(state.step, nbytes(state), lambda: written, pause, LAST_SECONDS if last else 0.0)

    def save_later(self, step: int, size: int, make: Callable[[], State]) -> None:
        """Start to write the state that `make` returns, after the previous write; `make` runs in the thread.

        step: the step of the state. size: bytes of its tensors, which must not change until they are written.
        If the previous write does not end in time, nothing is written (see `wait`).
        """
        if self.wait():
            self._start(step, size, make, 0.0, 0.0)

    def _start(
        self, step: int, size: int, make: Callable[[], State], pause: float | None, patience: float
    ) -> None:
        self._step, self._needed = step, int(1.01 * size) + SLACK_BYTES
        self._allowed = patience + SETTLE_SECONDS + size / SLOWEST_BYTES_A_SECOND
        self._due_at = time.monotonic() + self._allowed
        arguments = (make, pause, patience)
        self._writer = threading.Thread(target=self._write, args=arguments, name="saver", daemon=True)
        self._writer.start()

    def room(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A CPU buffer for an optimizer state. If the caller fills it and saves it, `save` does not copy it.

        path: "PARAMETER/STATE", the name of this state. shape, dtype: shape and dtype of the tensor. Waits
        for the current write, which may still read the buffer. If this write does not end in time (see
        `wait`), returns a new tensor.
        """
        return self._room(path, shape, dtype) if self.wait() else torch.empty(shape, dtype=dtype)

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait at most `seconds` for the current write; returns whether no write is running.

        If the write takes longer than a disk with SLOWEST_BYTES_A_SECOND needs, sets `problem` and returns
        False.
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
                f"{self._allowed:.0f} s: its disk hangs, or writes less than "
                f"{SLOWEST_BYTES_A_SECOND / 2**20:.0f} MB/s. Check that disk (df, dmesg) and train again."
            )
        return False

    def wait_on_all_ranks(self, group: Collectives) -> None:
        """Wait on all ranks until rank 0 has written its checkpoint. A collective call.

        Raises Final on all ranks if the checkpoint cannot be written.
        """
        writing = True
        while writing:  # one long collective would time out
            self.wait(COLLECTIVE_WAIT_SECONDS)
            writing = bool(group.gather_int64(torch.tensor([int(self.busy)]))[0])
        # Another rank may have a problem of its own, from a checkpoint that it wrote as coordinator.
        group.raise_problems(self.problem if group.rank == 0 else None)

    def _write(self, make: Callable[[], State], pause: float | None, patience: float) -> None:
        began = time.monotonic()
        try:
            while not (self._fits() and self._save(make, pause)):
                if time.monotonic() - began >= patience:
                    self.problem = self.shortage if patience else None
                    return
                time.sleep(CHECK_SECONDS)
        except Exception as error:  # in a thread: all ranks must receive any error
            reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.problem = (
                f"The checkpoint of step {self._step} cannot be written to {self.folder}: {reason}. "
                "Check that disk (df, dmesg) and train again."
            )

    def _save(self, make: Callable[[], State], pause: float | None) -> bool:
        """Write the checkpoint; returns False if the disk or a quota is full, although `_fits` was True."""
        began = time.monotonic()
        try:
            self.saved = storage.save(self.folder, make(), self._tokenizer_dir, self._keep)
        except OSError as error:
            if not is_full(error):
                raise
            storage.prune(self.folder, keep=1)
            self._report_shortage()
            return False
        self.shortage = None
        beside = "" if pause is None else f" in the background, after a pause of {pause:.2f} s"
        self._log(f"Saved {self.folder.name}/{self.saved.name} in {time.monotonic() - began:.1f} s{beside}.")
        return True

    def _fits(self) -> bool:
        """Whether there is room for the checkpoint; deletes older ones if there is not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.folder).free < self._needed:
            storage.prune(self.folder, keep=1)
        if shutil.disk_usage(self.folder).free >= self._needed:
            return True
        self._report_shortage()
        return False

    def _report_shortage(self) -> None:
        """Set `shortage`, and log it at first and then every REMIND_SECONDS."""
        now = self._short_at = time.monotonic()
        there = storage.checkpoints(self.folder)
        newest = f"The newest checkpoint is still {there[0].name}." if there else "There is no earlier one."
        first = self.shortage is None
        self.shortage = (
            f"The checkpoint of step {self._step} was not saved: it takes {self._needed / 1e9:.3f} GB, and "
            f"{self.folder} has {shutil.disk_usage(self.folder).free / 1e9:.3f} GB free. {newest} "
            "Delete files on that disk."
        )
        if first or now - self._reminded_at >= REMIND_SECONDS:
            self._reminded_at = now
            self._log(
                f"warning: {self.shortage} It is tried again every {RETRY_SECONDS:.0f} s (the last "
                f"checkpoint of a run: every {CHECK_SECONDS:.0f} s, for {LAST_SECONDS:.0f} s)."
            )

    def _copy(self, state: State) -> State:
        model = self._copies_of("model", state.model)
        optim = {name: self._copies_of(name, tensors) for name, tensors in state.optim.items()}
        return State(state.meta, model, optim)

    def _copies_of(self, group: str, tensors: Mapping[str, Tensor]) -> ParameterState:
        copies = {}
        for name, tensor in tensors.items():
            copies[name] = self._room(f"{group}/{name}", tensor.shape, tensor.dtype)
            if copies[name] is not tensor:  # the caller has not filled the buffer from `room`
                copies[name].copy_(tensor.detach())
        return copies

    def _room(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The buffer for a copy of the tensor `path`. It is reused as long as the shape stays the same."""
        if path not in self._copies or self._copies[path].shape != shape:
            self._copies[path] = torch.empty(shape, dtype=dtype)
        return self._copies[path]


def nbytes(state: State) -> int:
    """The bytes of the tensors of `state`."""
    tensors = [*state.model.values(), *(t for kept in state.optim.values() for t in kept.values())]
    return sum(tensor.nbytes for tensor in tensors)
