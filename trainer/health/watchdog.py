"""A thread that reports which rank delays a late step, and ends an attempt that cannot continue.

    watchdog = Watchdog(run_status, env, run_dir, attempt, log)
    watchdog.start_exchange(prefix)         # publish this rank's status through the store, read the others'
    watchdog.set_peers(peers, endpoints)    # the health endpoint of each rank
    raise watchdog.explain(error)           # a collective failed: find the cause among the peers

A step is late after max(60 s, 5 x the median). While all ranks answer, the attempt continues up to the
time-out of the collectives. A rank that is gone ends the attempt at once; a rank that is frozen or
unreachable ends it after one more minute, impaired traffic after five minutes (docs/diagnosis.md). The end of
one rank is published to all, with its cause.
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

from trainer.config import ConfigError
from trainer.data.files import write_whole
from trainer.distributed.process_group import Peer
from trainer.health.attempt import Attempt
from trainer.health.diagnosis import (
    FRESH_SECONDS,
    IMPAIRED_STALLS,
    EndpointResult,
    Freshness,
    Verdict,
    seconds_until_end,
    shows_host,
)
from trainer.health.endpoint import QUERY_SECONDS, Answer, EndpointAddress, HealthEndpoint, query
from trainer.health.report import RankEvidence, capitalize, describe_delay, describe_loss
from trainer.health.run_status import RunStatus, Stage
from trainer.health.stacks import main_line, stacks
from trainer.health.status_exchange import PUBLISH_SECONDS, StatusExchange
from trainer.health.status_record import RankEnd, RunStatusRecord
from trainer.host.logger import RunLogger, fields
from trainer.host.network_interface import NetworkInterface
from trainer.host.rank_env import RankEnv
from trainer.outcome import EXIT_CODES, Final, Retryable, RunEnd

STALL_VARIABLE = "NANOFLEET_STALL_SECONDS"
STALL_SECONDS = 60.0
LATE_STEPS = 5  # medians
CHECK_SECONDS = 1.0
GRACE_SECONDS = 3.0  # for the main thread to end by itself after a peer has published its end
EXPLAIN_SECONDS = 3.0  # to find out why a collective failed
LAST_STATUS_SECONDS = 0.5  # of them, for the last status of a peer that is ending
FAREWELL_SECONDS = 5.0  # for the others to read the end of rank 0, which may own the store
HURRIED_FAREWELL_SECONDS = 1.0
STOOD_STILL_SECONDS = 5.0


def stall_seconds() -> float:
    """The shortest time, in seconds, after which a step is late: NANOFLEET_STALL_SECONDS, by default 60.

    Raises ConfigError if the variable is not a number above 0.
    """
    text = os.environ.get(STALL_VARIABLE, "") or str(STALL_SECONDS)
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ConfigError(f"{STALL_VARIABLE} is {text!r} in the environment: it takes seconds, above 0.")


class Watchdog:
    """Reports which rank delays a late step of this rank, and ends the attempt if another rank is lost.

    Its threads are daemons.
    """

    def __init__(
        self, run_status: RunStatus, env: RankEnv, run_dir: Path, attempt: Attempt, log: RunLogger
    ) -> None:
        self._run_status, self._env, self._run_dir = run_status, env, run_dir
        self._attempt, self._log = attempt, log
        self._stall = stall_seconds()
        self._me = Peer(env.rank, env.host, env.address())
        self._interface = NetworkInterface(self._me.address)
        self._others = set(range(env.world_size)) - {env.rank}
        self._peers: dict[int, Peer] = {}
        self._addresses: dict[int, EndpointAddress] = {}
        self._exchange: StatusExchange | None = None
        self._endpoint: HealthEndpoint | None = None
        self._stopped = threading.Event()
        self._own_end: RankEnd | None = None
        self._is_echo = False  # this rank ends only because another rank is lost
        self._stood_still: Stage | None = (
            None  # the stage in which this process did not run, and for how long
        )
        self.evaluation_steps = 0.0  # the number of steps that has as many tokens as an evaluation

    # -- start and end ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the watchdog thread and the health endpoint of this rank.

        The statuses of the other ranks are known only after `start_exchange`.
        """
        self._run_status.update(stall_seconds=self._stall)
        if self._env.world_size > 1 and self._me.address:
            with contextlib.suppress(OSError):  # the address of this rank then stays unknown
                self._endpoint = HealthEndpoint(self._me.address, self._answer_query)
        self._attempt.at_end(self._publish_end)
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The address of this rank's health endpoint, for `set_peers` of the others; "" without one."""
        return str(self._endpoint.address) if self._endpoint else ""

    def start_exchange(self, prefix: str) -> None:
        """Start to publish this rank's status through the rendezvous store, and to read those of the others.

        `prefix` is the prefix of the keys in the store.
        """
        self._exchange = StatusExchange(self._env, prefix)
        self._exchange.start(self._status)

    def set_peers(self, peers: Iterable[Peer], endpoints: Mapping[int, str]) -> None:
        """Set the ranks of the run, and by rank the `endpoint` of each: its health endpoint as text."""
        self._peers = {peer.rank: peer for peer in peers if peer.rank != self._me.rank}
        self._addresses = {
            rank: address for rank, text in endpoints.items() if (address := EndpointAddress.parse(text))
        }

    def is_alive(self, rank: int) -> bool:
        """Whether a status of `rank` arrived in the last FRESH_SECONDS that does not report its end."""
        received = self._exchange.received.get(rank) if self._exchange else None
        return received is not None and received.age < FRESH_SECONDS and not received.status.ended

    def stop(self) -> None:
        """Stop watching and publishing. The health endpoint answers queries as long as the process runs."""
        self._stopped.set()
        self._run_status.stop()
        if self._exchange:
            self._exchange.stop()

    def _status(self) -> RunStatusRecord:
        condition = self._interface.read()
        return replace(self._run_status.record(), **condition, endpoint=self.endpoint, ended=self._own_end)

    def _answer_query(self, with_stacks: bool) -> RunStatusRecord:
        """The answer to a query: this rank's run status, and on request the stacks of all threads."""
        status = self._status()
        return replace(status, line=main_line(), stacks=stacks()) if with_stacks else status

    def _publish_end(self, outcome: str, hurry: bool) -> None:
        """Publish the end of this rank to the other ranks. `hurry`: in 1 s instead of 5 s.

        Rank 0 may own the rendezvous store, so it waits that long for the others to read its end, unless it
        has finished.
        """
        self._own_end = RankEnd(outcome, self._attempt.reason, self._is_echo)
        self.stop()
        if self._exchange is None:
            return
        seconds = HURRIED_FAREWELL_SECONDS if hurry else FAREWELL_SECONDS
        deadline = time.monotonic() + seconds
        self._exchange.publish(min(1.0, seconds))
        if outcome == "finished" or not self._env.is_coordinator or self._run_status.phase == "done":
            return
        while time.monotonic() < deadline and not self._all_peers_ended():
            self._exchange.publish(0.5)
            time.sleep(0.2)

    def _all_peers_ended(self) -> bool:
        return all(
            self._query(rank).result == EndpointResult.REFUSES
            for rank in self._others - self._published_ends().keys()
        )

    # -- watch -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        interval = min(CHECK_SECONDS, self._stall / 5)
        delay: DelayReport | None = None
        last = _clock()
        peer_ended_at = 0.0
        while not self._stopped.wait(interval):
            now = _clock()
            if now - last > STOOD_STILL_SECONDS + interval:
                self._stood_still = self._run_status.stage._replace(seconds=now - last)
                self._log.warning(
                    f"This process stood still for {now - last:.0f} s: "
                    "it was stopped, or its host was suspended.",
                    extra=fields("stood still"),
                )
            if self._run_status.phase == "done":
                return
            if (end := self._end_of_a_peer()) is not None:
                peer_ended_at = peer_ended_at or now
                if now - peer_ended_at > GRACE_SECONDS:
                    self._end(end)
            stage, limit = self._run_status.stage, self.limit()
            if stage.seconds < limit:
                if delay is not None:
                    self._run_status.update(blame=None)
                    delay = None
            else:
                delay = delay or DelayReport(self._stall)
                if delay.is_due:
                    self._report_delay(delay, stage.seconds)
            last = _clock()

    def limit(self) -> float:
        """Seconds after which the current stage is late: 5 median steps, and at least the stall time.

        For an evaluation: also at least the median time of the steps that have as many tokens.
        """
        median = self._run_status.step_seconds
        late = LATE_STEPS * median
        if self._run_status.stage.name == "evaluate":
            late = max(late, self.evaluation_steps * median)
        return max(self._stall, late)

    def _report_delay(self, delay: DelayReport, late_seconds: float) -> None:
        """Collect evidence and report which rank delays the run; end the attempt if a rank is lost for long.

        The report goes to the log and the heartbeat file, but only if `DelayReport.should_report`.

        `late_seconds` is the duration of the current stage so far.
        """
        first = not delay.reported
        evidence = self._collect_evidence(with_stacks=first)
        sentence = describe_delay(evidence)
        verdicts = {each.peer.rank: each.verdict for each in evidence if each.is_lost}
        if delay.should_report(verdicts, late_seconds):
            stack_lines = self._save_stacks(evidence) if first else ""
            self._run_status.update(blame=sentence)
            self._log.warning(
                f"{capitalize(sentence)}.{stack_lines}",
                extra=fields("blame", blame=sentence, late_seconds=late_seconds),
            )
        if delay.is_over:
            self._end(self._end_by_loss(evidence, ""))

    def _save_stacks(self, evidence: list[RankEvidence]) -> str:
        """Write the stacks of each rank that sent them to stacks-RANK.txt in the run directory.

        Returns a line for each such rank, for the log: the innermost line of its main thread, and the file.
        """
        lines = []
        for each in evidence:
            if text := each.status.stacks:
                path = self._run_dir / f"stacks-{each.peer.rank}.txt"
                with contextlib.suppress(OSError):
                    write_whole(path, text.encode())
                    lines.append(f"\n  {each.peer} is at {each.status.line}; all threads: {path}")
        return "".join(lines)

    def _collect_evidence(
        self, with_stacks: bool = False, seconds: float = QUERY_SECONDS, since: float = 0.0
    ) -> list[RankEvidence]:
        """Query the other ranks, all at once; returns the evidence on every rank, in rank order.

        `seconds` is the time-out of a query. A run status is fresh only if it arrived after `since`, a time
        of time.monotonic().
        """
        mine = RankEvidence(
            self._me, EndpointResult.ANSWERS, Freshness.FRESH, self._answer_query(with_stacks)
        )
        if not self._others:
            return [mine]
        ranks = sorted(self._others)
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = list(pool.map(lambda rank: self._evidence_of(rank, with_stacks, seconds, since), ranks))
        reachable = {each.peer.host for each in [mine, *found] if shows_host(each.endpoint)}
        found = [replace(each, reachable=each.peer.host in reachable) for each in found]
        return sorted([mine, *found], key=lambda each: each.peer.rank)

    def _evidence_of(self, rank: int, with_stacks: bool, seconds: float, since: float) -> RankEvidence:
        answer = self._query(rank, with_stacks, seconds)
        received = self._exchange.received.get(rank) if self._exchange else None
        status = received.status if received and answer.status.is_empty else answer.status
        peer = self._peers.get(rank) or Peer(rank, status.host or "not yet known", "")
        if received is None:
            return RankEvidence(peer, answer.result, Freshness.NONE, status)
        # A short stall time queries before the status of a frozen rank is that old.
        is_fresh = received.age < min(FRESH_SECONDS, self._stall) and received.at > since
        return RankEvidence(
            peer, answer.result, Freshness.FRESH if is_fresh else Freshness.STALE, status, received.age
        )

    def _query(self, rank: int, with_stacks: bool = False, seconds: float = QUERY_SECONDS) -> Answer:
        address = self._addresses.get(rank)
        if address is None and self._exchange and rank in self._exchange.received:
            address = EndpointAddress.parse(self._exchange.received[rank].status.endpoint)
        return query(address, with_stacks, seconds) if address else Answer(EndpointResult.UNKNOWN)

    # -- ends of other ranks ---------------------------------------------------------------------------

    def _published_ends(self) -> dict[int, RankEnd]:
        """The ends that peers have published, by rank."""
        received = dict(self._exchange.received) if self._exchange else {}
        return {rank: end for rank, known in received.items() if (end := known.status.ended)}

    def _end_of_a_peer(self) -> RunEnd | None:
        """The end of this attempt that follows from the published end of another rank; None if there is none.

        Final ends come first. An end that only follows from that of a third rank counts if there is no other.
        """
        ends = {rank: end for rank, end in self._published_ends().items() if end.outcome != "finished"}
        own = {rank: end for rank, end in ends.items() if not end.is_echo}
        for rank, end in sorted((own or ends).items(), key=lambda item: item[1].outcome != "final"):
            peer = self._peers.get(rank) or Peer(rank, self._published_host(rank), "")
            kind = Final if end.outcome == "final" else Retryable
            return kind(end.reason if end.reason.startswith("rank ") else f"{peer}: {end.reason}")
        return None

    def _published_host(self, rank: int) -> str:
        received = self._exchange.received.get(rank) if self._exchange else None
        return received.status.host if received else ""

    def explain(self, error: Retryable) -> RunEnd:
        """The end of the attempt after the failed collective `error`, to be raised by the caller.

        It is the published end of another rank, or else a diagnosis of the ranks. Takes up to
        EXPLAIN_SECONDS.
        """
        began = time.monotonic()
        evidence: list[RankEvidence] = []
        while (waited := time.monotonic() - began) < EXPLAIN_SECONDS:
            if self._exchange:
                self._exchange.publish(0.5)
            if any(not end.is_echo for end in self._published_ends().values()):
                return self._end_of_a_peer() or error
            # The last status of a rank that has just been killed may arrive in the first moments.
            evidence = self._collect_evidence(seconds=1.0, since=began + LAST_STATUS_SECONDS)
            evidence = [each for each in evidence if each.peer.rank not in self._published_ends()]
            # A rank that is ending may not have published that yet; one that runs publishes its status again.
            is_complete = waited > LAST_STATUS_SECONDS + PUBLISH_SECONDS
            if is_complete and any(each.verdict.is_dead for each in evidence):
                break
            time.sleep(0.2)
        return self._end_by_loss(evidence, str(error))

    def _end_by_loss(self, evidence: list[RankEvidence], fallback: str) -> Retryable:
        self._is_echo = True
        still, stage = self._stood_still, self._run_status.stage
        # Time lost in an earlier stage is not the cause.
        seconds = still.seconds if still and still[:2] == stage[:2] else 0.0
        return Retryable(describe_loss(evidence, fallback, seconds))

    def announce_end(self, end: RunEnd) -> None:
        """Publish to the other ranks that this rank is ending; its outcome file is written later."""
        self._own_end = RankEnd(end.outcome, str(end), self._is_echo)
        if self._exchange:
            self._exchange.publish()

    def _end(self, end: RunEnd) -> None:
        """Write the outcome and end this process, whose main thread waits in a failed collective."""
        self.announce_end(end)
        end = self._attempt.before_end(end, math.inf)
        if self._attempt.end(end.outcome, str(end), hurry=True):
            self._log.ended(end.outcome, str(end))
            os._exit(EXIT_CODES[end.outcome])


