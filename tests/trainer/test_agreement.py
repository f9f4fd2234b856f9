"""The agreement on the members of a run, simulated with ranks that die, freeze, return and differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import pytest
from simulated_ranks import (
    LONGEST_DELAY,
    RESTART_SECONDS,
    Process,
    Ranks,
    SimulatedKeys,
    Simulation,
    bound,
)

from trainer.distributed.consistency import Record
from trainer.elastic import agreement
from trainer.elastic.agreement import ACCEPT_SECONDS, FIRST_SECONDS, LONGEST_DELAY_SECONDS, Coordinator
from trainer.elastic.keys import Member, View

FAULTS_SECONDS, CALM_SECONDS = 120.0, 200.0  # with faults, and then without: the longest delay and more
KINDS = ("die", "die and stay away", "freeze", "blink", "leave", "differ", "never accept")


def simulate(seed: int, world_size: int, faults: int) -> tuple[Simulation, list[int]]:
    """Simulate a run with faults at random times; returns it and the numbers of its last members."""
    simulation = Simulation(seed, world_size)
    ranks, draw = Ranks(simulation), random.Random(seed)
    ranks.start(0)
    for number in range(1, world_size):
        simulation.at(draw.uniform(0, 10), lambda number=number: ranks.start(number))  # type: ignore[misc]

    def happen(kind: str, number: int, seconds: float) -> None:
        process = simulation.current.get(number)
        if process is None:
            return
        if kind == "leave":
            ranks.leavers.add(id(process))
        elif kind in ("freeze", "blink"):
            simulation.freeze(process, seconds if kind == "freeze" else seconds / 10)
        else:
            simulation.kill(process)
        if kind == "die and stay away":
            ranks.gone.add(number)
        elif kind in ("differ", "never accept"):
            traits = {"differs": kind == "differ", "never_accepts": kind == "never accept"}
            simulation.at(simulation.now + 1, lambda: ranks.start(number, **traits))
        elif kind == "die":
            again = simulation.now + draw.choice([0.1, RESTART_SECONDS, 30.0])
            simulation.at(again, lambda: ranks.start(number))

    for _ in range(faults):
        kind, number, seconds = draw.choice(KINDS), draw.randrange(1, world_size), draw.uniform(1, 20)
        when = draw.uniform(0.5, FAULTS_SECONDS)
        simulation.at(when, lambda it=(kind, number, seconds): happen(*it))  # type: ignore[misc]
    simulation.run(FAULTS_SECONDS + CALM_SECONDS)
    return simulation, ranks.expected


def check(simulation: Simulation, expected: list[int]) -> None:
    """What holds for all simulations. That members have accepted is checked at each commit."""
    views = [view for _, view in simulation.history]
    assert views, "a view is committed"
    assert all(one.generation < next.generation for one, next in pairwise(views))
    of_generation = {view.generation: view for view in views}
    for number, seen in simulation.seen:
        assert seen.members == of_generation[seen.generation].members, f"{number} has another history"

    dropped: set[tuple[int, int]] = set()
    before: set[tuple[int, int]] = set()
    for at, view in simulation.history:
        names = {(each.number, each.incarnation) for each in view.members}
        assert not names & dropped, "an incarnation that was left out is a member again"
        dropped |= before - names
        before = names
        for member in view.members:
            process = simulation.members[member.number, member.incarnation]
            assert not process.differs, "a rank that differs is a member"
            assert process.died_at is None or at - process.died_at < ACCEPT_SECONDS + LONGEST_DELAY

    for began, ended, failed in simulation.changes:
        assert ended - began < bound(failed), "an agreement takes too long"
    assert views[-1].numbers == expected, "all that are active and fit are members in the end"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer turns of the simulated processes, and a view that all of them read is decoded once."""
    monkeypatch.setattr(agreement, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(View, "load", lru_cache(View.load))


@pytest.mark.parametrize("seed", range(12))
def test_few_ranks_with_many_faults(seed: int) -> None:
    check(*simulate(seed, 2 + seed % 7, 2 + 2 * seed))


@pytest.mark.parametrize("world_size", [16, 64])
def test_many_ranks(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "POLL_SECONDS", 0.5)
    monkeypatch.setattr("simulated_ranks.WATCH_SECONDS", 2.0)
    check(*simulate(world_size, world_size, 12))


def test_a_simulation_repeats_exactly() -> None:
    first, second = (simulate(3, 5, 10)[0] for _ in range(2))
    assert first.history == second.history


def test_without_faults_all_ranks_are_in_the_only_view() -> None:
    simulation, expected = simulate(1, 8, 0)
    check(simulation, expected)
    assert len(simulation.history) == 1
    assert simulation.history[0][0] < 11


def test_a_rank_that_never_arrives_delays_the_start_only() -> None:
    simulation = Simulation(1, 4)
    ranks = Ranks(simulation)
    for number in (0, 1, 2):
        ranks.start(number)
    simulation.run(FIRST_SECONDS + 20)
    ((at, view),) = simulation.history
    assert view.numbers == [0, 1, 2]
    assert FIRST_SECONDS <= at < FIRST_SECONDS + ACCEPT_SECONDS


def test_a_rank_that_joins_and_misses_the_proposal_joins_again() -> None:
    """It is frozen while it is proposed. It must end when it wakes, so that its unit starts the next one."""
    simulation = Simulation(2, 3)
    ranks = Ranks(simulation)
    for number in (0, 1):
        ranks.start(number)

    def join() -> None:
        ranks.start(2)
        process = simulation.current[2]
        simulation.at(simulation.now + 0.45, lambda: simulation.freeze(process, 10.0))

    simulation.at(FIRST_SECONDS + 10, join)
    simulation.run(FIRST_SECONDS + 60)
    assert simulation.history[-1][1].numbers == [0, 1, 2]
    assert simulation.history[-1][1].members[2].incarnation == 2


def test_a_refused_rank_gets_the_reason_and_the_others_do_not_notice() -> None:
    simulation = Simulation(4, 3)
    ranks = Ranks(simulation)
    for number in (0, 1):
        ranks.start(number)
    simulation.at(FIRST_SECONDS + 10, lambda: ranks.start(2, differs=True))
    simulation.run(FIRST_SECONDS + 40)
    assert [view.numbers for _, view in simulation.history] == [[0, 1]]
    (reason,) = simulation.refused
    assert "code is same, but rank 2 (host-2) has other" in reason


def test_ranks_that_are_added_join_after_the_first_view_and_may_come_and_go() -> None:
    simulation = Simulation(5, 2)
    ranks = Ranks(simulation)
    for number in (0, 1, 2, 4):  # of two at the start
        ranks.start(number)
    simulation.at(30, lambda: simulation.kill(simulation.current[4]))
    simulation.at(45, lambda: ranks.start(4))
    simulation.at(55, lambda: ranks.start(3, differs=True))
    simulation.run(100)
    numbers = [view.numbers for _, view in simulation.history]
    assert numbers == [[0, 1], [0, 1, 2, 4], [0, 1, 2], [0, 1, 2, 4]]
    assert len(simulation.refused) == 1
    check(simulation, [0, 1, 2, 4])


@pytest.mark.parametrize(("is_elected", "suffices"), [(True, False), (False, True)])
def test_a_rank_that_was_added_does_not_count_for_the_majority(is_elected: bool, suffices: bool) -> None:
    simulation = Simulation(0, 3)
    members = [Member(number, 1, Record(number, f"host-{number}", "", {}, {})) for number in range(4)]
    keys, is_replaced = SimulatedKeys(simulation, Process(0)), (lambda: False) if is_elected else None
    coordinator = Coordinator(keys, members[0], 3, 2, is_replaced=is_replaced)
    assert coordinator.suffices([members[0], members[3]]) is suffices
    assert coordinator.suffices([members[0], members[2]])


def test_of_several_ranks_on_a_host_the_first_counts_for_the_majority() -> None:
    """It keeps the term of the host: another rank may still be in a term that the host has left."""
    simulation = Simulation(0, 6)
    members = [Member(number, 1, Record(number, f"host-{number // 2}", "", {}, {})) for number in range(6)]
    keys = SimulatedKeys(simulation, Process(0))
    coordinator = Coordinator(keys, members[0], 6, 2, is_replaced=lambda: False, voting=range(0, 6, 2))
    assert not coordinator.suffices([*members[:2], members[3], members[5]])
    assert coordinator.suffices([members[0], members[2]])


def admissions(
    seconds_in: float, until: float, is_asked: bool = False, slow: Sequence[float] = ()
) -> list[float]:
    """When a rank is admitted that asks at once and is lost after `seconds_in` each time.

    is_asked: it leaves in order instead. slow: for so many seconds the others wait in vain for its first
    attempts.
    """
    simulation = Simulation(0, 2)
    process = Process(0)
    keys = SimulatedKeys(simulation, process)
    me, number = Member(0, 1, Record(0, "tower", "", {}, {})), 1
    coordinator = Coordinator(keys, me, 2, 1, lambda: simulation.now)
    admitted: list[float] = []
    while simulation.now < until:
        applicant = Member(number, len(admitted) + 1, Record(number, "laptop", "", {}, {}))
        agreement.Follower(keys, applicant).ask()
        while not coordinator.applicants([me]):
            simulation.now += 0.5
        admitted.append(simulation.now)
        simulation.now += seconds_in
        if is_asked:
            agreement.Follower(keys, applicant).leave()
        if len(admitted) <= len(slow):
            coordinator.postpone([applicant], slow[len(admitted) - 1])
        view = View(len(admitted), (me, applicant))
        coordinator.next_view(view, lambda member: True)
    return admitted


def test_a_rank_that_leaves_in_order_again_and_again_waits_less_than_one_that_is_lost() -> None:
    times = admissions(2.0, 300, is_asked=True)
    waits = [later - sooner - 2.0 for sooner, later in pairwise(times)]
    assert waits[:5] == pytest.approx([0, 5, 10, 20, 20], abs=1)


def test_a_flapping_rank_is_admitted_after_growing_delays() -> None:
    times = admissions(2.0, 900)
    waits = [later - sooner - 2.0 for sooner, later in pairwise(times)]
    assert waits[0] == 0, "one loss is no flapping"
    assert waits[1:6] == pytest.approx([5, 10, 20, 40, 80], abs=1)
    assert waits[6:] == pytest.approx([LONGEST_DELAY_SECONDS] * len(waits[6:]), abs=1)


def test_a_rank_that_joins_slowly_costs_the_others_one_twentieth_of_their_time() -> None:
    times = admissions(2.0, 4000, slow=[60, 90])
    waits = [later - sooner - 2.0 for sooner, later in pairwise(times)]
    assert waits[:3] == pytest.approx([20 * 60, 20 * 90, LONGEST_DELAY_SECONDS], abs=1)


def test_a_rank_that_is_lost_rarely_is_not_delayed() -> None:
    times = admissions(agreement.CALM_SECONDS + 1, 900)
    assert {later - sooner for sooner, later in pairwise(times)} == {agreement.CALM_SECONDS + 1}
