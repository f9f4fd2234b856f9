"""The thread of a rank that looks for lost members; on the coordinator, also for ranks that join or leave.

watch = MemberWatch(env, keys, log, end_process)
watch.view = ...                        # the newest view, after each agreement
watch.start(age)
watch.interruption(watch.view)          # why the members no longer wait for each other
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection

import torch.distributed as dist

from trainer.distributed.rendezvous import open_store
from trainer.elastic.agreement import ADDED_RANKS, Coordinator
from trainer.elastic.candidacy import Candidacy
from trainer.elastic.keys import Member, StoreKeys, View
from trainer.elastic.signed import SignedKeys
from trainer.elastic.store_watch import LOST_STORE_SECONDS
from trainer.health.diagnosis import EndpointResult
from trainer.health.endpoint import EndpointAddress, query
from trainer.host.logger import RunLogger, fields
from trainer.host.rank_env import RankEnv
from trainer.outcome import Retryable

WATCH_SECONDS = 0.25
LOOK_SECONDS = 2.0  # from one look at all requests to the next, if no rank has made one
LATE_SECONDS = 2.0  # without a status, which comes every second: the member is queried
SILENT_SECONDS = 3.0  # without a status: a member that does not answer is lost
QUERY_SECONDS = 1.0
REQUESTS = "requests"
LATE = "still computes a step that the others completed more than local_grace seconds ago"
LONGER = "To wait longer, stop the run and start it with -e local_grace=SECONDS."
SUPERSEDED = (
    "The other hosts have elected another coordinator. This host is no longer the coordinator and continues "
    "under the new one. No action is needed."
)


class MemberWatch:
    """Looks for lost members and, on the coordinator, for ranks that ask to join or leave.

    view: the newest view; not set before the first one.
    coordinator: on the coordinator, the object that proposes and commits views; else None.
    send_state: on the coordinator, with sync=local, function that sends the shared state (prefetch.py) to a
        rank that has asked for it; its argument is a store by which the two ranks connect. Else None.
    wants_change: whether a rank asks to join or leave.
    stopped: event that `stop` sets. The threads that watch the members and the rendezvous store then end.
    """

    view: View

    def __init__(
        self,
        env: RankEnv,
        keys: SignedKeys,
        log: RunLogger,
        end_process: Callable[[Retryable], None],
        candidacy: Candidacy | None = None,
    ) -> None:
        """Prepare to watch; `start` starts the thread.

        env, log: of this rank. keys: its signed keys. end_process: function that ends this process with the
        outcome and reason in its argument; the thread calls it. candidacy: the elections, with
        coordinator_failover; else None.
        """
        self._env, self._keys, self._log = env, keys, log
        self._end_process, self._candidacy = end_process, candidacy
        self.coordinator: Coordinator | None = None
        self.send_state: Callable[[dist.Store], None] | None = None
        self.wants_change = False
        self.stopped = threading.Event()
        self._age: Callable[[int], float | None] = lambda number: None
        self._late: Callable[[], Collection[int]] = lambda: ()
        self._join_grace = math.inf
        self._fetched: set[str] = set()  # tokens of ranks to which the shared state was sent
        self._broken = 0, ""  # the last generation whose members no longer wait for each other, and why
        self._suspects: set[tuple[int, int]] = set()  # number and incarnation of members that may be lost
        # Since when the members wait for which new ones.
        self._joining: tuple[float, Collection[Member]] = 0.0, ()
        self._looked = -math.inf, (0, 0)  # time of the last look at all requests; their number, the view

    def start(
        self,
        age: Callable[[int], float | None],
        late: Callable[[], Collection[int]] = lambda: (),
        join_grace: float = math.inf,
    ) -> None:
        """Start the thread.

        age: returns the seconds since the last run status of the rank with this number; None before its first
        run status. late: returns the numbers of the ranks that compute a step for so long that the other
        members need not wait for them. join_grace: seconds after which the other members no longer wait for a
        rank that joins.
        """
        self._age, self._late, self._join_grace = age, late, join_grace
        threading.Thread(target=self._watch, name="membership", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread. If it waits for the rendezvous store, it may remain."""
        self.stopped.set()
        self.send_state = None

    # -- what the training thread asks and reports -----------------------------------------------------

    def interruption(self, view: View) -> str:
        """Why the members of `view` no longer wait for each other, a sentence; "" while they do."""
        generation, reason = self._broken
        return reason if generation == view.generation else ""

    def break_off(self, view: View, reason: str) -> None:
        """End the waits of the training thread for other members, unless there is a newer view than `view`.

        reason: why, a sentence. Any thread may call this.
        """
        if self._broken[0] < view.generation:
            self._broken = view.generation, reason

    def begin_join(self, joining: Collection[Member]) -> None:
        """Measure from now how long the members wait for the new members `joining`."""
        self._joining = time.monotonic(), joining

    def end_join(self) -> None:
        """Stop the measurement that `begin_join` started: the new members can train now."""
        self._joining = 0.0, ()

    @property
    def is_superseded(self) -> bool:
        """On the coordinator, whether other hosts have elected another one."""
        return bool(self.coordinator and self._candidacy and self._candidacy.newer_term)

    def is_dead(self, member: Member) -> bool:
        """Whether a member cannot be in the next view.

        True if the thread has found the member lost, late or slow to join, if the member sends no status and
        does not answer a query, or if its health endpoint refuses the connection.
        """
        suspected = (member.number, member.incarnation) in self._suspects
        return suspected or self._is_silent(member) or self._query(member) == EndpointResult.REFUSES

    # -- the thread ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        keys = None
        while not self.stopped.wait(WATCH_SECONDS):
            view = self.view
            try:
                if keys is None:
                    keys = self._keys.over(StoreKeys(open_store(self._env, seconds=LOST_STORE_SECONDS / 2)))
                if broken := keys.get(f"broken/{view.generation}"):
                    self.break_off(view, broken)
                if self.coordinator:
                    has_requests = self._has_requests(view, keys)
                    self._look(view, self.coordinator, has_requests)
                    if has_requests:
                        self._serve(view, keys)
                    if self.is_superseded:
                        self.break_off(view, SUPERSEDED)
            except RuntimeError:
                keys = None

    def _has_requests(self, view: View, keys: SignedKeys) -> bool:
        """On the coordinator, whether to read the requests of all ranks now.

        True if a rank has made a request, if the view is new, or if the last look was LOOK_SECONDS ago. To
        read them each time would take 1 % of a core: there is a key for each rank and request.
        """
        now, found = time.monotonic(), (keys.add(REQUESTS, 0), view.generation)
        is_due = now - self._looked[0] >= LOOK_SECONDS or self._looked[1] != found
        if is_due:
            self._looked = now, found
        return is_due

    def _look(self, view: View, coordinator: Coordinator, has_requests: bool) -> None:
        """On the coordinator, look for members that are lost or leave, and for ranks that ask to join."""
        replaced = coordinator.replaced(view) if has_requests else []
        silent = [member for member in view.members if self._is_silent(member)]
        numbers = self._late()
        late = [member for member in view.members if member.number in numbers]
        others = [*replaced, *silent, *late]
        suffices = coordinator.suffices(member for member in view.members if member not in others)
        if self._env.rank in numbers and suffices and self._candidacy:
            self._end_process(Retryable(f"This rank {LATE}, so they elect another coordinator. {LONGER}"))
        if self._env.rank in numbers or not suffices:
            late = []  # the run could not continue without them
        for members, why in (
            (replaced, "has started again."),
            (silent, "sends no status, and its health endpoint does not answer."),
            (late, f"{LATE}, so they continue without it. {LONGER}"),
            self._slow_joiners(coordinator),
        ):
            if members:
                self._suspects |= {(member.number, member.incarnation) for member in members}
                self.break_off(view, f"{', '.join(map(str, members))} {why}")
        if has_requests and view is self.view:  # the members may have changed while hosts were queried
            self.wants_change = bool(coordinator.leavers(view) or coordinator.applicants(view.members))

    def _slow_joiners(self, coordinator: Coordinator) -> tuple[Collection[Member], str]:
        """The new members for which the others have waited longer than join_grace, and a reason as text."""
        began, joining = self._joining
        waited = time.monotonic() - began
        if not joining or waited <= self._join_grace:
            return (), ""
        minutes = coordinator.postpone(joining, waited) / 60
        return joining, (
            f"has not received the state of the run within {waited:.0f} s (join_grace), while the others "
            "waited: its link is slow, or its host is busy. They continue without it, and it may join again "
            f"in {minutes:.0f} min. To give it longer, stop the run and start it with -e join_grace=SECONDS."
        )

    def _serve(self, view: View, keys: SignedKeys) -> None:
        """On the coordinator, start to send the shared state to ranks that have asked for it."""
        if self.send_state is None:
            return
        for number in set(range(self._env.world_size + ADDED_RANKS)) - set(view.numbers):
            token = keys.get(f"fetch/{number}")
            if token and token not in self._fetched:
                self._fetched.add(token)
                threading.Thread(
                    target=self._send_to, args=(number, token), name="fetch", daemon=True
                ).start()

    def _send_to(self, number: int, token: str) -> None:
        try:
            store = open_store(self._env, seconds=LOST_STORE_SECONDS / 2)
            if self.send_state:
                self.send_state(dist.PrefixStore(f"fetch/{token}", store))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            text = (
                f"The shared state could not be sent to rank {number} in advance ({reason}). The rank "
                "receives it when it joins, and the other ranks wait meanwhile. No action is needed."
            )
            self._log.warning(text, extra=fields("fetch", rank=number))

    def _is_silent(self, member: Member) -> bool:
        if member.number == self._env.rank or (self._age(member.number) or 0.0) < LATE_SECONDS:
            return False
        result = self._query(member)
        age = self._age(member.number) or 0.0  # a status may have arrived meanwhile
        is_silent = age >= SILENT_SECONDS and result != EndpointResult.ANSWERS
        return is_silent or (result == EndpointResult.REFUSES and age >= LATE_SECONDS)

    def _query(self, member: Member) -> EndpointResult:
        address = EndpointAddress.parse(member.record.endpoint)
        return query(address, False, QUERY_SECONDS).result if address else EndpointResult.UNKNOWN
