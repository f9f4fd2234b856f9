"""The threads of a rank: measured once, kept in the run directory and in checkpoints, and set by a person."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Start, losses

from trainer.config import RunConfig
from trainer.host.logger import RunLogger
from trainer.host.numerics import Binding, Numerics, restore_numerics
from trainer.host.pinning import core_rates, pin
from trainer.host.rank_env import RankEnv
from trainer.host.topology import Candidate, Cpu, Topology, cpu_list
from trainer.placement import rank_threads, threads
from trainer.placement.rank_threads import CHOICE, bind_threads, propose_ranks, read_choice
from trainer.placement.threads import ThreadChoice, TimedCandidate, ranks_per_node, seconds_at_once

ALLOWED = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")
NUMERICS = Numerics(torch.device("cpu"), torch.float32, torch.float32, "as asked", 2, True, "a CPU")
Bind = Callable[..., Numerics]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    pin(ALLOWED, count)


class Machine:
    """Two processors of this machine, of which `fast` is measured to be faster; counts measurements."""

    def __init__(self) -> None:
        self.cpus, self.measurements = tuple(ALLOWED[:2]), 0
        self.sets = [frozenset(self.cpus[:1]), frozenset(self.cpus)]
        self.fast = self.sets[0]

    def topology(self) -> Topology:
        return Topology(tuple(Cpu(number, (0, number)) for number in self.cpus), {0: frozenset(self.cpus)})

    def choose(self, topology: Topology, work: object, candidates: list[Candidate]) -> ThreadChoice:
        self.measurements += 1
        measured = [TimedCandidate(each, 0.1 if each.cpus == self.fast else 0.2) for each in candidates]
        return ThreadChoice(measured, min(measured, key=lambda each: each.seconds))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(rank_threads, "read_topology", machine.topology)
    monkeypatch.setattr(
        rank_threads,
        "candidates_of",
        lambda topology: [Candidate(f"{len(cpus)} of them", cpus) for cpus in machine.sets],
    )
    monkeypatch.setattr(rank_threads, "choose_threads", machine.choose)
    monkeypatch.setattr(rank_threads, "work_maker", lambda *_: lambda: lambda: None)
    return machine


@pytest.fixture
def bind(tmp_path: Path) -> Bind:
    def bind(env: RankEnv | None = None, **given: Any) -> Numerics:
        env = env or RankEnv()
        return bind_threads(NUMERICS, RunConfig(**given), env, tmp_path, RunLogger(env))

    return bind


@needs_two
def test_the_fastest_set_is_measured_once_bound_and_recorded(
    machine: Machine, bind: Bind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(machine.cpus[0])
    first = bind()
    assert os.sched_getaffinity(0) == machine.fast
    assert torch.get_num_threads() == first.threads == 1
    assert f"1 thread on CPUs {one}, denormals" in first.describe()
    assert first.facts()["cpus"] == one
    assert first.facts()["threads reason"] == "1 of them: fastest of 1 of them 100 ms, 2 of them 200 ms"
    shown = capsys.readouterr().out
    assert f"1 thread on CPUs {one} (1 of them): of 2 measured sets of CPUs, the smallest" in shown
    assert len(re.findall(r"\d+\.\d ms", shown)) == 2, "the table"
    assert json.loads((tmp_path / CHOICE).read_text())["cpus"] == one

    pin(ALLOWED)  # as a new process
    assert bind() == first
    assert os.sched_getaffinity(0) == machine.fast
    assert machine.measurements == 1
    assert "as measured at an earlier start of this run" in capsys.readouterr().out


@needs_two
@pytest.mark.parametrize("change", ["depth", "dtype", "processors", "file"])
def test_what_decided_the_choice_has_changed(
    change: str, machine: Machine, bind: Bind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bind()
    capsys.readouterr()
    file = tmp_path / CHOICE
    choice = json.loads(file.read_text())
    expected = ""
    if change == "depth":
        choice["of"]["depth"], expected = 3, "The threads are chosen again: depth was 3, now 8."
    elif change == "dtype":
        choice["of"]["dtype"], expected = "bfloat16", "dtype was bfloat16, now float32."
    elif change == "processors":
        choice["of"]["usable_cpus"], expected = "0-63", "usable_cpus was 0-63, now "
    else:
        choice["threads"] = 64
    file.write_text(json.dumps(choice))
    bind()
    assert machine.measurements == 2
    assert expected in capsys.readouterr().out
    assert json.loads(file.read_text())["threads"] == 1


@needs_two
def test_nothing_is_measured_where_there_is_one_set(machine: Machine, bind: Bind, tmp_path: Path) -> None:
    machine.sets = machine.sets[1:]
    found = bind()
    assert machine.measurements == 0
    assert found.threads == torch.get_num_threads() == 2
    assert os.sched_getaffinity(0) == set(ALLOWED)
    assert not found.binding.is_partial
    assert read_choice(tmp_path / CHOICE)["ms"] == {}


@pytest.mark.parametrize("who", ["threads", "OMP_NUM_THREADS", "several ranks", "no Linux"])
def test_nothing_is_measured_where_a_person_has_decided(
    who: str, machine: Machine, bind: Bind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, given = RankEnv(), {}
    if who == "threads":
        given = {"threads": 1}
    elif who == "OMP_NUM_THREADS":
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    elif who == "several ranks":
        env = RankEnv(world_size=2, local_world_size=2)
    else:
        monkeypatch.setattr(rank_threads, "can_pin", lambda: False)
    assert bind(env, **given) is NUMERICS
    assert machine.measurements == 0
    assert not (tmp_path / CHOICE).exists()
    assert os.sched_getaffinity(0) == set(ALLOWED)


@needs_two
def test_a_system_that_refuses_to_bind_only_warns(
    machine: Machine, bind: Bind, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(rank_threads, "pin", refuse)
    assert bind() is NUMERICS
    assert "warning: the threads are not bound to processors" in capsys.readouterr().out


# -- checkpoints


@needs_two
def test_a_checkpoint_restores_threads_and_processors(machine: Machine, bind: Bind) -> None:
    one = bind()
    both = replace(one, threads=2, binding=replace(one.binding, cpus=one.binding.usable))
    saved = json.loads(json.dumps(both.saved()))
    restored = restore_numerics(one, saved)
    assert restored.saved() == saved
    assert os.sched_getaffinity(0) == set(machine.cpus)
    assert torch.get_num_threads() == 2
    assert restore_numerics(restored, one.saved()).saved() == one.saved()
    assert os.sched_getaffinity(0) == machine.fast
    assert restore_numerics(one, {**saved, "usable_cpus": "0-63"}) == one, "another host now"
    assert one.binding.changes({**saved, "cores": 64}) == "cores was 64, now 2"
    assert one.binding.changes(saved) == ""
    assert restore_numerics(one, {**saved, "cpus": ""}) == one, "a person had set the threads"
    assert restore_numerics(one, saved, threads=1) == one
    del saved["cpus"], saved["usable_cpus"]  # of an earlier release
    assert restore_numerics(one, saved).threads == 2


@needs_two
def test_a_resumed_run_measures_nothing_and_is_the_same_to_the_bit(start: Start, tmp_path: Path) -> None:
    """The checkpoint decides, even if threads.json has another choice by then."""
    auto: dict[str, Any] = {"threads": "auto", "num_iterations": 60, "digest_every": 0}
    own = {"env": [{"OMP_NUM_THREADS": ""}], **auto}
    (first,) = start(1, name="first", **own)
    first.reach_step(1)
    (first.run_dir / "stop").touch()
    code, printed = first.wait()
    assert code == 0, printed
    file = first.run_dir / CHOICE
    choice = json.loads(file.read_text())
    saved = json.loads((first.run_dir / first.outcome()["checkpoint"] / "meta.json").read_text())
    assert saved["numerics"][0]["threads"] == choice["threads"]
    assert saved["numerics"][0]["cpus"] == choice["cpus"]
    other = choice | (
        {"cpus": cpu_list(ALLOWED), "threads": len(ALLOWED)}
        if choice["threads"] == 1
        else {"cpus": str(ALLOWED[0]), "threads": 1}
    )
    file.write_text(json.dumps(other))

    (second,) = start(1, name="first", **own)
    whole_dir = tmp_path / "whole-0"
    whole_dir.mkdir()
    (whole_dir / CHOICE).write_text(json.dumps(choice))
    code, printed = second.wait()
    assert code == 0, printed
    assert "measured sets of CPUs" not in printed, "nothing is measured"
    assert "Restored from the checkpoint: " in printed
    (whole,) = start(1, name="whole", **own)
    code, printed = whole.wait()
    assert code == 0, printed
    last = second.run_dir / second.outcome()["checkpoint"]
    assert json.loads((last / "meta.json").read_text())["numerics"] == saved["numerics"]
    assert losses(second.run_dir) == losses(whole.run_dir)
    weights = [run.run_dir / run.outcome()["checkpoint"] / "model.safetensors" for run in (second, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# -- several ranks on a host with NUMA nodes

NODES = Topology(
    tuple(Cpu(number, (node, number), node) for node, number in enumerate(ALLOWED[:2])),
    {node: frozenset({number}) for node, number in enumerate(ALLOWED[:2])},
)


@needs_two
@pytest.mark.parametrize(("together", "ranks"), [(0.15, 2), (0.19, 1), (0.4, 1)])
def test_a_rank_per_node_is_proposed_where_it_is_faster(
    together: float, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "seconds_at_once", lambda *_: together)
    monkeypatch.setattr(threads, "at_most_quota", lambda count: count)
    best = TimedCandidate(Candidate("all", frozenset(ALLOWED[:2])), 0.1)
    assert ranks_per_node(NODES, best, lambda: lambda: None)[0] == ranks
    printed = propose_ranks(NODES, best, lambda: lambda: None)
    assert printed.startswith("One rank on each of the 2 NUMA nodes computes 1.33 times") == (ranks == 2)
    assert ("nproc_per_node: 2 for this host" in printed) == (ranks == 2)
    one = Topology(NODES.cpus, {0: frozenset(ALLOWED)})
    assert ranks_per_node(one, best, lambda: lambda: None) == (1, 1.0)


@needs_two
def test_the_nodes_compute_at_the_same_time_each_on_its_processors() -> None:
    seen: list[set[int]] = []

    def make_work() -> Callable[[], object]:
        seen.append(os.sched_getaffinity(0))
        factor = torch.ones(256, 256)
        return lambda: factor @ factor

    assert 0 < seconds_at_once([frozenset({number}) for number in ALLOWED[:2]], make_work) < 1
    assert sorted(map(min, seen)) == ALLOWED[:2]
    assert all(len(cpus) == 1 for cpus in seen)
    assert os.sched_getaffinity(0) == set(ALLOWED)


@needs_two
def test_a_node_without_memory_ends_the_measurement_of_all() -> None:
    made: list[int] = []

    def make_work() -> Callable[[], object]:
        made.append(1)
        if len(made) == 2:
            raise MemoryError("no memory on this node")
        return lambda: None

    with pytest.raises(MemoryError, match="no memory on this node"):
        seconds_at_once([frozenset({number}) for number in ALLOWED[:2]], make_work)


def test_a_processor_that_is_not_allowed_has_no_speed() -> None:
    assert core_rates([ALLOWED[0], 4095], seconds=0.05) == {ALLOWED[0]: 1.0, 4095: 0.0}


@needs_two
def test_ranks_that_are_as_many_as_nodes_get_one_each(bind: Bind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_threads, "read_topology", lambda: NODES)
    env = RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2)
    one_thread = replace(NUMERICS, threads=1)
    config, log = RunConfig(threads=1), RunLogger(env)
    assert bind_threads(one_thread, config, env, Path(), log) == one_thread
    assert os.sched_getaffinity(0) == {ALLOWED[1]}
    pin(ALLOWED)
    bind_threads(NUMERICS, config, env, Path(), log)  # two threads do not fit on a node of one processor
    assert os.sched_getaffinity(0) == set(ALLOWED)


def test_an_empty_binding_shows_nothing() -> None:
    assert (Binding().facts(), Binding().saved()) == ({}, {"cpus": ""})
    assert " on CPUs " not in NUMERICS.describe()
