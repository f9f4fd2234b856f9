"""Choose the processors and threads of a rank by measurement: time the work of a layer on each candidate.

    choice = choose_threads(read_topology(), layer_work(model, torch.float32, rows=2))
    pin(choice.best.candidate.cpus)
    for line in choice.table():
        log.info(line)

All logical processors are rarely the fastest set: threads wait for the slowest one in each GEMM, be it an
efficiency core, an SMT sibling, or a core that another process keeps busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.host.pinning import core_rates, pinned
from trainer.host.topology import Candidate, Topology, cpu_list, first_siblings
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import orthogonalize

LEAST_SECONDS = 0.3  # of the measurement of a candidate
LEAST_TIMES = 2
HOPELESS = 2.0  # times the seconds of the best so far: the candidate is measured once
BUSY_BELOW = 0.75  # of the speed of the fastest core: the core is left out of one candidate
# A smaller set is chosen over a faster one within this factor: it leaves processors to other programs, and
# repeated measurements differ by more.
TIE = 1.02
MOST_TOKENS = 2048  # of a measured layer: it is repeated on every candidate


@dataclass(frozen=True)
class Measured:
    """A candidate and the seconds of the measured work on it."""

    candidate: Candidate
    seconds: float


@dataclass(frozen=True)
class ThreadChoice:
    """The candidates in the order of their measurement, and the one that was chosen."""

    measured: Sequence[Measured]
    best: Measured

    def table(self) -> list[str]:
        """One line per candidate: its name, processors and seconds; the chosen one is marked with ">"."""
        names = max(len(each.candidate.name) for each in self.measured)
        sets = max(len(cpu_list(each.candidate.cpus)) for each in self.measured)
        return [
            f"{'>' if each is self.best else ' '} {each.candidate.name:<{names}}  "
            f"CPUs {cpu_list(each.candidate.cpus):<{sets}}  {1000 * each.seconds:8.1f} ms"
            for each in self.measured
        ]

    def saved(self) -> dict[str, Any]:
        """The choice as JSON values: {"cpus": "0-7", "name": ..., "ms": {candidate name: milliseconds}}."""
        return {
            "cpus": cpu_list(self.best.candidate.cpus),
            "name": self.best.candidate.name,
            "ms": {each.candidate.name: round(1000 * each.seconds, 2) for each in self.measured},
        }


def candidates_of(topology: Topology) -> list[Candidate]:
    """The candidates of the topology; and, if load slows some physical cores, those that are not slowed."""
    found = topology.candidates()
    cores = [cpu.number for cpu in first_siblings(topology.cpus)]
    if len(cores) > 1:
        rates = core_rates(cores)
        free = frozenset(cpu for cpu, rate in rates.items() if rate >= BUSY_BELOW)
        if len(free) < len(cores) and free not in {each.cpus for each in found}:
            found.append(Candidate("fast cores at the moment", free))
    return sorted(found, key=lambda each: (len(each.cpus), sorted(each.cpus)))


def choose_threads(topology: Topology, work: Callable[[], object]) -> ThreadChoice:
    """Time `work` on each candidate, the smallest set first, and choose the fastest."""
    measured: list[Measured] = []
    for candidate in candidates_of(topology):
        best = min((each.seconds for each in measured), default=float("inf"))
        with pinned(candidate.cpus):
            measured.append(Measured(candidate, _seconds_of(work, HOPELESS * best)))
    fastest = min(each.seconds for each in measured)
    chosen = next(each for each in measured if each.seconds <= TIE * fastest)
    return ThreadChoice(measured, chosen)


def _seconds_of(work: Callable[[], object], hopeless: float) -> float:
    """The mean seconds of `work`, without the first run, which starts threads.

    If the second run takes longer than `hopeless` seconds, it is the only one that counts.
    """
    times: list[float] = []
    while len(times) <= LEAST_TIMES or sum(times[1:]) < LEAST_SECONDS:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        if len(times) == 2 and times[1] > hopeless:
            break
    return sum(times[1:]) / len(times[1:])


def layer_work(model: GPT, compute_dtype: torch.dtype, rows: int) -> Callable[[], object]:
    """Forward and backward of the first layer on `rows` rows, then Muon's GEMMs for each of its matrices.

    At most MOST_TOKENS tokens. compute_dtype: that of the GEMMs. The weights of the layer are overwritten.
    """
    config, layer = model.config, next(model.transformer["h"].children())
    length = min(config.sequence_len, max(1, MOST_TOKENS // rows))
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0.0, 0.02)
    x = torch.empty(rows, length, config.n_embd, dtype=model.resid_lambdas.dtype).normal_()
    rotary = (model.cos[:length].to(compute_dtype), model.sin[:length].to(compute_dtype))
    ve = None
    if config.has_value_embedding(0):
        ve = torch.zeros(rows, length, config.kv_dim, dtype=compute_dtype)

    def work() -> None:
        layer(x.requires_grad_(), ve, rotary, config.windows()[0], None).sum().backward()
        with torch.no_grad():
            for p in layer.parameters():
                if p.grad is not None:
                    orthogonalize(p.grad, compute_dtype)
        layer.zero_grad(set_to_none=True)

    return work
