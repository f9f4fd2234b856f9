"""How the ranks of a run agree on its members: the coordinator proposes them, the other ranks accept.

A view is the list of members between two changes of the members. The coordinator, which is rank 0, proposes a
view. Each member accepts it, and the coordinator commits the view when all members have accepted. A member
that does not accept in time is left out of the next proposal. Only the coordinator decides, so that the ranks
cannot disagree. No function in this module starts a collective.

If the coordinator is lost in a run with coordinator_failover, the other hosts elect another one
(election.py); in other runs, the systemd units restart the run. An elected coordinator needs a quorum of
hosts in each view: more than half of the hosts, or one of two hosts, and at least min_hosts.

Ranks that are added to an active run have numbers from the world size on. They are members like the others,
but only the hosts at the start of the run count for the quorum, so that it is the same number on all hosts.
Of several ranks on a host, the first one votes for the host, and writes the number of the term (election.py)
to its disk.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from trainer.distributed.consistency import compare, explain, name_differences
from trainer.elastic.keys import Keys, Member, View, load_member
from trainer.outcome import Final, Retryable, RunEnd, Stopped

POLL_SECONDS = 0.05
ACCEPT_SECONDS = 3.0  # for a member to accept a proposed view
READY_SECONDS = 10.0  # after a loss, for a member that answers and still computes; more if steps are long
FIRST_SECONDS = 45.0  # at the start of a run, for all hosts to arrive
VIEW_SECONDS = 60.0  # for a member to be in a view after it is ready
QUORUM_SECONDS = 40.0  # after a loss, for a quorum of hosts to return; members wait longer for a view
CALM_SECONDS = 60.0  # a member that is lost again sooner waits before it may join again
SHORTEST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 5.0, 120.0
# The same for a member that leaves in order, which costs the others less.
LEAVE_CALM_SECONDS, LONGEST_LEAVE_DELAY_SECONDS = 20.0, 20.0
SLOW_FACTOR = 20  # a rank that joined too slowly waits that many times the pause of the others
ADDED_RANKS = 16  # the most ranks that are added to an active run


class Coordinator:
    """Decides which ranks are the members of an elastic run: proposes views to the members and commits them.

    The attribute `me` is this rank as a member.
    """

    def __init__(
        self,
        keys: Keys,
        me: Member,
        world_size: int,
        min_hosts: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        is_replaced: Callable[[], bool] | None = None,
        voting: Collection[int] | None = None,
    ) -> None:
        """Begin as the coordinator of a run.

        keys: reads and writes the messages between the ranks (keys.py).
        me: this rank as a member.
        world_size: the number of ranks at the start of the run, without those that are added later.
        min_hosts: the least number of hosts in a view. For an elected coordinator it is the quorum.
        clock, sleep: monotonic and sleep of the module time; a simulation has its own.
        is_replaced: returns whether other hosts have elected another coordinator; None in a run without
            elections.
        voting: the ranks that vote for their hosts in elections; None: all ranks, if each host has one rank.
        """
        self._keys, self.me, self._world_size, self._min_hosts = keys, me, world_size, min_hosts
        self._voting = range(world_size) if voting is None else voting
        self._clock, self._sleep, self._is_replaced = clock, sleep, is_replaced
        self._numbers = range(1, world_size + ADDED_RANKS)  # of the ranks that may join
        self._losses: dict[int, tuple[float, float]] = {}  # number -> when it was left out, its delay then
        # number -> its delay when it is left out, because it joins too slowly
        self._slow: dict[int, float] = {}
        self._handled: dict[int, int] = {}  # number -> incarnation that was refused, has left or is lost

    def first_view(
        self,
        is_loading: Callable[[int], bool] = lambda number: False,
        expected: Iterable[int] | None = None,
        kind: str = "",
    ) -> View:
        """Wait for the ranks of the run and agree with them on the first view; returns the view.

        The wait lasts FIRST_SECONDS at most, or longer while a missing rank still loads. The run then starts
        without the missing ranks, if at least min_hosts hosts are present. Ranks that were added to an active
        run join in the next view: if such a rank differs from the run, only that rank is refused.
        is_loading: returns whether the rank with this number still loads. expected: numbers of the ranks to
        wait for; None: all. kind: "cpu" if this rank continues the run from the state in its memory; else "".
        Raises Final if a rank reports a problem or the records of the members differ; Retryable if too few
        hosts arrive.
        """
        began, everyone = self._clock(), set(range(self._world_size))
        awaited = everyone if expected is None else everyone & set(expected)
        while True:
            members = [self.me, *self._applicants(range(1, self._world_size))]
            missing = awaited - {member.number for member in members}
            late = self._clock() - began > FIRST_SECONDS
            if not missing or (late and not any(map(is_loading, missing))):
                break
            self._sleep(POLL_SECONDS)
        records = [member.record for member in members]
        problems = [f"{record}: {record.problem}" for record in records if record.problem]
        if problems:
            raise Final(" ".join(problems))
        if differences := compare(records):
            raise Final(*explain(differences, records))
        return self._agree(members, 0, kind, lambda member: False)

    def next_view(
        self,
        view: View,
        is_dead: Callable[[Member], bool],
        seconds: float = READY_SECONDS,
        leaving: Collection[int] | None = None,
    ) -> View:
        """Agree on the view that follows `view`; returns the next view.

        It has the members of `view` that stay and are ready, and the ranks that ask to join. A member sets
        its key `ready` when it no longer takes part in collectives of `view`. is_dead: returns whether a
        member is lost and cannot become ready. seconds: the longest wait for members that are not lost.
        leaving: numbers of the members that leave now; None: all that have announced it.
        Raises Retryable if fewer than min_hosts hosts remain; an elected coordinator first waits
        QUORUM_SECONDS for hosts to return.
        """
        generation, began = view.generation, self._clock()
        if leaving is None:
            leaving = [member.number for member in self.leavers(view)]
        waiting = [m for m in view.members if m.number != self.me.number and m.number not in leaving]
        present = [self.me]
        while waiting and self._clock() - began < seconds:
            ready = [member for member in waiting if self._is_at(f"ready/{generation}", member)]
            present += ready
            waiting = [member for member in waiting if member not in ready and not is_dead(member)]
            if waiting:
                self._sleep(POLL_SECONDS)
        for member in view.members:
            if member not in present:
                self._drop(member, is_lost=member.number not in leaving)
        joining, left = self.applicants(present), self._clock()
        while self._is_replaced is not None and self._too_few([*present, *joining]):
            if self._is_replaced() or self._clock() - left > QUORUM_SECONDS:
                break
            self._sleep(POLL_SECONDS)
            joining = self.applicants(present)
        return self._agree([*present, *joining], generation, view.kind, is_dead)

    def suffices(self, members: Iterable[Member]) -> bool:
        """Whether these members are on enough hosts for a view."""
        return not self._too_few(members)

    def _too_few(self, members: Iterable[Member]) -> bool:
        if self._is_replaced is not None:  # a majority of those that vote
            members = [member for member in members if member.number in self._voting]
        return len({member.record.host for member in members}) < self._min_hosts

    def applicants(self, members: Iterable[Member]) -> list[Member]:
        """The ranks that have asked to join and that the coordinator admits, as members.

        members: the present members; they are not in the result. A rank that was lost or has left several
        times, or that joined too slowly, is not in the result until its delay is over. A rank that reports a
        problem, or whose record differs from the coordinator's, is refused: the reason is written to its key
        `refused`.
        """
        there = {member.number for member in members}
        admitted = []
        for member in self._applicants(set(self._numbers) - there):
            if self._delay_of(member.number) > 0:
                continue
            differences = compare([self.me.record, member.record])
            if differences or member.record.problem:
                named = name_differences(differences, [self.me.record, member.record])
                differs = (
                    f"{member} differs from the coordinator: {named}. To give the host the same code, "
                    "packages and data: ansible-playbook setup.yml, then: ansible-playbook train.yml"
                )
                sentence = member.record.problem or differs
                self._handled[member.number] = member.incarnation
                self._keys.set(f"refused/{member.number}", json.dumps([member.incarnation, sentence]))
                continue
            admitted.append(member)
        return admitted

    def leavers(self, view: View) -> list[Member]:
        """The members of `view` that have announced that they end (their key `leave`)."""
        return [member for member in view.members if self._leaves(member)]

    def replaced(self, view: View) -> list[Member]:
        """The members of `view` whose process has ended: a newer process of the same rank asks to join."""
        newer = {each.number: each.incarnation for each in self._applicants(view.numbers)}
        return [each for each in view.members if newer.get(each.number, 0) > each.incarnation]

    def postpone(self, members: Iterable[Member], seconds: float) -> float:
        """Set how long these members must wait to join again the next time they are left out of a view.

        seconds: how long the other members have waited for them. Returns the delay in seconds: SLOW_FACTOR
        times `seconds`.
        """
        self._slow |= {member.number: SLOW_FACTOR * seconds for member in members}
        return SLOW_FACTOR * seconds

    def end(self, outcome: str, reason: str) -> None:
        """Announce the end of the run to the ranks that wait to join.

        outcome: finished, stopped, retryable or final. reason: a sentence.
        """
        self._keys.set("ended", json.dumps([outcome, reason]))

    def _agree(
        self, candidates: list[Member], generation: int, kind: str, is_dead: Callable[[Member], bool]
    ) -> View:
        members = sorted(candidates, key=lambda member: member.number)
        while True:
            if self._too_few(members):
                hosts = ", ".join(sorted({member.record.host for member in members}))
                needed = f"min_hosts is {self._min_hosts}"
                if self._is_replaced is not None:
                    needed = f"{self._min_hosts} of {len(self._voting)} hosts are needed"
                raise Retryable(
                    f"Only {hosts} can train, and {needed}. The run waits and continues by itself when more "
                    "hosts are back. To see which are missing: ansible-playbook status.yml"
                )
            generation += 1
            view = View(generation, tuple(members), kind)
            self._keys.set("proposal", view.dump())
            missing = self._await_acceptance(view, is_dead)
            if not missing:
                self._keys.set("committed", view.dump())
                return view
            members = [member for member in members if member not in missing]
            for member in missing:
                self._drop(member, is_lost=True)

    def _drop(self, member: Member, is_lost: bool) -> None:
        """Never admit this process of a member again, and set the delay of the next process of the same rank.

        is_lost: True if the process was lost, False if it has announced its end. A lost process may still be
        active without having read the view that lacks it. Its key `dropped` informs it.
        """
        self._handled[member.number] = member.incarnation
        now, (at, before) = self._clock(), self._losses.get(member.number, (-math.inf, 0.0))
        calm, longest = (
            (CALM_SECONDS, LONGEST_DELAY_SECONDS)
            if is_lost
            else (LEAVE_CALM_SECONDS, LONGEST_LEAVE_DELAY_SECONDS)
        )
        longer = min(max(SHORTEST_DELAY_SECONDS, 2 * before), longest)
        delay = self._slow.pop(member.number, 0.0 if now - at > before + calm else longer)
        self._losses[member.number] = now, delay
        if is_lost:
            self._keys.set(f"dropped/{member.number}", str(member.incarnation))

    def _await_acceptance(self, view: View, is_dead: Callable[[Member], bool]) -> list[Member]:
        """Wait for the members to accept `view`; returns those that have not accepted it.

        The wait lasts ACCEPT_SECONDS at most. It ends sooner when each member has accepted or is dead.
        """
        began = self._clock()
        missing = [member for member in view.members if member.number != self.me.number]
        while self._clock() - began < ACCEPT_SECONDS:
            missing = [each for each in missing if not self._is_at(f"accepted/{view.generation}", each)]
            if all(map(is_dead, missing)):
                break
            self._sleep(POLL_SECONDS)
        return missing

    def _is_at(self, key: str, member: Member) -> bool:
        return self._keys.get(f"{key}/{member.number}") == str(member.incarnation)

    def _leaves(self, member: Member) -> bool:
        return self._is_at("leave", member)

    def _applicants(self, numbers: Iterable[int]) -> list[Member]:
        found = []
        for number in numbers:
            if text := self._keys.get(f"join/{number}"):
                member = load_member(json.loads(text))
                if member.incarnation > self._handled.get(number, 0) and not self._leaves(member):
                    found.append(member)
        return found

    def _delay_of(self, number: int) -> float:
        """Seconds until the rank with this number may join again; 0 or less if it may join now."""
        at, delay = self._losses.get(number, (0.0, 0.0))
        return at + delay - self._clock() if delay else 0.0


class Follower:
    """A rank other than the coordinator: asks to join the run, and accepts views.

    keys: reads and writes the messages between the ranks (keys.py). me: this rank as a member. clock, sleep:
    monotonic and sleep of the module time; a simulation has its own.
    """

    def __init__(
        self,
        keys: Keys,
        me: Member,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._keys, self.me, self._clock, self._sleep = keys, me, clock, sleep

    def ask(self) -> None:
        """Ask the coordinator to make this rank a member of the next view."""
        self._keys.set(f"join/{self.me.number}", json.dumps(_plain(self.me)))

    def leave(self) -> None:
        """Announce that this member ends after the present step."""
        self._keys.set(f"leave/{self.me.number}", str(self.me.incarnation))

    def ready(self, generation: int) -> None:
        """Announce that this member no longer takes part in collectives of the view `generation`.

        The coordinator waits for this before it proposes the next view.
        """
        self._keys.set(f"ready/{generation}/{self.me.number}", str(self.me.incarnation))

    def follow(self, generation: int, seconds: float | None = VIEW_SECONDS) -> View:
        """Wait for a committed view that is newer than `generation` and has this rank; returns the view.

        Accepts each proposed view that has this rank. seconds: the longest wait; None, for a rank that joins:
        no limit. Raises Retryable if the coordinator leaves this member out, or if no view is committed in
        time; Final if the coordinator refuses this rank. If the run has ended, raises Final for the outcome
        final, Retryable for the outcome retryable, else Stopped.
        """
        began, accepted = self._clock(), generation
        while seconds is None or self._clock() - began < seconds:
            self._raise_if_refused()
            proposal = self._read("proposal")
            if proposal and proposal.generation > accepted and self._is_in(proposal):
                accepted = proposal.generation
                self._keys.set(f"accepted/{accepted}/{self.me.number}", str(self.me.incarnation))
            view = self._read("committed")
            if view and view.generation > generation:
                if self._is_in(view):
                    return view
                if seconds is not None:  # it was a member
                    raise self._left_out()
            if self._keys.get(f"dropped/{self.me.number}") == str(self.me.incarnation):
                raise self._left_out()
            self._sleep(POLL_SECONDS)
        raise Retryable(
            f"The coordinator did not confirm in time which ranks continue the run; {self.me} waited for it. "
            "The host of the coordinator is unreachable, or its rank is not running. To see which: "
            "ansible-playbook status.yml"
        )

    def _left_out(self) -> Retryable:
        text = (
            f"The other ranks continue without {self.me}, which did not answer or was not ready in time. Its "
            "unit restarts, and it joins them again. No action is needed."
        )
        return Retryable(text)

    def _is_in(self, view: View) -> bool:
        return view.has(self.me.number, self.me.incarnation)

    def _read(self, key: str) -> View | None:
        text = self._keys.get(key)
        return View.load(text) if text else None

    def _raise_if_refused(self) -> None:
        if text := self._keys.get(f"refused/{self.me.number}"):
            incarnation, sentence = json.loads(text)
            if incarnation == self.me.incarnation:
                raise Final(f"The run continues without this host: {sentence}")
        if text := self._keys.get("ended"):
            raise _end_of(*json.loads(text))


def _plain(member: Member) -> Mapping[str, object]:
    return {
        "number": member.number,
        "incarnation": member.incarnation,
        "record": member.record.__dict__,
    }


def _end_of(outcome: str, reason: str) -> RunEnd:
    kinds: Mapping[str, type[RunEnd]] = {"final": Final, "retryable": Retryable}
    return kinds.get(outcome, Stopped)(f"The run has ended: {reason}")
