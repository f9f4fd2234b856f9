"""Choose the processors and threads of a rank by measurement: time the work of a layer on each candidate.

    chosen = choose_threads(read_topology(), layer_work(model, torch.float32, rows=2))
    pin(chosen.best.candidate.cpus)
    for line in chosen.table():
        log.info(line)

The set of all logical processors is rarely the fastest. In each GEMM all threads wait for the slowest thread,
which may run on an efficiency core, an SMT sibling, or a core that another process keeps busy.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from trainer.host.cores import at_most_quota
from trainer.host.pinning import bound_to, core_rates, pinned
from trainer.host.topology import Candidate, Topology, cpu_list, first_siblings
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import orthogonalize, polar_express_flops

LEAST_SECONDS = 0.3  # of the measurement of a candidate
LEAST_TIMES = 2
HOPELESS = 2.0  # times the seconds of the best so far: the candidate is measured once
BUSY_BELOW = 0.75  # of the speed of the fastest core: the core is left out of one candidate
# A smaller set is chosen over a faster one within this factor: it leaves processors to other programs, and
# repeated measurements differ by more.
TIE = 1.02
MOST_TOKENS = 2048  # of a measured layer: it is repeated on every candidate
LEAST_TOKENS, LEAST_ROWS = 32, 64  # of it, and of a matrix of Muon
WORK_SECONDS = 0.05  # of the work on the smallest candidate, at the full GEMM rate of each core
MUON_PART = 0.25  # of the FLOPs of the work
RANKS_PAY = 1.1  # a rank per NUMA node is proposed from this speed on: ranks also have to reduce gradients


@dataclass(frozen=True)
class TimedCandidate:
    """A set of processors with its measured time.

    candidate: the set. seconds: mean seconds of the measured work on this set.
    """

    candidate: Candidate
    seconds: float


@dataclass(frozen=True)
class ThreadChoice:
    """The sets of processors that were measured for the threads of a rank, and the chosen one.

    measured: all sets, in the order of their measurement. best: the chosen set.
    """

    measured: Sequence[TimedCandidate]
    best: TimedCandidate

    def table(self) -> list[str]:
        """One line per measured set: its name, processors and milliseconds; ">" marks the chosen one."""
        names = max(len(each.candidate.name) for each in self.measured)
        sets = max(len(cpu_list(each.candidate.cpus)) for each in self.measured)
        return [
            f"{'>' if each is self.best else ' '} {each.candidate.name:<{names}}  "
            f"CPUs {cpu_list(each.candidate.cpus):<{sets}}  {1000 * each.seconds:8.1f} ms"
            for each in self.measured
        ]

    def saved(self) -> dict[str, Any]:
        """The chosen set as JSON values, for threads.json and the log.

        cpus: processors of the set in list format, such as "0-7". name: name of the set, such as "all
        physical cores". ms: {name of each measured set: milliseconds}.
        """
        return {
            "cpus": cpu_list(self.best.candidate.cpus),
            "name": self.best.candidate.name,
            "ms": {each.candidate.name: round(1000 * each.seconds, 2) for each in self.measured},
        }


def candidates_of(topology: Topology) -> list[Candidate]:
    """The sets of processors to measure on `topology`, the smallest first.

    They are the sets of `Topology.candidates`. If some physical cores are slow at the moment, the set of the
    other physical cores is added, unless a CPU quota allows less than all cores: it would slow any of them.
    """
    found = topology.candidates()
    cores = [cpu.number for cpu in first_siblings(topology.cpus)]
    if 1 < len(cores) <= at_most_quota(len(cores)):
        rates = core_rates(cores)
        fast = [cpu for cpu in cores if rates[cpu] >= BUSY_BELOW]
        free = frozenset(fast)
        if len(fast) < len(cores) and free not in {each.cpus for each in found}:
            found.append(Candidate("fast cores at the moment", free))
    return sorted(found, key=lambda each: (len(each.cpus), sorted(each.cpus)))


def choose_threads(
    topology: Topology, work: Callable[[], object], candidates: Sequence[Candidate] = ()
) -> ThreadChoice:
    """Time the function `work` on each set of processors, the smallest first, and choose one.

    topology: the processors of this host. candidates: the sets; by default those of `candidates_of`.
    The smallest set whose time is at most TIE times that of the fastest set is chosen.
    """
    measured: list[TimedCandidate] = []
    for candidate in candidates or candidates_of(topology):
        best = min((each.seconds for each in measured), default=float("inf"))
        with pinned(candidate.cpus):
            measured.append(TimedCandidate(candidate, _seconds_of(work, HOPELESS * best)))
    fastest = min(each.seconds for each in measured)
    chosen = next(each for each in measured if each.seconds <= TIE * fastest)
    return ThreadChoice(measured, chosen)


def _seconds_of(work: Callable[[], object], hopeless: float) -> float:
    """The mean seconds of `work`, without the first run, which starts threads.

    If the second run takes longer than `hopeless` seconds, or the first run longer than twice `hopeless`, no
    further run starts, and the result is the time of this run alone.
    """
    times: list[float] = []
    while len(times) <= LEAST_TIMES or sum(times[1:]) < LEAST_SECONDS:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        if len(times) <= 2 and times[-1] > (hopeless if len(times) == 2 else 2 * hopeless):
            return times[-1]
    return sum(times[1:]) / len(times[1:])


def layer_work(
    model: GPT, compute_dtype: torch.dtype, rows: int, flops: float = math.inf
) -> Callable[[], object]:
    """A function that computes a layer: forward and backward, then Muon's GEMMs for each of its matrices.

    The layer is the first layer of `model`; its weights are overwritten. compute_dtype: number format of the
    GEMMs. rows: rows of sequence_len tokens, but at most MOST_TOKENS tokens in all. flops: approximate limit
    of the FLOPs of a call; to keep it, the tokens are reduced, and Muon's GEMMs use a part of each matrix.
    """
    config, layer = model.config, next(model.transformer["h"].children())
    matrices = list(layer.parameters())
    most = (1 - MUON_PART) * flops / (6 * sum(p.numel() for p in matrices))
    tokens = int(max(LEAST_TOKENS, min(MOST_TOKENS, most)))
    length = min(config.sequence_len, tokens)
    rows = max(1, min(rows, tokens // length))
    muon = sum(polar_express_flops(len(p), p.size(1), compute_dtype) for p in matrices if p.ndim == 2)
    part = min(1.0, (MUON_PART * flops / muon) ** 0.5) if muon else 1.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for p in matrices:
            p.uniform_(-0.03, 0.03)
        x = torch.empty(rows, length, config.n_embd, dtype=model.resid_lambdas.dtype).normal_()
    rotary = (model.cos[:length].to(compute_dtype), model.sin[:length].to(compute_dtype))
    ve = None
    if config.has_value_embedding(0):
        ve = torch.zeros(rows, length, config.kv_dim, dtype=compute_dtype)

    def work() -> None:
        layer(x.requires_grad_(), ve, rotary, config.windows()[0], None).sum().backward()
        with torch.no_grad():
            for p in matrices:
                if p.grad is not None:
                    orthogonalize(_thinner(p.grad, part), compute_dtype)
        layer.zero_grad(set_to_none=True)

    return work


def _thinner(matrix: torch.Tensor, part: float) -> torch.Tensor:
    """A view of `matrix` whose shorter side is cut to the fraction `part`, but to LEAST_ROWS at least."""
    axis = 0 if matrix.size(0) <= matrix.size(1) else 1
    size = matrix.size(axis)
    return matrix.narrow(axis, 0, min(size, max(LEAST_ROWS, int(part * size))))


def ranks_per_node(
    topology: Topology, best: TimedCandidate, make_work: Callable[[], Callable[[], object]]
) -> tuple[int, float]:
    """Measure whether one rank on each NUMA node of this host is faster than one rank on the host.

    Returns (number of NUMA nodes, gain) if the gain is at least RANKS_PAY; else (1, 1.0). gain: how many
    times as fast all nodes together are, measured while all compute. topology: the processors of this host.
    best: the fastest set of processors for one rank. make_work: as for `seconds_at_once`. The result is also
    (1, 1.0) if there is one node, if the nodes have different numbers of usable physical cores, or if the CPU
    quota does not allow all of these cores.
    """
    cores = first_siblings(topology.cpus)
    sets = [frozenset(cpu.number for cpu in cores if cpu.node == node) for node in topology.nodes]
    if len(sets) < 2 or len({len(cpus) for cpus in sets}) > 1 or at_most_quota(len(cores)) < len(cores):
        return 1, 1.0
    speed = len(sets) * best.seconds / seconds_at_once(sets, make_work)
    return (len(sets), speed) if speed >= RANKS_PAY else (1, 1.0)


def seconds_at_once(sets: Sequence[frozenset[int]], make_work: Callable[[], Callable[[], object]]) -> float:
    """Time equal work on several sets of processors at the same time; returns the seconds of the slowest set.

    sets: sets of processors, equally large. make_work: returns the function to time, such as the result of
    `layer_work`. It is called once for each set, on a thread that is bound to the set, so that its tensors
    are in the memory of that NUMA node. Each of these threads computes with its own team of torch threads.
    Raises what `make_work` or its result raises, and OSError if a set has no processor of this process.
    """
    ready = threading.Barrier(len(sets))

    def run() -> float:
        work = make_work()  # its tensors are in the memory of this node
        work()
        ready.wait()
        return _seconds_of(work, math.inf)

    def team(cpus: frozenset[int]) -> float:
        try:
            return bound_to(cpus, run)
        except BaseException:
            ready.abort()  # else the other teams would wait for this one
            raise

    before = torch.get_num_threads()
    torch.set_num_threads(len(sets[0]))
    try:
        with ThreadPoolExecutor(len(sets)) as pool:
            teams = [pool.submit(team, cpus) for cpus in sets]
    finally:
        torch.set_num_threads(before)
    errors = [error for each in teams if (error := each.exception())]
    if errors:  # the other teams have a BrokenBarrierError
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return max(each.result() for each in teams)
