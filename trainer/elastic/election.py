"""The rule by which the hosts of an elastic run elect the coordinator. It uses no sockets and no files.

    election = Election(me=1, hosts=3, quorum=2, term=0)
    election.asked(notice)            # another host has asked this one
    election.answered(notice)         # another host has answered this one
    election.lost(host)               # another host has ended or is silent
    election.decide()                 # None until there is a coordinator

A term is the time under one coordinator. Terms have numbers that only grow. The coordinator of the term T is
the host with the index T mod N of N hosts, as in Viewstamped Replication (Liskov and Cowling,
MIT-CSAIL-TR-2012-021). A host writes the number of a term to its disk before it takes part in that term, and
never takes part in a lower term.

With three or more hosts, a run cannot split into two that train different steps, because a view, the list of
members, needs a majority of the hosts in the same term (agreement.py). Two majorities have a host in common.
Once that host is in the higher term, no view of the lower term can be committed, and no step can be trained
in it. With two hosts, one is enough: if they lose their connection, both may train, until the host in the
lower term joins the other. The rule in this module only decides which host tries to coordinate; a wrong
decision costs time and nothing else.

Hosts without a coordinator ask each other several times a second. Each host supports one host: the first one,
from the last coordinator on, that answers and to which a quorum of hosts (agreement.py) has a connection. A
host that a quorum supports coordinates the next term T for which T mod N is its index. In the first
GRACE_SECONDS of an election, the hosts support only the last coordinator, unless it has ended or was silent
before. The first election of a run elects the host with the index 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

FRESH_SECONDS = 3.0  # how long a notice counts
GRACE_SECONDS = 1.0  # for the last coordinator to answer: perhaps only a connection to it was lost
HEARD_SECONDS = 2.0  # for the answer of a majority, before one of two hosts may coordinate by itself
NONE = -1  # the term before the first one


@dataclass(frozen=True)
class Notice:
    """The message that a host sends to each other host in an election.

    host: index of the sender in the list of hosts.
    term: the highest term in which the sender takes or took part in training; NONE before the first.
    known: the highest term of which the sender has learned.
    seen: indices of the sender and of the hosts that have asked the sender in the last FRESH_SECONDS.
    supports: index of the host that the sender wants as the coordinator; None if there is no such host, or if
        the sender has a coordinator already.
    port: port of the sender's rendezvous store, if the sender is the coordinator of `term`; else 0.
    """

    host: int
    term: int
    known: int
    seen: tuple[int, ...] = ()
    supports: int | None = None
    port: int = 0

    @classmethod
    def load(cls, values: dict[str, Any]) -> Notice:
        """The notice whose fields are in the dict `values`.

        Raises LookupError, TypeError or ValueError if a field is missing or invalid.
        """
        supports = values["supports"]
        return cls(
            int(values["host"]),
            int(values["term"]),
            int(values["known"]),
            tuple(int(each) for each in values["seen"]),
            None if supports is None else int(supports),
            int(values["port"]),
        )


class Elected(NamedTuple):
    """The result of an election.

    term: the number of the term. host: index of the host that is its coordinator. port: port of the
    coordinator's rendezvous store; 0 if this host is the coordinator and has yet to open the store.
    """

    term: int
    host: int
    port: int


class Election:
    """One election on one host: the notices of the other hosts, and the rule that finds the coordinator.

    me: index of this host in the list of hosts. hosts: number of hosts.
    quorum: the number of hosts that a coordinator needs, its own included.
    term: the term on the disk of this host, or NONE; after `decide` has found a coordinator, its term.
    known: the highest term of which this host has learned.
    previous: on the coordinator, the value of `known` before it was elected.
    port: port of this host's rendezvous store, if this host is the coordinator; else 0.
    is_over: whether `decide` has found a coordinator.
    When `decide` returns a coordinator, the caller writes the term to the disk before it takes part in it.
    """

    def __init__(
        self,
        me: int,
        hosts: int,
        quorum: int,
        term: int = NONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me, self._hosts, self._quorum = me, hosts, quorum
        self.term = self.known = self.previous = term
        self.port = 0  # of the store of this host, once it coordinates the term
        self.is_over = False
        self._clock, self._began = clock, clock()
        self._asked: dict[int, tuple[float, Notice]] = {}
        self._answered: dict[int, tuple[float, Notice]] = {}
        self._lost: set[int] = set()

    # -- what this host learns -------------------------------------------------------------------------

    def asked(self, notice: Notice) -> None:
        """Record the notice in the question of another host, which can therefore connect to this host."""
        self._asked[notice.host] = self._clock(), notice
        self.known = max(self.known, notice.term, notice.known)

    def answered(self, notice: Notice) -> None:
        """Record the notice in the answer of another host, to which this host can therefore connect."""
        self._answered[notice.host] = self._clock(), notice
        self.known = max(self.known, notice.term, notice.known)

    def lost(self, host: int) -> None:
        """Record that a host has ended or is silent.

        If it is the last coordinator, the hosts need not wait GRACE_SECONDS for it.
        """
        self._lost.add(host)

    def notice(self) -> Notice:
        """The notice that this host sends to the others now."""
        supports = None if self.is_over else self._supported()
        return Notice(self.me, self.term, self.known, tuple(self.seen()), supports, self.port)

    def seen(self) -> list[int]:
        """Indices of this host and of the hosts that have asked it in the last FRESH_SECONDS, sorted."""
        return sorted({self.me, *self._fresh(self._asked)})

    def reached(self) -> list[int]:
        """Indices of this host and of the hosts that have answered it in the last FRESH_SECONDS, sorted."""
        return sorted({self.me, *self._fresh(self._answered)})

    def _fresh(self, notices: dict[int, tuple[float, Notice]]) -> dict[int, Notice]:
        now = self._clock()
        return {host: each for host, (at, each) in list(notices.items()) if now - at <= FRESH_SECONDS}

    @property
    def coordinator(self) -> int:
        """Index of the host that coordinates the highest term of which this host has learned."""
        return max(self.known, 0) % self._hosts

    # -- what it decides -------------------------------------------------------------------------------

    def decide(self, term: int | None = None) -> Elected | None:
        """The elected coordinator; None while there is none.

        term: on a rank that is not the first rank of its host, the term of the first rank: the result is then
        the coordinator of this term or None. None on first ranks.

        The result is the host that has answered as the coordinator of the highest term in the last
        FRESH_SECONDS, if that term is not below the attribute `term`. Else it is this host, if a quorum of
        hosts supports this host, and a majority of the hosts has answered or HEARD_SECONDS have passed; both
        counts include this host. Sets the attributes `term`, to the term of the coordinator, `known`,
        `previous` and `is_over`.
        """
        if term is not None:
            self.known = max(self.known, term)
        leaders = [
            each
            for each in self._fresh(self._answered).values()
            if each.port and each.term >= max(self.term, 0) and each.term % self._hosts == each.host
            if term in (None, each.term)
        ]
        if leaders:
            leader = max(leaders, key=lambda each: each.term)
            return self._elect(Elected(leader.term, leader.host, leader.port))
        has_quorum = self._supported() == self.me and len(self._supporters()) >= self._quorum
        # Of two hosts one is a quorum: it first waits for the answer of the other one, which may coordinate.
        is_heard = len(self.reached()) > self._hosts // 2 or not self._is_before(HEARD_SECONDS)
        if has_quorum and is_heard:
            return self._elect(Elected(self._next_term(), self.me, 0))
        return None

    def _elect(self, elected: Elected) -> Elected:
        self.term, self.previous, self.is_over = elected.term, self.known, True
        self.known = max(self.known, self.term)
        return elected

    def _next_term(self) -> int:
        """The lowest term above all known ones whose coordinator is this host."""
        return self.known + 1 + (self.me - self.known - 1) % self._hosts

    def _is_before(self, seconds: float) -> bool:
        return self._clock() - self._began < seconds

    def _supporters(self) -> list[int]:
        fresh = self._fresh(self._asked).values()
        return [self.me, *(each.host for each in fresh if each.supports == self.me)]

    def _supported(self) -> int | None:
        """Index of the host that this host supports: the first one to which a quorum of hosts can connect.

        The search begins at the coordinator of the highest known term. None if there is no such host.
        """
        last = self.coordinator
        only_last = self.known == NONE or (self._is_before(GRACE_SECONDS) and last not in self._lost)
        answers = self._fresh(self._answered)
        for place in range(1 if only_last else self._hosts):
            host = (last + place) % self._hosts
            if host == self.me:
                seen = set(self.seen())
            elif host in answers:
                seen = {host, *answers[host].seen}
            else:
                continue
            if self.me in seen and len(seen) >= self._quorum:
                return host
        return None
