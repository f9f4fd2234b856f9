"""No wait in silence: a thread that says who is where when a step takes too long, and ends what cannot go on.

    watchdog = Watchdog(heartbeat, place, run_dir, attempt, say)
    watchdog.join(prefix)             # the store is there: tell the others, and be told
    watchdog.meet(records)            # where each rank can be asked
    raise watchdog.why(error)         # a collective failed: what the others and their hosts say to that

A step is late after max(60 s, 5 x the median). Ranks that answer are left to it, up to the time-out of the
collectives; one that is gone ends the attempt at once, one that is frozen or cannot be reached when it still
is so another minute later, impaired traffic after five minutes (docs/diagnosis.md). What ends on one rank is
heard by all, with its cause.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data.files import write_whole
from trainer.distributed.process_group import Peer
from trainer.health.attempt import Attempt
from trainer.health.diagnosis import (
    FRESH_SECONDS,
    IMPAIRED_STALLS,
    Endpoint,
    Status,
    Verdict,
    seconds_until_end,
    shows_host,
)
from trainer.health.endpoint import ASK_SECONDS, Answer, Listener, Told, ask
from trainer.health.report import Sighting, blame, capital, lost
from trainer.health.run_status import Heartbeat, Stage
from trainer.health.stacks import main_line, stacks
from trainer.health.status_exchange import EVERY_SECONDS, Board
from trainer.host.logger import Voice
from trainer.host.network_interface import Wire
from trainer.host.rank_env import Place
from trainer.outcome import EXIT_CODES, Final, Retryable, RunEnd

STALL_VARIABLE = "NANOFLEET_STALL_SECONDS"
STALL_SECONDS = 60.0
LATE_STEPS = 5  # medians
LOOK_SECONDS = 1.0
GRACE_SECONDS = 3.0  # for the main thread to end by itself, once a peer has said that it ends
WHY_SECONDS = 3.0  # to find out why a collective failed
LISTEN_SECONDS = 0.5  # of them, for the last words of a peer that is ending
LAST_WORDS_SECONDS = 5.0  # for the others to hear how rank 0, which may own the store, has ended
HURRIED_WORDS_SECONDS = 1.0
STOOD_STILL_SECONDS = 5.0


def stall_seconds() -> float:
    """After which a step is late at the earliest. Raises ConfigError for an environment that is no number."""
    text = os.environ.get(STALL_VARIABLE, "") or str(STALL_SECONDS)
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ConfigError(f"{STALL_VARIABLE} is {text!r} in the environment: it takes seconds, above 0.")


class Watchdog:
    """Watches over this rank's stages and the others' ends. Its threads are daemons."""

    def __init__(
        self, heartbeat: Heartbeat, place: Place, run_dir: Path, attempt: Attempt, say: Voice
    ) -> None:
        self._heartbeat, self._place, self._run_dir = heartbeat, place, run_dir
        self._attempt, self._say = attempt, say
        self._stall = stall_seconds()
        self._me = Peer(place.rank, place.host, place.address())
        self._wire = Wire(self._me.address)
        self._others = set(range(place.world_size)) - {place.rank}
        self._peers: dict[int, Peer] = {}
        self._told: dict[int, Told] = {}
        self._board: Board | None = None
        self._listener: Listener | None = None
        self._stopped = threading.Event()
        self._own_end: dict[str, Any] | None = None
        self._is_echo = False  # this rank ends only because another one is lost
        self._stood_still: Stage | None = None  # where, and for how long
        self.evaluation_steps = 0.0  # how many steps an evaluation is worth, by its tokens

    # -- the beginning and the end ---------------------------------------------------------------------

    def start(self) -> None:
        """Watch from now on, this rank alone at first."""
        self._heartbeat.state(stall_seconds=self._stall)
        if self._place.world_size > 1 and self._me.address:
            with contextlib.suppress(OSError):  # then the others find it unknown
                self._listener = Listener(self._me.address, self._answer)
        self._attempt.at_end(self._tell_the_end)
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    @property
    def told(self) -> str:
        """Where this rank can be asked, for the others' `meet`; empty if nowhere."""
        return str(self._listener.told) if self._listener else ""

    def join(self, prefix: str) -> None:
        """The store is there: put up how this rank is, and read how the others are."""
        self._board = Board(self._place, prefix)
        self._board.start(self._words)

    def meet(self, peers: Iterable[Peer], told: Mapping[int, str]) -> None:
        """Who the others are and where each one can be asked."""
        self._peers = {peer.rank: peer for peer in peers if peer.rank != self._me.rank}
        self._told = {rank: where for rank, text in told.items() if (where := Told.parse(text))}

    def lives(self, rank: int) -> bool:
        """Whether a rank has told of itself of late."""
        seen = self._board.seen.get(rank) if self._board else None
        return seen is not None and seen.age < FRESH_SECONDS and not seen.words.get("ended")

    def stop(self) -> None:
        """The run is over here. Whoever asks is answered as long as the process lives."""
        self._stopped.set()
        self._heartbeat.stop()
        if self._board:
            self._board.stop()

    def _words(self) -> dict[str, Any]:
        return {
            **self._heartbeat.told(),
            **self._wire.look(),
            "host": self._me.host,
            "told": self.told,
            "ended": self._own_end,
        }

    def _answer(self, with_stacks: bool) -> dict[str, Any]:
        """What a peer that asks is told."""
        return self._words() | ({"line": main_line(), "stacks": stacks()} if with_stacks else {})

    def _tell_the_end(self, outcome: str, hurry: bool) -> None:
        """Put up how this rank has ended. Rank 0, with whom the store may go, lets the others hear it."""
        self._own_end = {"outcome": outcome, "reason": self._attempt.reason, "echo": self._is_echo}
        self.stop()
        if self._board is None:
            return
        seconds = HURRIED_WORDS_SECONDS if hurry else LAST_WORDS_SECONDS
        deadline = time.monotonic() + seconds
        self._board.say(min(1.0, seconds))
        if outcome == "finished" or not self._place.coordinates or self._heartbeat.phase == "done":
            return
        while time.monotonic() < deadline and not self._all_have_ended():
            self._board.say(0.5)
            time.sleep(0.2)

    def _all_have_ended(self) -> bool:
        return all(self._ask(rank).how == Endpoint.REFUSES for rank in self._others - self._ends().keys())

    # -- the watch -------------------------------------------------------------------------------------

    def _work(self) -> None:
        interval = min(LOOK_SECONDS, self._stall / 5)
        blaming: Blaming | None = None
        last = _clock()
        heard_at = 0.0
        while not self._stopped.wait(interval):
            now = _clock()
            if now - last > STOOD_STILL_SECONDS + interval:
                self._stood_still = self._heartbeat.stage._replace(seconds=now - last)
                self._say(
                    f"This process stood still for {now - last:.0f} s: it was stopped, or its host slept.",
                    event="stood still",
                    level="warning",
                )
            if self._heartbeat.phase == "done":
                return
            if (end := self._end_of_a_peer()) is not None:
                heard_at = heard_at or now
                if now - heard_at > GRACE_SECONDS:
                    self._end(end)
            stage, limit = self._heartbeat.stage, self.limit()
            if stage.seconds < limit:
                if blaming is not None:
                    self._heartbeat.state(blame=None)
                    blaming = None
            else:
                blaming = blaming or Blaming(self._stall)
                if blaming.is_due:
                    self._blame(blaming, stage.seconds)
            last = _clock()

    def limit(self) -> float:
        """Seconds after which what the rank is at is late."""
        median = self._heartbeat.step_seconds
        late = LATE_STEPS * median
        if self._heartbeat.stage.name == "evaluate":
            late = max(late, self.evaluation_steps * median)
        return max(self._stall, late)

    def _blame(self, blaming: Blaming, late_by: float) -> None:
        """Say who is where, where that has changed or has not been said for long; end what is dead."""
        first = not blaming.said
        sightings = self._look_around(with_stacks=first)
        sentence = blame(sightings)
        verdicts = {each.peer.rank: each.verdict for each in sightings if each.is_lost}
        if blaming.wants_to_say(verdicts, late_by):
            where_exactly = self._lines(sightings) if first else ""
            self._heartbeat.state(blame=sentence)
            self._say(
                f"{capital(sentence)}.{where_exactly}",
                event="blame",
                level="warning",
                figures={"blame": sentence, "late_seconds": late_by},
            )
        if blaming.is_over:
            self._end(self._lost(sightings, ""))

    def _lines(self, sightings: list[Sighting]) -> str:
        """Keep the stacks that were told; say where they are and what each rank is doing."""
        said = []
        for sighting in sightings:
            if text := sighting.words.get("stacks"):
                path = self._run_dir / f"stacks-{sighting.peer.rank}.txt"
                with contextlib.suppress(OSError):
                    write_whole(path, text.encode())
                    said.append(f"\n  {sighting.peer} is at {sighting.words['line']}; all threads: {path}")
        return "".join(said)

    def _look_around(
        self, with_stacks: bool = False, seconds: float = ASK_SECONDS, since: float = 0.0
    ) -> list[Sighting]:
        """Every rank as it is now, in rank order. Only a run status that arrived after `since` is fresh."""
        mine = Sighting(self._me, Endpoint.ANSWERS, Status.FRESH, self._answer(with_stacks))
        if not self._others:
            return [mine]
        ranks = sorted(self._others)
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = list(pool.map(lambda rank: self._sight(rank, with_stacks, seconds, since), ranks))
        reachable = {each.peer.host for each in [mine, *found] if shows_host(each.endpoint)}
        found = [replace(each, reachable=each.peer.host in reachable) for each in found]
        return sorted([mine, *found], key=lambda sighting: sighting.peer.rank)

    def _sight(self, rank: int, with_stacks: bool, seconds: float, since: float) -> Sighting:
        answer = self._ask(rank, with_stacks, seconds)
        seen = self._board.seen.get(rank) if self._board else None
        words = {**(seen.words if seen else {}), **answer.said}
        peer = self._peers.get(rank) or Peer(rank, str(words.get("host", "not yet known")), "")
        if seen is None:
            return Sighting(peer, answer.how, Status.NONE, words)
        # An impatient watchdog asks before the status of a frozen rank is that old.
        is_fresh = seen.age < min(FRESH_SECONDS, self._stall) and seen.at > since
        return Sighting(peer, answer.how, Status.FRESH if is_fresh else Status.STALE, words, seen.age)

    def _ask(self, rank: int, with_stacks: bool = False, seconds: float = ASK_SECONDS) -> Answer:
        told = self._told.get(rank)
        if told is None and self._board and rank in self._board.seen:
            told = Told.parse(str(self._board.seen[rank].words.get("told", "")))
        return ask(told, with_stacks, seconds) if told else Answer(Endpoint.UNKNOWN, {})

    # -- the ends of others ----------------------------------------------------------------------------

    def _ends(self) -> dict[int, dict[str, Any]]:
        """How peers have ended, by rank, as far as they said it."""
        seen = dict(self._board.seen) if self._board else {}
        return {rank: end for rank, known in seen.items() if (end := known.words.get("ended"))}

    def _end_of_a_peer(self) -> RunEnd | None:
        """The end that follows for this rank from what a peer has said of its own."""
        ends = {rank: end for rank, end in self._ends().items() if end["outcome"] != "finished"}
        own = {rank: end for rank, end in ends.items() if not end["echo"]}
        for rank, end in sorted((own or ends).items(), key=lambda item: item[1]["outcome"] != "final"):
            who = self._peers.get(rank) or Peer(rank, str(self._board_host(rank)), "")
            kind = Final if end["outcome"] == "final" else Retryable
            said = str(end["reason"])
            return kind(said if said.startswith("rank ") else f"{who}: {said}")
        return None

    def _board_host(self, rank: int) -> str:
        seen = self._board.seen.get(rank) if self._board else None
        return str(seen.words.get("host", "")) if seen else ""

    def why(self, error: Retryable) -> RunEnd:
        """What a collective's failure comes from: a peer's own end, or what its host answers."""
        began = time.monotonic()
        sightings: list[Sighting] = []
        while (waited := time.monotonic() - began) < WHY_SECONDS:
            if self._board:
                self._board.say(0.5)
            if any(not end["echo"] for end in self._ends().values()):
                return self._end_of_a_peer() or error
            # The last status of a rank that has just been killed may arrive in the first moments.
            sightings = self._look_around(seconds=1.0, since=began + LISTEN_SECONDS)
            sightings = [each for each in sightings if each.peer.rank not in self._ends()]
            # One that is just ending may not have said so yet; one that runs publishes its status again.
            listened = waited > LISTEN_SECONDS + EVERY_SECONDS
            if listened and any(sighting.verdict.is_dead for sighting in sightings):
                break
            time.sleep(0.2)
        return self._lost(sightings, str(error))

    def _lost(self, sightings: list[Sighting], fallback: str) -> Retryable:
        self._is_echo = True
        still, stage = self._stood_still, self._heartbeat.stage
        seconds = (
            still.seconds if still and still[:2] == stage[:2] else 0.0
        )  # of a stage that is over: no cause
        return Retryable(lost(sightings, fallback, seconds))

    def ends(self, end: RunEnd) -> None:
        """Tell the others at once how this rank is ending; its outcome is written when it has ended."""
        self._own_end = {"outcome": end.outcome, "reason": str(end), "echo": self._is_echo}
        if self._board:
            self._board.say()

    def _end(self, end: RunEnd) -> None:
        """End this process: its main thread sits in a collective that nobody will complete."""
        self.ends(end)
        end = self._attempt.before_end(end, math.inf)
        if self._attempt.end(end.outcome, str(end), hurry=True):
            self._say.ended(end.outcome, str(end))
            os._exit(EXIT_CODES[end.outcome])


