"""The election of a coordinator, simulated with hosts that die, restart and lose their connections.

Time is virtual. Each host runs the Election of the trainer; a dictionary stands for its disk. What follows an
election is a model: a coordinator trains a step while a quorum of its term is connected to it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import pytest

from trainer.elastic.election import (
    FRESH_SECONDS,
    GRACE_SECONDS,
    HEARD_SECONDS,
    NONE,
    Elected,
    Election,
    Notice,
)

RESTART_SECONDS = 4.0  # until the unit starts a process again
LOST_SECONDS = 6.0  # until a member gives up a coordinator that does not answer
QUORUM_SECONDS = 40.0  # until a coordinator gives up without a quorum
FAULTS_SECONDS, CALM_SECONDS = 120.0, 90.0
# Within this, a connected majority trains: a coordinator with a minority first waits QUORUM_SECONDS.
PROGRESS_SECONDS = QUORUM_SECONDS + LOST_SECONDS + 14.0


@dataclass
class Host:
    """A process of a host. `leader` is the host that it follows, after an election."""

    election: Election
    leader: int | None = None
    good_at: float = 0.0  # when it last had its coordinator, or a quorum as the coordinator


@dataclass
class World:
    """Hosts by index (None: its process has ended), their disks and their network."""

    seed: int
    count: int
    tick: float = 0.25
    now: float = 0.0
    loss: float = 0.0  # share of the exchanges that fail
    refusing: set[int] = field(default_factory=set)  # hosts that are on and whose process has ended
    terms: dict[int, int] = field(default_factory=dict)  # the disks
    cut: set[tuple[int, int]] = field(default_factory=set)  # from, to
    off_until: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # time, term, coordinator
    coordinators: dict[int, int] = field(default_factory=dict)  # term -> host
    majority: frozenset[int] = (
        frozenset()
    )  # hosts whose network and processes have been well since `well_since`
    well_since: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.quorum = self.count // 2 + 1
        self.hosts: dict[int, Host | None] = dict.fromkeys(range(self.count))

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += self.tick
            for host in range(self.count):
                if self.hosts[host] is None and self.now >= self.off_until.get(host, 0.0):
                    term = self.terms.get(host, NONE)
                    election = Election(host, self.count, self.quorum, term, lambda: self.now)
                    self.hosts[host] = Host(election, good_at=self.now)
                    self.refusing.discard(host)
            for host, process in self.active():
                if process.leader in (None, host):
                    self.ask_all(host, process)
            for host, process in self.active():
                if process.leader is None and (elected := process.election.decide()):
                    self.follow(host, process, elected)
            for host, process in self.active():
                if process.leader is not None:
                    self.train(host, process)
            self.check_progress()

    def check_progress(self) -> None:
        """While a majority of the hosts is connected, steps are trained."""
        if not self.is_well(self.majority):
            self.majority, self.well_since = self.connected_majority(), self.now
        trained = max(self.well_since, self.steps[-1][0] if self.steps else 0.0)
        if self.majority:
            assert self.now - trained < PROGRESS_SECONDS, f"{set(self.majority)} could train"

    def is_well(self, hosts: frozenset[int]) -> bool:
        """Whether no process of these hosts has ended and no message between them is lost."""
        pairs = combinations(hosts, 2)
        is_first_known = 0 in hosts or bool(self.terms)  # a run begins on its first host
        return (
            is_first_known
            and len(hosts) >= self.quorum
            and not self.loss
            and all(self.hosts[host] for host in hosts)
            and all(self.connected(*pair) for pair in pairs)
        )

    def connected_majority(self) -> frozenset[int]:
        """Hosts that are connected to each other; empty if no majority of them was found."""
        for first in range(min(self.count, 3)):
            found: list[int] = []
            for host in [*range(first, self.count), *range(first)]:
                if self.hosts[host] and all(self.connected(host, other) for other in found):
                    found.append(host)
            if self.is_well(frozenset(found)):
                return frozenset(found)
        return frozenset()

    def active(self) -> list[tuple[int, Host]]:
        return [(host, process) for host, process in self.hosts.items() if process]

    def end(self, host: int, seconds: float = RESTART_SECONDS, is_on: bool = False) -> None:
        """End the process of a host, which starts again later. is_on: whether its host is on meanwhile."""
        self.hosts[host] = None
        self.majority -= {host}
        if is_on:
            self.refusing.add(host)
        self.off_until[host] = max(self.off_until.get(host, 0.0), self.now + seconds)

    def connected(self, one: int, other: int) -> bool:
        """Whether a connection from `one` to `other` carries messages both ways."""
        return not self.cut & {(one, other), (other, one)}

    def ask_all(self, host: int, process: Host) -> None:
        for other in self.refusing:
            if self.connected(host, other):
                process.election.lost(other)
        for other, answering in self.active():
            if other == host or not self.connected(host, other) or self.random.random() < self.loss:
                continue
            answering.election.asked(process.election.notice())
            if self.random.random() >= self.loss:
                process.election.answered(answering.election.notice())

    def follow(self, host: int, process: Host, elected: Elected) -> None:
        assert elected.term >= self.terms.get(host, NONE), "a host takes part in a lower term"
        assert elected.term % self.count == elected.host
        self.terms[host] = elected.term
        process.leader, process.good_at = elected.host, self.now
        if elected.host == host:
            process.election.port = 1
            known = self.coordinators.setdefault(elected.term, host)
            assert known == host, "two hosts coordinate a term"
            trained = max((term for _, term, _ in self.steps), default=NONE)
            assert process.election.previous >= trained, "it may continue from a copy of an older term"

    def members(self, leader: int, term: int) -> list[int]:
        """The hosts that can take part in a step of a coordinator."""
        return [
            host
            for host, process in self.active()
            if process.leader == leader
            and process.election.term == term
            and (host == leader or self.connected(host, leader))
        ]

    def train(self, host: int, process: Host) -> None:
        term, leader = process.election.term, process.leader
        if leader == host:
            if len(self.members(host, term)) >= self.quorum:
                self.steps.append((self.now, term, host))
                process.good_at = self.now
            if process.election.known > term or self.now - process.good_at > QUORUM_SECONDS:
                self.elect_again(host, process)
            return
        assert leader is not None
        coordinator = self.hosts[leader]
        if coordinator and coordinator.leader == leader and coordinator.election.term == term:
            if self.connected(host, leader):
                process.good_at = self.now
        elif self.connected(host, leader):  # its store is closed
            self.elect_again(host, process)
            return
        if self.now - process.good_at > LOST_SECONDS:
            self.elect_again(host, process)

    def elect_again(self, host: int, process: Host) -> None:
        """Let a host that has lost its coordinator, or was replaced, take part in an election at once."""
        election = Election(host, self.count, self.quorum, process.election.term, lambda: self.now)
        election.known = process.election.known
        self.hosts[host] = Host(election, good_at=self.now)


def disturb(world: World, faults: int) -> None:
    """Run the world with faults at random times, then heal the network and run on."""
    draw = world.random
    for when in sorted(draw.uniform(1, FAULTS_SECONDS) for _ in range(faults)):
        world.run(when)
        host = draw.randrange(world.count)
        kind = draw.choice(["kill", "off", "all off", "cut host", "halves", "one way", "heal", "loss"])
        others = [other for other in range(world.count) if other != host]
        if kind in ("kill", "off"):
            is_killed = kind == "kill"
            world.end(host, RESTART_SECONDS if is_killed else draw.uniform(10, 60), is_on=is_killed)
        elif kind == "all off":
            for each in range(world.count):
                world.end(each, draw.uniform(3, 20))
        elif kind == "cut host":
            world.cut |= {(host, other) for other in others}
        elif kind == "halves":
            half = set(draw.sample(range(world.count), world.count // 2))
            world.cut |= {(a, b) for a in half for b in range(world.count) if b not in half}
        elif kind == "one way":
            world.cut |= {(host, other) for other in draw.sample(others, max(1, len(others) // 2))}
        elif kind == "loss":
            world.loss = draw.uniform(0, 0.5)
        else:
            world.cut, world.loss = set(), 0.0
    world.run(FAULTS_SECONDS)
    world.cut, world.loss, world.off_until = set(), 0.0, {}
    world.run(FAULTS_SECONDS + CALM_SECONDS)


def check(world: World) -> None:
    assert world.steps, "the run trains"
    terms = [term for _, term, _ in world.steps]
    assert all(one <= other for one, other in pairwise(terms)), "two histories of a run"
    assert world.now - world.steps[-1][0] < 1.0, "in the end the run trains"
    assert len(world.members(world.steps[-1][2], terms[-1])) == world.count, "in the end all are members"


@pytest.mark.parametrize("seed", range(60))
def test_there_is_one_history_and_the_run_continues(seed: int) -> None:
    world = World(seed, 3 + seed % 5)
    disturb(world, 2 + seed % 12)
    check(world)


@pytest.mark.parametrize(("count", "tick", "faults"), [(16, 0.5, 12), (33, 1.0, 8), (64, 1.0, 4)])
def test_many_hosts(count: int, tick: float, faults: int) -> None:
    world = World(count, count, tick)
    disturb(world, faults)
    check(world)


def test_a_run_begins_on_its_first_host_also_if_that_is_late() -> None:
    world = World(1, 3)
    world.off_until[0] = 30.0
    world.run(20.0)
    assert not world.steps
    world.run(40.0)
    assert {(term, host) for _, term, host in world.steps} == {(0, 0)}


def test_the_last_coordinator_is_elected_again_if_it_returns_at_once() -> None:
    world = World(1, 3)
    world.run(10.0)
    world.end(0, GRACE_SECONDS / 2)
    world.run(30.0)
    assert world.steps[-1][1:] == (3, 0)


def test_the_next_host_is_elected_if_the_coordinator_stays_away() -> None:
    world = World(1, 3)
    world.run(10.0)
    world.end(0, 1000.0)
    before = world.now
    world.run(60.0)
    assert world.steps[-1][1:] == (1, 1)
    first = next(at for at, term, _ in world.steps if term == 1)
    assert first - before < RESTART_SECONDS + GRACE_SECONDS + 2.0


@pytest.mark.parametrize("is_on", [True, False])
def test_nobody_waits_for_a_coordinator_that_has_ended(is_on: bool) -> None:
    world = World(1, 3)
    world.run(10.0)
    world.end(0, 1000.0, is_on)
    before = world.now
    world.run(60.0)
    first = next(at for at, term, _ in world.steps if term == 1)
    assert (first - before <= GRACE_SECONDS) == is_on


def test_a_minority_elects_nobody() -> None:
    world = World(1, 4)
    world.run(10.0)
    world.cut = {(a, b) for a in (0, 1) for b in (2, 3)}
    world.run(12.0)
    trained = len(world.steps)
    world.run(200.0)
    assert len(world.steps) == trained
    world.cut = set()
    world.run(260.0)
    check(world)


def test_a_host_that_few_reach_is_not_supported() -> None:
    """Host 1 would be next, but only host 2 reaches it: host 2 is elected."""
    world = World(1, 5)
    world.run(10.0)
    world.cut = {(1, other) for other in (3, 4)}
    world.end(0, 1000.0)
    world.run(60.0)
    assert world.steps[-1][2] == 2


def test_of_two_hosts_one_waits_for_the_answer_of_the_other() -> None:
    now = [0.0]
    election = Election(0, 2, 1, 0, lambda: now[0])
    assert election.decide() is None
    election.answered(Notice(1, 1, 1, (0, 1), None, 29000))
    assert election.decide() == Elected(1, 1, 29000)
    alone = Election(0, 2, 1, 0, lambda: now[0])
    now[0] += HEARD_SECONDS
    assert alone.decide() == Elected(2, 0, 0)


def test_another_rank_of_a_host_follows_the_term_of_the_first_one() -> None:
    election = Election(3, 3, 2, 1)
    election.answered(Notice(1, 1, 1, (0, 1, 2), None, 20500))
    election.answered(Notice(2, 2, 2, (0, 1, 2), None, 20501))
    assert election.decide(NONE) is None
    assert election.decide(1) == (1, 1, 20500)
    assert Election(3, 3, 2, 1).decide(2) is None, "no coordinator of this term has answered"


def test_old_notices_do_not_count() -> None:
    now = [0.0]
    election = Election(0, 3, 2, NONE, lambda: now[0])
    election.asked(Notice(1, NONE, NONE, (0, 1), 0))
    now[0] += FRESH_SECONDS + 0.1
    assert election.seen() == [0]
    assert election.decide() is None
