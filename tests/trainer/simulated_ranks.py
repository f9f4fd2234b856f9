"""Ranks of an elastic run in one process with virtual time, for the tests of the agreement on members.

Every rank is a thread, of which one runs at a time: the one whose virtual time is the lowest. A sleep passes
the turn. All draws come from one seed, so a simulation repeats exactly.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.distributed.consistency import Record
from trainer.elastic.agreement import ACCEPT_SECONDS, READY_SECONDS, Coordinator, Follower
from trainer.elastic.keys import Member, View
from trainer.outcome import Final, Retryable

LONGEST_DELAY = 0.4  # of a message, in seconds
DETECT_SECONDS = 5.0  # until the coordinator suspects a member that is silent
WATCH_SECONDS = 0.5
RESTART_SECONDS = 6.0  # until the unit starts a rank again


class Ended(BaseException):
    """Ends the thread of a process that is dead, or of a simulation that is over."""


@dataclass
class Process:
    """One process of the rank `number`. From `frozen_since` to `frozen_until` it does not run."""

    number: int
    differs: bool = False  # whether its record differs from those of the others
    never_accepts: bool = False
    incarnation: int = 0
    died_at: float | None = None
    frozen_since: float = 0.0
    frozen_until: float = 0.0
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class Simulation:
    """The clock, the store and the processes. `history` has all committed views with their times."""

    seed: int
    world_size: int
    now: float = 0.0
    values: dict[str, str] = field(default_factory=dict)
    history: list[tuple[float, View]] = field(default_factory=list)
    changes: list[tuple[float, float, int]] = field(default_factory=list)  # start, end, proposals that failed
    processes: list[Process] = field(default_factory=list)
    current: dict[int, Process] = field(default_factory=dict)  # number -> its newest process
    members: dict[tuple[int, int], Process] = field(default_factory=dict)  # by number and incarnation
    refused: list[str] = field(default_factory=list)
    seen: list[tuple[int, View]] = field(default_factory=list)  # number, view that it returned from follow
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._queue: list[tuple[float, int, Process | None, Callable[[], None] | None]] = []
        self._counter = 0
        self._main = threading.Semaphore(0)
        self._writes: list[tuple[float, int, Process, str, str]] = []
        self._last_write: dict[int, float] = {}
        self._over = False
        self._threads: list[threading.Thread] = []

    # -- time ------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at a time, between the turns of processes."""
        self._push(when, None, action)

    def run(self, seconds: float) -> None:
        """Run until a time, then end all processes. Raises what a process has raised."""
        self.at(seconds, self._finish)
        self._next()
        self._main.acquire()
        for process in self.processes:
            process.turn.release()
        for thread in self._threads:
            thread.join(10)
        if self.failures:
            raise self.failures[0]

    def sleep(self, process: Process, seconds: float) -> None:
        """Pass the turn for some virtual time. Raises Ended if the process dies meanwhile."""
        self._push(self.now + seconds, process, None)
        self._next()
        process.turn.acquire()
        while not self._is_ended(process) and process.frozen_until > self.now:
            self._push(process.frozen_until, process, None)
            self._next()
            process.turn.acquire()
        if self._is_ended(process):
            raise Ended

    def _is_ended(self, process: Process) -> bool:
        return self._over or process.died_at is not None

    def _push(self, when: float, process: Process | None, action: Callable[[], None] | None) -> None:
        self._counter += 1
        heapq.heappush(self._queue, (when, self._counter, process, action))

    def _next(self) -> None:
        """Give the turn to whatever is first in time."""
        while not self._over:
            self.now, _, process, action = heapq.heappop(self._queue)
            if process is not None:
                process.turn.release()
                return
            assert action is not None
            action()
        self._main.release()

    def _finish(self) -> None:
        self._over = True

    # -- processes -------------------------------------------------------------------------------------

    def start(self, number: int, body: Callable[[Process], None], **traits: bool) -> Process:
        """Start a process of a rank; `body` is what it does."""
        process = Process(number, **traits)
        self.processes.append(process)
        self.current[number] = process

        def main() -> None:
            process.turn.acquire()
            try:
                if not self._is_ended(process):
                    body(process)
            except Ended:
                pass
            except BaseException as error:
                self.failures.append(error)
                self._over = True
            if process.died_at is None:
                process.died_at = self.now
            if not self._over:
                self._next()
            elif self.failures:
                self._main.release()

        thread = threading.Thread(target=main, daemon=True)
        self._threads.append(thread)
        thread.start()
        self._push(self.now, process, None)
        return process

    def kill(self, process: Process) -> None:
        """End a process now. Of its writes that have not arrived, the last ones are lost."""
        if process.died_at is None:
            process.died_at = self.now
            pending = sorted(write for write in self._writes if write[2] is process)
            kept = pending[: self.random.randint(0, len(pending))]
            self._writes = [write for write in self._writes if write[2] is not process or write in kept]
            heapq.heapify(self._writes)

    def freeze(self, process: Process, seconds: float) -> None:
        process.frozen_since, process.frozen_until = self.now, self.now + seconds

    # -- the store -------------------------------------------------------------------------------------

    def write(self, process: Process, key: str, value: str) -> None:
        """A write arrives after a delay, unless of the coordinator; those of a process in their order."""
        delay = self.random.uniform(0, LONGEST_DELAY) if process.number else 0.0
        when = max(self.now + delay, self._last_write.get(id(process), 0.0))
        self._last_write[id(process)] = when
        self._counter += 1
        heapq.heappush(self._writes, (when, self._counter, process, key, value))
        self.arrive()

    def arrive(self) -> None:
        while self._writes and self._writes[0][0] <= self.now:
            _, _, _, key, value = heapq.heappop(self._writes)
            self.values[key] = value
            if key == "committed":
                self._committed(View.load(value))

    def _committed(self, view: View) -> None:
        """What must hold for every view at the time at which it is committed."""
        generations = [each.generation for _, each in self.history]
        assert view.generation > max(generations, default=0), "generations grow"
        for member in view.members:
            if member.number:
                accepted = self.values.get(f"accepted/{view.generation}/{member.number}")
                assert accepted == str(member.incarnation), f"{member.number} has not accepted"
        self.history.append((self.now, view))


