"""The members of an elastic run as a rank sees them: who takes part, who is lost, who asks to join.

membership = Membership(env, run_id, log, end_process)
view = membership.join(record, min_hosts, is_loading)    # the first view with this rank
group = ...                                              # a process group of the members of the view
membership.watch(age)                                    # a thread that looks for losses and applicants
group.interruption = membership.interruption             # ends the waits for a member that is lost
view = membership.change(60)                             # agree on the next view; then connect again
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch.distributed as dist

from trainer.distributed.consistency import Record
from trainer.distributed.process_group import PeerLost
from trainer.distributed.rendezvous import JOIN_SECONDS, no_store, open_store, prefix_of
from trainer.elastic.agreement import READY_SECONDS, VIEW_SECONDS, Coordinator, Follower
from trainer.elastic.candidacy import Candidacy
from trainer.elastic.keys import Member, StoreKeys, View
from trainer.elastic.member_watch import REQUESTS, SUPERSEDED, MemberWatch
from trainer.elastic.signed import SignedKeys, read_secret
from trainer.elastic.store_watch import LOST_STORE_SECONDS, StoreWatch
from trainer.host.logger import RunLogger, fields
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final, Retryable

FAREWELL_SECONDS = 0.5
CONNECT_SECONDS = 10.0  # for all members of a view to be about to connect
POLL_SECONDS = 0.02
LOST_STORE = (
    f"The coordinator is lost: its rendezvous store has not answered for {LOST_STORE_SECONDS:.0f} s. "
    "Its host is off, asleep or cut off, or its rank is frozen."
)


class Membership:
    """The members of an elastic run as this rank sees them; methods to join, to change them and to leave.

    view: the newest view (list of members) that has this rank.
    env: the environment of this rank. env.rank is its number, not its rank in the view (see keys.py).
    store: the rendezvous store.
    left: event that is set when this member may end.
    """

    view: View

    def __init__(
        self,
        env: RankEnv,
        run_id: str,
        log: RunLogger,
        end_process: Callable[[Retryable], None],
        candidacy: Candidacy | None = None,
    ) -> None:
        """Connect to the rendezvous store, which the coordinator opens.

        env, run_id, log: of this rank. end_process: function that ends this process with the outcome and
        reason in its argument; another thread calls it. candidacy: with coordinator_failover, the elections,
        after a coordinator is elected; else None. Raises RunEnd if the store does not answer or this rank may
        not take part; ConfigError if the secret of the fleet cannot be read.
        """
        self.env, self._log, self._candidacy, self._end_process = env, log, candidacy, end_process
        secret = read_secret()
        try:
            if candidacy and candidacy.store:
                self.store: dist.Store = dist.PrefixStore(prefix_of(env), candidacy.store)
            else:
                self.store = open_store(env, is_master=env.is_coordinator)
        except (RuntimeError, ValueError) as error:
            raise no_store(env, JOIN_SECONDS, error) from None
        self._keys = self._open_keys(secret, run_id)
        self._coordinator: Coordinator | None = None
        self._follower: Follower | None = None
        self._kind = ""  # the device kind of the run
        self._watch = MemberWatch(env, self._keys, log, end_process, candidacy)
        self._uses_store = False  # whether the training thread uses the store, and may wait for it for ever
        self._leaving = threading.Event()
        self.left = threading.Event()  # set when this member may end
        stopped = self._watch.stopped
        self._store_watch = None if env.is_coordinator else StoreWatch(env, self._lose_store, stopped)

    def _open_keys(self, secret: bytes, run_id: str) -> SignedKeys:
        """The signed keys of this rank. Raises RunEnd if it may not take part."""
        keys, term = StoreKeys(self.store), str(self._candidacy.election.term) if self._candidacy else ""
        try:
            if self.env.is_coordinator:
                return SignedKeys.announce(keys, secret, run_id, self._warn, term)
            return SignedKeys.accept(keys, secret, run_id, self.env.rank, self._warn, term=term)
        except RuntimeError as error:
            raise no_store(self.env, JOIN_SECONDS, error) from None

    def _warn(self, key: str, text: str) -> None:
        self._log.warning(text, extra=fields("message without effect", key=key))

    # -- the agreement, on the main thread -------------------------------------------------------------

    def join(self, record: Record, min_hosts: int, is_loading: Callable[[int], bool], kind: str = "") -> View:
        """Become a member of the next view; returns the view.

        The coordinator waits for the other ranks and proposes the view. Any other rank asks to join, and
        waits until it is admitted. record: the consistency record of this rank. min_hosts: the setting of
        this name; with elections, their quorum is used instead. is_loading: returns whether the rank with
        this number still loads. kind: the device kind of the run if it is decided already: "cpu" on a
        coordinator that continues a run from the state in its memory; else "". Raises RunEnd if this rank
        cannot become a member; RunEnd or RuntimeError if the store is lost.
        """
        number = self.env.rank
        me = Member(number, self._keys.add(f"incarnation/{number}", 1), record)
        if self.env.is_coordinator:
            candidacy, self._kind = self._candidacy, kind
            needed = candidacy.quorum if candidacy else min_hosts
            self._coordinator = self._watch.coordinator = Coordinator(
                self._keys,
                me,
                self.env.world_size,
                needed,
                is_replaced=(lambda: candidacy.newer_term) if candidacy else None,
                voting=self.env.voting,
            )
            expected = candidacy.expected() if candidacy else None
            self.view = self._coordinator.first_view(is_loading, expected, kind)
        else:
            self._follower = Follower(self._keys, me)
            self._follower.ask()
            self._keys.add(REQUESTS, 1)
            self.view = self._guard(lambda follower: follower.follow(0, None))
        self._watch.view = self.view
        return self.view

    def fetch(self) -> dist.Store | None:
        """Ask the coordinator to send the shared state (prefetch.py) before this rank joins.

        Returns a store by which this rank and the coordinator connect for the transfer; None if the run has
        no view yet, so that it does not train. Raises RuntimeError if the rendezvous store is lost.
        """
        if not self._keys.get("committed"):
            return None
        token = secrets.token_hex(8)
        self._keys.set(f"fetch/{self.env.rank}", token)
        self._keys.add(REQUESTS, 1)
        return dist.PrefixStore(f"fetch/{token}", self.store)

    def change(self, seconds: float, leaving: Collection[int] | None = None) -> View:
        """Agree with the other members on the next view, after a step or a loss; returns that view.

        seconds: the longest wait for a member that still computes and answers; at least READY_SECONDS.
        leaving: on the coordinator, the members that leave now, by rank in the current view; None: all that
        have announced it. Raises Retryable if this rank is not in the next view, if too few hosts remain, or
        if the coordinator is lost or replaced; Final, Retryable or Stopped if the run has ended.
        """
        seconds = max(READY_SECONDS, seconds)
        with self._using_store():
            return self._change(seconds, leaving)

    def _change(self, seconds: float, leaving: Collection[int] | None) -> View:
        before = self.view
        if self._coordinator:
            view = replace(before, kind=self._kind)
            if self.is_superseded:
                raise Retryable(SUPERSEDED)
            self.end_join()
            numbers = None if leaving is None else [before.numbers[rank] for rank in leaving]
            self.view = self._coordinator.next_view(view, self._watch.is_dead, seconds, numbers)
            self._watch.begin_join(_additional(self.view, before))
        else:
            self._guard(lambda follower: follower.ready(before.generation))
            self.view = self._guard(
                lambda follower: follower.follow(before.generation, seconds + VIEW_SECONDS)
            )
        self._watch.view, self._watch.wants_change = self.view, False
        self._report(before)
        return self.view

    @property
    def is_store_lost(self) -> bool:
        """Whether the store has not answered for LOST_STORE_SECONDS. False on the coordinator."""
        return self._store_watch is not None and self._store_watch.is_lost

    @contextlib.contextmanager
    def _using_store(self) -> Iterator[None]:
        """Context in which the training thread uses the store. Raises Retryable if the store is lost."""
        if self.is_store_lost:
            raise Retryable(LOST_STORE)
        self._uses_store = True
        try:
            yield
        finally:
            self._uses_store = False

    @property
    def is_superseded(self) -> bool:
        """On the coordinator, whether other hosts have elected another one."""
        return self._watch.is_superseded

    def wait_to_connect(self) -> None:
        """Wait until all members of the view are about to connect to each other, CONNECT_SECONDS at most.

        If a member is lost meanwhile, the wait ends as soon as the loss is noticed; Gloo, which connects the
        members, would wait several seconds more. Raises PeerLost if a member is lost or not about to connect
        in time, or if the rendezvous store does not answer.
        """
        generation, began = self.view.generation, time.monotonic()
        waiting = {member.number: member for member in self.view.members}
        try:
            store = StoreKeys(open_store(self.env, seconds=LOST_STORE_SECONDS / 2))
            keys = self._keys.over(store)
            keys.set(f"connecting/{generation}/{self.env.rank}", "here")
            while waiting := {
                n: m for n, m in waiting.items() if not keys.get(f"connecting/{generation}/{n}")
            }:
                if reason := self.interruption():
                    raise PeerLost(reason)
                if time.monotonic() - began > CONNECT_SECONDS:
                    names = ", ".join(map(str, waiting.values()))
                    raise PeerLost(f"{names} did not connect within {CONNECT_SECONDS:.0f} s.")
                time.sleep(POLL_SECONDS)
        except RuntimeError as error:
            raise PeerLost(f"The rendezvous store does not answer ({str(error).splitlines()[0]}).") from None

    def break_off(self, reason: str) -> None:
        """Announce to the other members that this rank no longer waits for them. reason: why, a sentence."""
        self._watch.break_off(self.view, reason)
        with contextlib.suppress(RuntimeError, Retryable), self._using_store():
            self._keys.set(f"broken/{self.view.generation}", self.interruption())

    def end_join(self) -> None:
        """Stop measuring how long the members wait for new members: the new members can train now."""
        self._watch.end_join()

    def why_broken_off(self) -> str:
        """The reason for which a member called `break_off` in the current view; "" if none did."""
        with contextlib.suppress(RuntimeError, Retryable), self._using_store():
            return self._keys.get(f"broken/{self.view.generation}")
        return ""

    @property
    def is_first(self) -> bool:
        """Whether the ranks start from a checkpoint or from step 0 with the current view.

        If not, this rank has joined a run that trains, or the run continues from state in memory.
        """
        return not self.view.kind

    def decide_kind(self, kind: str) -> str:
        """The device kind of the run: `kind` in the first view, later the kind that was decided then.

        kind: "cpu" or "cuda". Raises Final if it is "cuda" in the first view: elastic runs compute on CPUs.
        """
        if self.view.kind:
            return self.view.kind
        if kind != "cpu":
            raise Final(
                "elastic is true and the ranks would compute on GPUs, but an elastic run computes on CPUs "
                "only. Set elastic to false to use the GPUs, or device to cpu: with the playbooks "
                "-e elastic=false or -e device=cpu, by hand --elastic false or --device cpu."
            )
        if self._coordinator:
            self._kind = kind
        return kind

    def end(self, outcome: str, reason: str) -> None:
        """On the coordinator, announce the end of the run to the ranks that wait to join.

        outcome: finished, stopped, retryable or final. reason: a sentence.
        """
        if self._coordinator:
            with contextlib.suppress(RuntimeError):
                self._coordinator.end(outcome, reason)
                time.sleep(FAREWELL_SECONDS)  # the store ends with this process

    def _guard(self, call: Callable[[Follower], View | None]) -> View:
        assert self._follower is not None
        try:
            return call(self._follower) or self.view
        except RuntimeError as error:
            raise lost_store(error) from None

    def _report(self, before: View) -> None:
        gone, new = (
            list(map(str, _additional(*views))) for views in ((before, self.view), (self.view, before))
        )
        parts = [f"without {', '.join(gone)}"] if gone else []
        parts += [f"with {', '.join(new)}"] if new else []
        hosts = len({each.record.host for each in self.view.members})
        text = " and ".join(parts) or "with the same ranks"
        self._log.info(
            f"The run continues {text}: {len(self.view.members)} rank(s) on {hosts} host(s).",
            extra=fields("membership", generation=self.view.generation, gone=gone, new=new, hosts=hosts),
        )

    # -- what other threads and the training loop ask ---------------------------------------------------

    def interruption(self) -> str:
        """Why the members no longer wait for each other, a sentence; "" while they do."""
        return self._watch.interruption(self.view)

    @property
    def wants_change(self) -> bool:
        """Whether the members should change after this step.

        True if a rank asks to join or leave, this rank ends, or the hosts have elected another coordinator.
        """
        return self._watch.wants_change or self._leaving.is_set() or self.is_superseded

    @property
    def is_leaving(self) -> bool:
        """Whether this rank ends after the next change of the members."""
        return self._leaving.is_set()

    def leave(self, seconds: float) -> bool:
        """Ask to end this rank after the present step, and wait until it may end.

        Call this on another thread than the training thread. Returns True when the other ranks can continue
        without this one; False if that takes longer than `seconds` or the store is lost. Also False on the
        coordinator of a run without coordinator_failover, and if the members are on one host only.
        """
        hosts = {member.record.host for member in self.view.members} if hasattr(self, "view") else set()
        if len(hosts) == 1:
            return False
        if self._follower is None:
            if self._candidacy is None or not hosts:
                return False
            self._leaving.set()
            return self.left.wait(seconds)
        with contextlib.suppress(RuntimeError):
            keys = self._keys.over(StoreKeys(open_store(self.env, seconds=LOST_STORE_SECONDS)))
            Follower(keys, self._follower.me).leave()
            keys.add(REQUESTS, 1)
            self._leaving.set()
            return self.left.wait(seconds)
        return False

    # -- the watch -------------------------------------------------------------------------------------

    def watch(
        self,
        age: Callable[[int], float | None],
        late: Callable[[], Collection[int]] = lambda: (),
        join_grace: float = math.inf,
        send_state: Callable[[dist.Store], None] | None = None,
    ) -> None:
        """Start the thread that finds lost members and ranks that ask to join or leave.

        age, late, join_grace: as for MemberWatch.start. send_state: as in MemberWatch.
        """
        self._watch.send_state = send_state
        self._watch.start(age, late, join_grace)

    def stop(self) -> None:
        """Stop the threads that watch the members and the store.

        A thread that waits for the store may remain.
        """
        self._watch.stop()

    def _lose_store(self) -> None:
        """End the waits for other members, because the store does not answer.

        Ends this process if its training thread waits for the store, or if this rank is no member yet.
        """
        if hasattr(self, "view"):
            self._watch.break_off(self.view, LOST_STORE)
        if self._uses_store or not hasattr(self, "view"):
            self._end_process(Retryable(LOST_STORE))


def _additional(view: View, other: View) -> list[Member]:
    """The members of `view` that `other` does not have."""
    return [each for each in view.members if not other.has(each.number, each.incarnation)]


def lost_store(error: RuntimeError) -> Retryable:
    """The exception that ends an attempt because the rendezvous store was lost. error: that of the store."""
    return Retryable(
        "The rendezvous store was lost: rank 0 or its host has ended, or the network was interrupted "
        f"({str(error).splitlines()[0]})."
    )
