"""Measures before step 0 how fast this rank computes the parts of a step, and its link to the other ranks.

    speed = measure_speed(model, optimizer, batch_size=2)   # all ranks at once, as in a step
    link = measure_link(group, device)

Both measure wall-clock time. measure_speed measures for long enough that a CPU quota or another user slows it
as it will slow the run; measure_link takes a fraction of a second. measure_speed overwrites weights and
optimizer state: load them afterwards.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.distributed.process_group import Collectives
from trainer.host.cores import cpu_quota
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW

LEAST_SECONDS = 0.6  # of each measurement: several periods of the kernel's CPU quota. Muon's shapes share it
WARM_TIMES = 2  # the least repetitions in the mean; the first one also allocates memory and is excluded
PATIENCE_SECONDS = 100.0  # limit of one measurement; the first repetition counts if no second one fits
LONG_SECONDS = 15.0  # of a micro-batch, above which its rows are timed one by one
LINK_BYTES = (4 * 2**20, 32 * 2**20)  # a payload, and a larger one for a fast link
LINK_SECONDS = 0.15
SHORT_MESSAGES = 8


@dataclass(frozen=True)
class Speed:
    """Measured seconds of a rank at the parts of a step.

    row: forward and backward of one row. muon: Muon's update of all Muon matrices of the model, although a
    rank may own only some of them. adamw: AdamW's update of all AdamW parameters of the model.
    """

    row: float
    muon: float
    adamw: float

    def step_alone(self, rows: int) -> float:
        """Predicted seconds of a step of `rows` rows on this rank alone."""
        return rows * self.row + self.muon + self.adamw


@dataclass(frozen=True)
class Link:
    """The network between the ranks, as measured by all-reduces.

    bandwidth: bytes per second that a rank sends in a long all-reduce. latency: seconds of a short
    all-reduce. delay: seconds by which computation on the rank takes longer for each byte that it sends at
    the same time, because the same processors move the bytes.
    """

    bandwidth: float
    latency: float
    delay: float = 0.0


def slowest_link(links: Sequence[Link]) -> Link:
    """One link for all ranks, with the lowest bandwidth and the highest latency and delay of `links`.

    links: the link that each rank has measured.
    """
    return Link(
        min(each.bandwidth for each in links),
        max(each.latency for each in links),
        max(each.delay for each in links),
    )


def measure_speed(model: GPT, optimizer: MuonAdamW, batch_size: int) -> Speed:
    """Measure the seconds of forward and backward, and of the optimizer, on this rank.

    Times a micro-batch of random tokens; if this takes longer than LONG_SECONDS, one row of it. batch_size:
    rows of a micro-batch. Weights of `model` and state of `optimizer` are overwritten.
    """
    model.init_weights()
    draw = torch.Generator().manual_seed(1)
    shape = (batch_size, model.config.sequence_len + 1)
    tokens = torch.randint(model.config.vocab_size, shape, generator=draw).to(model.device)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = [module.weight for module in embeddings]
    for module in embeddings:
        module.sparse = True  # of embeddings, backward adds the active rows only
    for parameter in model.parameters():
        parameter.grad = None if any(parameter is table for table in tables) else torch.zeros_like(parameter)

    def passes() -> None:
        for table in tables:
            table.grad = None
        loss = model(tokens[:, :-1], tokens[:, 1:], loss_reduction="sum")
        loss.backward()
        loss.item()  # waits for a GPU

    def adamw() -> None:
        for table in tables:
            table.grad = None
        optimizer.step_adamw()
        _synchronize(model.device)

    optimizer.set_schedule(1.0, 0.95, 1.0)
    began = time.monotonic()
    passes()
    first = time.monotonic() - began
    if first > LONG_SECONDS:  # so that more than one repetition fits
        tokens = tokens[:1]
    row = _seconds_of(passes, spent=first, expected=first * len(tokens) / batch_size) / len(tokens)
    # Without the tables, whose gradients and moments a rank of exact never has as a whole.
    whole = sum(p.numel() for p in tables) / model.lm_head.weight.numel() + 1
    speed = Speed(row=row, muon=_muon_seconds(optimizer, model), adamw=whole * _seconds_of(adamw))
    optimizer.load_state_dict({})
    for parameter in model.parameters():
        parameter.grad = None
    return speed


def _muon_seconds(optimizer: MuonAdamW, model: GPT) -> float:
    """Seconds of Muon on all matrices: for each shape, the time of one matrix times their number."""
    parameters = [matrix.parameter for matrix in optimizer.muon_parameters()]
    counts = Counter(parameter.shape for parameter in parameters)
    total = 0.0
    for parameter in {each.shape: each for each in parameters}.values():

        def step(parameter: torch.nn.Parameter = parameter) -> None:
            optimizer.muon_update(parameter)
            _synchronize(model.device)

        total += counts[parameter.shape] * _seconds_of(step, LEAST_SECONDS / len(counts))
    return total


def _seconds_of(
    work: Callable[[], Any], least: float = LEAST_SECONDS, spent: float = 0.0, expected: float = 0.0
) -> float:
    """The mean seconds of a call of `work`, over calls that together take at least `least` seconds.

    At least WARM_TIMES calls are in the mean; the first call is excluded. No call starts that would exceed
    PATIENCE_SECONDS in all; if there is only the first call, the result is its time. spent: seconds of a
    first call that the caller has made already; 0: none. expected: seconds that a further call is expected to
    take; used only with `spent`, as the time of the first call.
    """
    times = [expected] if spent else []
    began = time.monotonic() - spent
    while sum(times[1:]) < least or len(times) <= WARM_TIMES:
        started = time.monotonic()
        if times and started - began + times[0] > PATIENCE_SECONDS:
            break
        work()
        times.append(time.monotonic() - started)
    return statistics.mean(times[1:] or times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_link(group: Collectives, device: torch.device) -> Link | None:
    """Measure the network of the ranks with all-reduces; returns a Link, or None with one rank.

    All ranks of `group` must call it. device: where the tensors that are sent are allocated. `latency` of the
    result is the mean of short all-reduces on this rank, `bandwidth` follows from a long one, whose seconds
    are averaged over the ranks. `delay` stays 0 (see `measure_delay`).
    """
    if group.world_size == 1:
        return None
    n = group.world_size
    short = torch.zeros(1, device=device)
    group.all_reduce([short])  # all ranks start together
    began = time.monotonic()
    for _ in range(SHORT_MESSAGES):
        group.all_reduce([short])
    latency = (time.monotonic() - began) / SHORT_MESSAGES
    for size in LINK_BYTES:
        payload = torch.zeros(size // 4, device=device)
        began = time.monotonic()
        group.all_reduce([payload])
        _synchronize(device)
        seconds = torch.tensor([time.monotonic() - began], dtype=torch.float64)
        group.all_reduce([seconds])  # so that all ranks continue, or none
        mean = seconds.item() / n
        if mean > LINK_SECONDS:
            break
    return Link(2 * (n - 1) / n * size / mean, latency)


def measure_delay(group: Collectives) -> float:
    """Measure the delay of a Link: CPU seconds per sent byte, divided by the number of cores that compute.

    All ranks of `group`, two at least, must call it. They send as in sync=exact.
    """
    parts = dict(enumerate(torch.zeros(LINK_BYTES[0] // 4).tensor_split(group.world_size)))
    sent_before, began = group.bytes_sent, time.process_time()
    group.wait([group.start_reduces(parts)])
    group.broadcast_owned(parts)
    cores = min(torch.get_num_threads(), cpu_quota() or math.inf)
    return (time.process_time() - began) / cores / (group.bytes_sent - sent_before)
