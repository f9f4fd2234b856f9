"""Checkpoints beside the training: a copy of the state is taken at once, its files are written meanwhile.

saver = Saver(run_dir / "checkpoints", data_dir / "tokenizer", keep=2, say=print)
saver.save(state)              # returns when the copy is taken; saver.saved names what is whole on the disk
saver.save(state, last=True)   # the loop is over: no copy, returns when it is written
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer import checkpoint
from trainer.checkpoint import State
from trainer.optim import ParameterState


class Saver:
    """Writes one checkpoint at a time. `problem` is a sentence once one could not be written."""

    def __init__(self, folder: Path, tokenizer_dir: Path, keep: int, say: Callable[[str], None]) -> None:
        self.saved: Path | None = None
        self.problem: str | None = None
        self.folder, self._tokenizer_dir, self._keep, self._say = folder, tokenizer_dir, keep, say
        self._copies: dict[str, Tensor] = {}  # reused, so that a save finds its memory mapped already
        self._writer: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the checkpoint before is still being written."""
        return self._writer is not None and self._writer.is_alive()

    def save(self, state: State, last: bool = False) -> None:
        """Save `state`, after the one before has been written. With `last` nothing changes it any more."""
        self.wait()
        if last:
            self._write(state)
            return
        began = time.monotonic()
        copy = self._copy(state)
        held = time.monotonic() - began
        self._writer = threading.Thread(target=self._write, args=(copy, held), name="saver", daemon=True)
        self._writer.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until what was saved is on the disk."""
        if self._writer is not None:
            self._writer.join(seconds)

    def _write(self, state: State, held: float | None = None) -> None:
        began = time.monotonic()
        try:
            self.saved = checkpoint.save(self.folder, state, self._tokenizer_dir, self._keep)
        except Exception as error:  # in a thread: whatever it is, all ranks must be told
            reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.problem = (
                f"The checkpoint of step {state.step} cannot be written to {self.folder}: {reason}."
            )
            return
        beside = "" if held is None else f" beside the training, which waited {held:.2f} s"
        self._say(f"Saved {self.folder.name}/{self.saved.name} in {time.monotonic() - began:.1f} s{beside}.")

    def _copy(self, state: State) -> State:
        model = self._copies_of("model", state.model)
        optim = {name: self._copies_of(name, tensors) for name, tensors in state.optim.items()}
        return State(state.meta, model, optim)

    def _copies_of(self, room: str, tensors: Mapping[str, Tensor]) -> ParameterState:
        copies = {}
        for name, tensor in tensors.items():
            place = f"{room}/{name}"
            if place not in self._copies:
                self._copies[place] = torch.empty_like(tensor, device="cpu")
            copies[name] = self._copies[place].copy_(tensor.detach())
        return copies