class Blaming:
    """What has been said while one stage was late, and since when which ranks are lost."""

    def __init__(self, stall: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall, self._clock = stall, clock
        self._every = min(10.0, stall / 4)
        self._next = 0.0
        self._say_again = 0.0
        self._verdicts: dict[int, tuple[Verdict, float]] = {}  # by rank, and since when
        self._lost_since: dict[int, float] = {}
        self.said = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to look around again."""
        return self._clock() >= self._next

    def wants_to_say(self, lost: Mapping[int, Verdict], late_by: float) -> bool:
        """At first, when a verdict changes, and each time the delay has doubled."""
        now = self._clock()
        self._next = now + self._every
        before = {rank: verdict for rank, (verdict, _) in self._verdicts.items()}
        self._lost_since = {rank: self._lost_since.get(rank, now) for rank in lost}
        self._verdicts = {
            rank: self._verdicts[rank] if before.get(rank) == verdict else (verdict, now)
            for rank, verdict in lost.items()
        }
        wants = not self.said or before != dict(lost) or late_by >= self._say_again
        if wants:
            self.said, self._say_again = True, 2 * late_by
        return wants

    @property
    def is_over(self) -> bool:
        """Whether one verdict on a rank, or a change between several, has lasted for too long."""
        now = self._clock()
        for rank, (verdict, since) in self._verdicts.items():
            limit = seconds_until_end(verdict, self._stall, self._every)
            if limit is not None and now - since >= limit:
                return True
            if now - self._lost_since[rank] >= IMPAIRED_STALLS * self._stall:
                return True
        return False


def _clock() -> float:
    """Seconds that count on while the host sleeps, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