class SimulatedKeys:
    """The keys as a process has them: its reads sometimes take time, its writes arrive later."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self._simulation, self._process = simulation, process

    def set(self, key: str, value: str) -> None:
        if not (self._process.never_accepts and key.startswith("accepted/")):
            self._simulation.write(self._process, key, value)

    def get(self, key: str) -> str:
        if self._process.number and self._simulation.random.random() < 0.1:
            delay = self._simulation.random.uniform(0, LONGEST_DELAY)
            self._simulation.sleep(self._process, delay)
        self._simulation.arrive()
        return self._simulation.values.get(key, "")

    def add(self, key: str, amount: int) -> int:
        self._simulation.arrive()
        total = int(self._simulation.values.get(key, "0")) + amount
        self._simulation.values[key] = str(total)
        return total


class Ranks:
    """The processes of an elastic run: what Membership and ElasticTrainer do, without the training."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.leavers: set[int] = set()  # processes, by id(), that were asked to leave
        self.gone: set[int] = set()  # numbers of ranks that do not return
        self.fit: dict[int, bool] = {0: True}  # number -> whether its newest process can be a member

    def member(self, process: Process, keys: SimulatedKeys) -> Member:
        number = process.number
        process.incarnation = keys.add(f"incarnation/{number}", 1)
        self.simulation.members[number, process.incarnation] = process
        compared = {"code": "other" if process.differs else "same"}
        return Member(number, process.incarnation, Record(number, f"host-{number}", "", compared, {}))

    def coordinator(self, process: Process) -> None:
        """Agree on the first view; then look for losses and applicants, and agree again after each."""
        simulation = self.simulation
        keys = SimulatedKeys(simulation, process)
        coordinator = Coordinator(
            keys,
            self.member(process, keys),
            simulation.world_size,
            1,
            lambda: simulation.now,
            lambda seconds: simulation.sleep(process, seconds),
        )
        view = coordinator.first_view()
        while True:
            simulation.sleep(process, WATCH_SECONDS)
            replaced = {each.number for each in coordinator.replaced(view)}
            silent = {each.number for each in view.members if self.is_silent(each)}
            suspects = replaced | silent
            wanted = coordinator.leavers(view) or coordinator.applicants(view.members)
            if not (suspects or wanted or keys.get(f"broken/{view.generation}")):
                continue
            keys.set(f"broken/{view.generation}", "a change")
            began = simulation.now
            before, view = view, coordinator.next_view(view, lambda each: each.number in suspects)  # noqa: B023
            left_out = view.generation - before.generation - 1
            simulation.changes.append((began, simulation.now, left_out))

    def follower(self, process: Process) -> None:
        """Join and follow the views until this process is left out, refused or asked to leave."""
        simulation = self.simulation
        keys = SimulatedKeys(simulation, process)
        follower = Follower(
            keys,
            self.member(process, keys),
            lambda: simulation.now,
            lambda seconds: simulation.sleep(process, seconds),
        )
        follower.ask()
        try:
            view = follower.follow(0, None)
            while True:
                simulation.seen.append((process.number, view))
                leaves = False
                while not keys.get(f"broken/{view.generation}"):
                    simulation.sleep(process, WATCH_SECONDS)
                    if id(process) in self.leavers and not leaves:
                        follower.leave()
                        leaves = True
                    if any(self.is_gone(each) for each in view.members):  # its connection is closed
                        keys.set(f"broken/{view.generation}", "a member is lost")
                        break
                if leaves:
                    simulation.at(simulation.now + RESTART_SECONDS, lambda: self.start(process.number))
                    return
                follower.ready(view.generation)
                view = follower.follow(view.generation)
        except Final as error:
            simulation.refused.append(str(error))
        except Retryable:
            again = simulation.now + RESTART_SECONDS
            simulation.at(again, lambda: self.start(process.number, never_accepts=process.never_accepts))

    def start(self, number: int, **traits: bool) -> None:
        """Start the newest process of a rank, unless one is active."""
        current = self.simulation.current.get(number)
        if number not in self.gone and (current is None or current.died_at is not None):
            self.fit[number] = not any(traits.values())
            self.simulation.start(number, self.follower if number else self.coordinator, **traits)

    @property
    def expected(self) -> list[int]:
        """The numbers of the ranks that can be members."""
        return sorted(number for number, is_fit in self.fit.items() if is_fit and number not in self.gone)

    def is_gone(self, member: Member) -> bool:
        return self._process(member).died_at is not None

    def is_silent(self, member: Member) -> bool:
        process = self._process(member)
        now = self.simulation.now
        if process.died_at is not None:
            return now - process.died_at > DETECT_SECONDS
        return process.frozen_until > now > process.frozen_since + DETECT_SECONDS

    def _process(self, member: Member) -> Process:
        return self.simulation.members[member.number, member.incarnation]


def bound(left_out: int) -> float:
    """The longest that an agreement takes in which so many proposals were not accepted."""
    return READY_SECONDS + ACCEPT_SECONDS * (left_out + 1) + 2.0
