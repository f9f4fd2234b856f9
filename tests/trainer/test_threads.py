"""The choice of processors and threads by measurement, with real load on one of the processors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.__main__ import main
from trainer.config import RunConfig
from trainer.host import gemm_library, pinning, topology
from trainer.host.pinning import core_rates, pinned
from trainer.host.topology import Cpu, Topology, read_topology
from trainer.model.gpt import GPT, GPTConfig
from trainer.placement import rank_threads, threads
from trainer.placement.threads import choose_threads, layer_work

TWO = Topology((Cpu(0, (0, 0)), Cpu(1, (0, 1))), {})


@contextmanager
def busy(cpu: int, processes: int = 3) -> Iterator[None]:
    """Context in which `processes` processes compute on `cpu` all the time."""
    program = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint('ready', flush=True)\nwhile True: pass"
    load = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(processes)
    ]
    try:
        for process in load:
            assert process.stdout is not None
            assert process.stdout.readline()
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


@pytest.fixture
def model() -> GPT:
    return GPT(GPTConfig.from_depth(4, 512, sequence_len=512))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("slowed", [0, 1, None], ids=["first", "second", "none"])
def test_only_a_processor_that_others_keep_busy_is_left_out(slowed: int | None, model: GPT) -> None:
    """Chosen with the short work of a run, and compared with longer work on the same sets."""
    allowed = sorted(os.sched_getaffinity(0))[:2]
    topology = read_topology(allowed=allowed)
    short = rank_threads.work_maker(RunConfig(depth=4), torch.float32, 1, {})()
    with nullcontext() if slowed is None else busy(allowed[slowed]):
        choice = choose_threads(topology, short)
        sets = [each.candidate for each in choice.measured]
        longer = choose_threads(topology, layer_work(model, torch.float32, rows=2), sets)
    left = set(allowed) if slowed is None else {allowed[1 - slowed]}
    assert choice.best.candidate.cpus == left, choice.table()
    assert slowed is None or len(choice.measured) == 2
    [chosen] = [each for each in longer.measured if each.candidate == choice.best.candidate]
    assert chosen.seconds <= 1.05 * min(each.seconds for each in longer.measured), longer.table()


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_the_measured_rate_of_a_busy_core_is_lower() -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with busy(first):
        rates = core_rates([first, second])
    assert rates[second] == 1.0
    assert rates[first] < threads.BUSY_BELOW


class Clock:
    """A clock that advances by the seconds of the work on the processors to which this process is bound."""

    def __init__(self, seconds: dict[frozenset[int], float]) -> None:
        self.seconds, self.now, self.runs = seconds, 0.0, list[frozenset[int]]()

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.seconds[self.runs[-1]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Two processors of which the measurements are given, whatever this machine has."""
    clock = Clock({})

    @contextmanager
    def on(cpus: frozenset[int]) -> Iterator[None]:
        clock.runs.append(frozenset(cpus))
        yield

    monkeypatch.setattr(threads, "pinned", on)
    monkeypatch.setattr(threads.time, "perf_counter", clock)
    monkeypatch.setattr(threads, "core_rates", lambda cores: dict.fromkeys(cores, 1.0) | {1: 0.5})
    return clock


@pytest.mark.parametrize(
    ("one", "both", "chosen"),
    [(0.20, 0.11, {0, 1}), (0.20, 0.21, {0}), (0.200, 0.198, {0}), (0.20, 3.0, {0})],
    ids=["both are faster", "one is faster", "a tie goes to the smaller set", "both are hopeless"],
)
def test_the_fastest_set_is_chosen(one: float, both: float, chosen: set[int], clock: Clock) -> None:
    clock.seconds = {frozenset({0}): one, frozenset({0, 1}): both}
    choice = choose_threads(TWO, clock.work)
    assert choice.best.candidate.cpus == chosen
    assert choice.best.seconds <= 1.05 * min(one, both)
    [line] = [line for line in choice.table() if line.startswith(">")]
    assert f"{1000 * choice.best.seconds:.1f} ms" in line
    assert choice.saved()["ms"] == pytest.approx(
        {"fast cores at the moment": 1000 * one, "all logical CPUs": 1000 * both}
    )


@pytest.mark.parametrize(("both", "runs"), [(0.3, 2), (20.0, 1)])
def test_a_hopeless_set_is_run_twice_or_once(both: float, runs: int, clock: Clock) -> None:
    clock.seconds = {frozenset({0}): 0.1, frozenset({0, 1}): both}
    choice = choose_threads(TWO, clock.work)
    assert clock.now == pytest.approx(0.1 * 4 + runs * both)
    assert choice.saved()["ms"]["all logical CPUs"] == pytest.approx(1000 * both)


def test_affinity_and_threads_are_restored_after_a_measurement() -> None:
    before, count = os.sched_getaffinity(0), torch.get_num_threads()
    one = min(before)
    with pinned({one}):
        assert os.sched_getaffinity(0) == {one}
        assert torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == count


def test_a_processor_that_is_not_there_is_an_error() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="Invalid argument"), pinned({100_000}):
        pass
    assert os.sched_getaffinity(0) == before
    assert pinning.can_pin()


def test_the_work_leaves_no_gradient(model: GPT) -> None:
    work = layer_work(model, torch.float32, rows=1)
    work()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("depth", [2, 8, 20])
def test_the_work_has_about_the_given_operations(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a start does not wait for it longer with a larger model."""
    model, given = GPT(GPTConfig.from_depth(1, 64, 1024, aspect_ratio=64 * depth)), 4e9
    shapes: list[torch.Size] = []
    step = threads.orthogonalize

    def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shapes.append(matrix.shape)
        return step(matrix, dtype)

    monkeypatch.setattr(threads, "orthogonalize", orthogonalize)
    work = layer_work(model, torch.float32, 2, given)
    with FlopCounterMode(display=False) as counter:
        work()
    assert 0.5 * given < counter.get_total_flops() < 2 * given
    assert len(shapes) >= 6, "each matrix of attention and MLP takes part"
    assert model.config.n_embd in {side for shape in shapes for side in shape}


def test_the_work_leaves_the_random_numbers_of_the_run_alone(model: GPT) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    layer_work(model, torch.float32, rows=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_command_prints_the_table_and_the_settings(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.seconds = {frozenset({0}): 0.2, frozenset({0, 1}): 0.11}
    monkeypatch.setattr(rank_threads, "work_maker", lambda *_: lambda: clock.work)
    monkeypatch.setattr(topology, "read_topology", lambda: TWO)
    monkeypatch.setattr(gemm_library, "choose_library", lambda: None)  # it would wait for the clock
    assert main(["threads", "--depth", "2", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("This host has 2 cores, 2 logical CPUs.\n")
    assert "> all logical CPUs" in shown
    assert shown.endswith("  fleet_cpus: 0-1\n  fleet_threads: 2\n")


def test_no_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["threads", "--rows", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