class DelayReport:
    """Decides when a late stage is reported again, and when a lost rank ends the attempt.

    `stall` is the stall time in seconds. The object keeps the verdict on each lost rank and since when it
    holds.
    """

    def __init__(self, stall: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall, self._clock = stall, clock
        self._every = min(10.0, stall / 4)
        self._next = 0.0
        self._report_again_at = 0.0
        self._verdicts: dict[int, tuple[Verdict, float]] = {}  # by rank: verdict and its first time
        self._lost_since: dict[int, float] = {}
        self.reported = False

    @property
    def is_due(self) -> bool:
        """Whether to collect evidence now: at first, then every 10 s, or every stall / 4 if shorter."""
        return self._clock() >= self._next

    def should_report(self, lost: Mapping[int, Verdict], late_seconds: float) -> bool:
        """Record the verdicts on the `lost` ranks; returns whether to log a report now.

        True at the first call, when a verdict changes, and each time that `late_seconds` has doubled.
        """
        now = self._clock()
        self._next = now + self._every
        before = {rank: verdict for rank, (verdict, _) in self._verdicts.items()}
        self._lost_since = {rank: self._lost_since.get(rank, now) for rank in lost}
        self._verdicts = {
            rank: self._verdicts[rank] if before.get(rank) == verdict else (verdict, now)
            for rank, verdict in lost.items()
        }
        wants = not self.reported or before != dict(lost) or late_seconds >= self._report_again_at
        if wants:
            self.reported, self._report_again_at = True, 2 * late_seconds
        return wants

    @property
    def is_over(self) -> bool:
        """Whether a rank has been lost for so long that the attempt ends.

        That is: with one verdict for `seconds_until_end`, or with several in turn for IMPAIRED_STALLS stall
        times.
        """
        now = self._clock()
        for rank, (verdict, since) in self._verdicts.items():
            limit = seconds_until_end(verdict, self._stall, self._every)
            if limit is not None and now - since >= limit:
                return True
            if now - self._lost_since[rank] >= IMPAIRED_STALLS * self._stall:
                return True
        return False


def _clock() -> float:
    """CLOCK_BOOTTIME in seconds, which includes the time in suspend; CLOCK_MONOTONIC where it is missing."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
