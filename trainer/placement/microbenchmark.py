"""How fast this rank is at the run's own work, and the link to the others: measured before step 0.

    speed = measure_speed(model, optimizer, batch_size=2)   # all ranks at once, as in a step
    link = measure_link(group, device)

By the clock on the wall and for long enough: a host that is limited to a share of its processor, or used by
somebody else, is as slow as it will be in the run. Weights and optimizer state are spoilt: load them after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainer.distributed.process_group import Group
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.buckets import add_rows_alone

LEAST_SECONDS = 0.6  # that each figure is taken over: several periods of a kernel that hands out shares
WARM_TIMES = 2  # that it is the mean of, at least; the first time, memory is new and takes half as long again
PATIENCE_SECONDS = 100.0  # for one figure; of work that would not be warm by then, the first time counts
LINK_BYTES = (4 * 2**20, 32 * 2**20)  # a payload, and a larger one where the link is fast
LINK_SECONDS = 0.15
WORDS = 8  # messages as short as they come


@dataclass(frozen=True)
class Speed:
    """A rank's seconds: for a row forward and backward, for Muon on all matrices, for AdamW on the rest."""

    row: float
    muon: float
    adamw: float

    def solo(self, rows: int) -> float:
        """A step of so many rows on this rank alone."""
        return rows * self.row + self.muon + self.adamw

    def saved(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Link:
    """Between the ranks: bytes a second that each sends in a long all-reduce, seconds of a short one."""

    goodput: float
    latency: float

    def saved(self) -> dict[str, float]:
        return {"goodput": round(self.goodput), "latency": round(self.latency, 6)}


def measure_speed(model: GPT, optimizer: MuonAdamW, batch_size: int) -> Speed:
    """Passes of `batch_size` rows over drawn tokens, then the optimizer's work, in this rank's own way."""
    model.init_weights()
    draw = torch.Generator().manual_seed(1)
    shape = (batch_size, model.config.sequence_len + 1)
    tokens = torch.randint(model.config.vocab_size, shape, generator=draw).to(model.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_rows_alone(model)

    def passes() -> None:
        loss = model(tokens[:, :-1], tokens[:, 1:], loss_reduction="sum")
        loss.backward()
        loss.item()  # a GPU is done by then

    def adamw() -> None:
        optimizer.step_adamw()
        _settle(model.device)

    optimizer.set_schedule(1.0, 0.95, 1.0)
    speed = Speed(
        row=_seconds_of(passes) / batch_size, muon=_muon_seconds(optimizer, model), adamw=_seconds_of(adamw)
    )
    optimizer.load_state_dict({})
    for parameter in model.parameters():
        parameter.grad = None
    return speed


def _muon_seconds(optimizer: MuonAdamW, model: GPT) -> float:
    """One matrix of each shape is stepped, and counted as often as there are such."""
    matrices = {matrix.parameter.shape: matrix for matrix in optimizer.muon_parameters()}
    total = 0.0
    for shape, matrix in matrices.items():
        count = sum(other.parameter.shape == shape for other in optimizer.muon_parameters())

        def step(parameter: torch.nn.Parameter = matrix.parameter) -> None:
            optimizer.muon_update(parameter)
            _settle(model.device)

        total += count * _seconds_of(step, LEAST_SECONDS / len(matrices))
    return total


def _seconds_of(work: Callable[[], Any], least: float = LEAST_SECONDS) -> float:
    """The mean seconds of some work once it is warm, over `least` seconds; of very long work the first."""
    times: list[float] = []
    began = time.monotonic()
    while sum(times[1:]) < least or len(times) <= WARM_TIMES:
        started = time.monotonic()
        if times and started - began + times[0] > PATIENCE_SECONDS:
            break
        work()
        times.append(time.monotonic() - started)
    return statistics.mean(times[1:] or times)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_link(group: Group, device: torch.device) -> Link | None:
    """A short all-reduce, and one long enough to show the link's speed; None with one rank.

    Every rank comes to figures of its own, and the same number of collectives.
    """
    if group.world_size == 1:
        return None
    n = group.world_size
    word = torch.zeros(1, device=device)
    group.sum([word])  # all have arrived
    began = time.monotonic()
    for _ in range(WORDS):
        group.sum([word])
    latency = (time.monotonic() - began) / WORDS
    for size in LINK_BYTES:
        payload = torch.zeros(size // 4, device=device)
        began = time.monotonic()
        group.sum([payload])
        _settle(device)
        seconds = torch.tensor([time.monotonic() - began], dtype=torch.float64)
        group.sum([seconds])  # so that all go on, or none
        mean = seconds.item() / n
        if mean > LINK_SECONDS:
            break
    return Link(2 * (n - 1) / n * size / mean, latency)
