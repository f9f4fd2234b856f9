"""A rank with a fault planted: at a step, once it has its gradients, it burns, sleeps, fails or diverges.

Or it is slow: from that step on, each row takes so many seconds longer, and rows are shared out again sooner;
until the file exists that NANOFLEET_TEST_HURRY names.
Or its disk is (write): the checkpoint of that step takes so many seconds. Or the copy of each file of a
checkpoint to other hosts takes so many seconds (copy). Or it reads a token of that step that is not there
(misread). Or, in an elastic run, its copies of the state are sent so many seconds later (snapshot), all but
the first ones, so many as the step says. Or a bit of a parameter that all ranks step changes in its memory
(flip). Or, in an elastic run, it dies as it connects to the other members (vanish), or it freezes then
(halt), or it connects so many seconds later (late); step 1 stands for the first connection to them, 2 for the
second. Or, in an elastic run, it begins to receive the state of the run so many seconds later (receive). Or
it dies at that step as it evaluates, saves, or leaves the members of before a change (exit_evaluate,
exit_save, exit_change; with step 0 at any), or it evaluates or saves so many seconds later (late_evaluate,
late_save). Or, in an elastic run, it writes to a file how many parameters it has in memory as it connects to
the other members, a line each time (parameters).

python tests/trainer/faulty.py burn 5 8 train --data-dir ...       # at step 5, for 8 s
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

# The methods of the trainer in which a rank dies (exit_...) or waits (late_...).
METHODS = {"evaluate": "_evaluate", "save": "_save", "change": "_change_members"}


def plant(fault: str, step: int, seconds: float) -> None:
    """Put the fault after the gradients of `step`, counted from 1."""
    import torch

    from trainer.placement import batch_split
    from trainer.train import Trainer

    if fault == "write":
        plant_slow_disk(step, seconds)
        return
    if fault == "misread":
        plant_misread(step)
        return
    if fault == "copy":
        plant_slow_copy(seconds)
        return
    if fault == "snapshot":
        plant_late_copy(step, seconds)
        return
    if fault == "vanish":
        from trainer.elastic.setup import ElasticSetup

        ElasticSetup._connect_view = lambda *arguments: os._exit(9)  # type: ignore[method-assign]
        return
    if fault in ("halt", "late"):
        plant_connection(step, seconds)
        return
    if fault == "receive":
        plant_late_receiver(seconds)
        return
    if fault == "parameters":
        plant_count_of_parameters()
        return
    kind, _, method = fault.partition("_")
    if method in METHODS:
        plant_in_method(kind, METHODS[method], step, seconds)
        return
    if fault == "slow":
        batch_split.WINDOW_STEPS, batch_split.REST_STEPS = 3, 6
    sound, hurry = Trainer.forward_backward, os.environ.get("NANOFLEET_TEST_HURRY", "")

    def accumulate(self: Any, *arguments: Any) -> float:
        loss = sound(self, *arguments)
        if fault == "slow":
            is_slow = self.reporter.train_state.step + 1 >= step and not os.path.exists(hurry)
            time.sleep(seconds * len(arguments[0].idx) if is_slow else 0)
            return loss
        if self.reporter.train_state.step + 1 != step:
            return loss
        if fault == "flip":
            bits = self.model.resid_lambdas.data.view(-1).view(torch.int32)
            bits[:1].bitwise_xor_(1 << 12)  # not the last bit, which a later rounding may lose
            return loss
        if fault == "fail":
            raise KeyError("a fault of the trainer's own")
        if fault == "diverge":
            return float("nan")
        self.run_status.enter("backward")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if fault == "sleep":
                time.sleep(0.1)
        return loss

    Trainer.forward_backward = accumulate  # type: ignore[method-assign]


def plant_connection(number: int, seconds: float) -> None:
    """Let this rank connect later, or with 0 seconds freeze while it connects. number: of the connection."""
    from trainer.distributed.process_group import Collectives
    from trainer.elastic.setup import ElasticSetup

    owner, name = {1: (ElasticSetup, "_connect_view"), 2: (Collectives, "open_channel")}[number]
    sound = getattr(owner, name)

    def call(self: Any, *arguments: Any) -> Any:
        if not seconds:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        time.sleep(seconds)
        return sound(self, *arguments)

    setattr(owner, name, call)


def plant_late_receiver(seconds: float) -> None:
    """Let this rank receive the state of the run later than the others expect, as over a slow link."""
    from trainer.elastic.setup import ElasticSetup

    sound = ElasticSetup._resume

    def call(self: Any, state: Any) -> None:
        time.sleep(seconds)
        sound(self, state)

    ElasticSetup._resume = call  # type: ignore[method-assign]


def plant_count_of_parameters() -> None:
    """Let this rank write how many parameters it has in memory as it connects to the other members."""
    from torch import nn

    from trainer.elastic.setup import ElasticSetup

    sound = ElasticSetup._connect_view

    def call(self: Any, view: Any) -> None:
        parameters = sum(isinstance(each, nn.Parameter) for each in gc.get_objects())
        with open(self.checkpoints.parent / "parameters", "a", encoding="ascii") as file:
            file.write(f"{parameters}\n")
        sound(self, view)

    ElasticSetup._connect_view = call  # type: ignore[method-assign]


def plant_in_method(kind: str, method: str, step: int, seconds: float) -> None:
    """Let this rank die (exit) or wait (late) in a method of the trainer after `step`; with 0 in any call."""
    from trainer.elastic.train import ElasticTrainer

    sound = getattr(ElasticTrainer, method)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if step in (0, self.reporter.train_state.step):
            if kind == "exit":
                os._exit(9)
            time.sleep(seconds)
        return sound(self, *arguments, **named)

    setattr(ElasticTrainer, method, call)


def plant_misread(step: int) -> None:
    """Change a token of the batch of `step` in memory, to one that the batch does not have."""
    import numpy as np

    import trainer.data.loader
    import trainer.train

    sound, reads = trainer.train.read_batch, trainer.data.loader.Split.__getitem__

    def read(self: Any, numbers: Any) -> Any:
        rows = reads(self, numbers)
        rows[0, 1] = np.setdiff1d(np.arange(300), rows)[0]
        return rows

    def read_batch(data: Any, seed: int, at: int, rows_per_step: int) -> Any:
        trainer.data.loader.Split.__getitem__ = read if at + 1 == step else reads
        return sound(data, seed, at, rows_per_step)

    trainer.train.read_batch = read_batch


def plant_slow_disk(step: int, seconds: float) -> None:
    """Let the checkpoint of `step`, or with 0 each one, take longer, with one of its files written."""
    from trainer.checkpoint import storage

    sound = storage._write_tensors

    def write(path: Path, tensors: Any) -> None:
        sound(path, tensors)
        if step in (0, int(path.parent.name[6:12])) and path.name == "model.safetensors":
            time.sleep(seconds)

    storage._write_tensors = write


def plant_late_copy(soon: int, seconds: float) -> None:
    """Send copies of the state but the first `soon` so many seconds later; the other ranks wait for them."""
    from trainer.elastic.snapshot import Snapshots

    sound, sent = Snapshots._send, []

    def send(self: Any, *arguments: Any) -> None:
        sent.append(self)
        time.sleep(seconds if len(sent) > soon else 0)
        sound(self, *arguments)

    Snapshots._send = send  # type: ignore[method-assign]


def plant_slow_copy(seconds: float) -> None:
    """Let each file of a checkpoint take so many seconds to another host."""
    from trainer.checkpoint.transfer import CheckpointTransfer

    sound = CheckpointTransfer._send_file

    def send(self: Any, file: Any) -> str:
        time.sleep(seconds)
        return sound(self, file)

    CheckpointTransfer._send_file = send  # type: ignore[method-assign]


if __name__ == "__main__":
    from trainer.__main__ import main

    plant(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    code = main(sys.argv[4:])
    sys.stdout.flush()
    os._exit(code)
