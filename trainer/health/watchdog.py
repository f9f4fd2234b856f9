"""A thread that reports which rank delays a late step, and ends an attempt that cannot continue.

    watchdog = Watchdog(run_status, env, run_dir, attempt, log)
    watchdog.start_exchange()               # publish this rank's status through the store, read the others'
    watchdog.set_peers(peers, endpoints)    # the health endpoint of each rank
    raise watchdog.explain(error)           # a collective failed: find the cause among the peers

A step is late after max(60 s, 5 x the median step). While all ranks answer, the attempt continues up to the
time-out of the collectives. After a step is late, a rank that is gone ends the attempt in 10 s, a rank that
is frozen or unreachable in one minute, impaired traffic in five minutes (docs/diagnosis.md). Each rank
publishes its own end, with the cause, to all others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trainer.data.files import write_whole
from trainer.distributed.process_group import Peer
from trainer.health.attempt import Attempt
from trainer.health.delay import DelayReport, stall_seconds
from trainer.health.diagnosis import FRESH_SECONDS, EndpointResult, Freshness, shows_host
from trainer.health.endpoint import QUERY_SECONDS, Answer, EndpointAddress, HealthEndpoint, query
from trainer.health.report import RankEvidence, capitalize, describe_delay, describe_loss
from trainer.health.run_status import STEP_PHASES, RunStatus, Stage
from trainer.health.stacks import main_line, stacks
from trainer.health.status_exchange import PUBLISH_SECONDS, StatusExchange
from trainer.health.status_record import RankEnd, RunStatusRecord
from trainer.host.logger import RunLogger, fields
from trainer.host.network_interface import NetworkInterface
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final, Retryable, RunEnd

LATE_STEPS = 5  # median steps
CHECK_SECONDS = 1.0
GRACE_SECONDS = 3.0  # for the main thread to end by itself after a peer has published its end
EXPLAIN_SECONDS = 3.0  # to find out why a collective failed
LAST_STATUS_SECONDS = 0.5  # of them, for the last status of a peer that is ending
FAREWELL_SECONDS = 5.0  # for the others to read the end of rank 0, which may own the store
HURRIED_FAREWELL_SECONDS = 1.0
STOOD_STILL_SECONDS = 5.0
DELAYING_STEPS = 2  # median steps
COMPUTING = set(STEP_PHASES) - {"sync"}


class Watchdog:
    """Reports which rank delays a late step of this rank, and ends the attempt if another rank is lost.

    run_status, env, run_dir, attempt, log: of this rank. evaluation_steps: the number of training steps that
    have as many tokens as the current evaluation.
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
        self._elastic = False  # the end of a rank other than rank 0 does not end this one
        self._peers: dict[int, Peer] = {}
        self._addresses: dict[int, EndpointAddress] = {}
        self._exchange = StatusExchange(env)
        self._endpoint: HealthEndpoint | None = None
        self._stopped = threading.Event()
        self._own_end: RankEnd | None = None
        self._is_echo = False  # this rank ends only because another rank is lost
        self._stood_still: Stage | None = None  # when this process did not run, and for how many seconds
        self.evaluation_steps = 0.0  # the number of steps that has as many tokens as an evaluation

    # -- start and end ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and the health endpoint. `start_exchange` then gets the status of other ranks."""
        self._run_status.update(stall_seconds=self._stall)
        if self._env.world_size > 1 and self._me.address:
            with contextlib.suppress(OSError):  # the address of this rank then stays unknown
                self._endpoint = HealthEndpoint(self._me.address, self._answer_query)
        self._attempt.at_end(self._publish_end)
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The address of this rank's health endpoint, for `set_peers` of the others; "" if there is none."""
        return str(self._endpoint.address) if self._endpoint else ""

    def start_exchange(self) -> None:
        """From now on, publish this rank's status in the rendezvous store and read those of the others."""
        self._exchange.start(self._status)

    def set_peers(self, peers: Iterable[Peer], endpoints: Mapping[int, str]) -> None:
        """Set the other ranks of the run. peers: all ranks.

        endpoints: {rank: address of its health endpoint as text}.
        """
        self._peers = {peer.rank: peer for peer in peers if peer.rank != self._me.rank}
        self._addresses = {
            rank: address for rank, text in endpoints.items() if (address := EndpointAddress.parse(text))
        }

    def set_members(self, peers: Iterable[Peer], endpoints: Mapping[int, str]) -> None:
        """Set the members of an elastic run: the ranks that now take part in it, by `RankEnv.rank`.

        From then on, if another rank publishes its end, this attempt ends only if that rank is rank 0, the
        coordinator. peers, endpoints: as for `set_peers`, but of the members only.
        """
        self.set_peers(peers, endpoints)
        self._others, self._elastic = set(self._peers), True
        self._exchange.expect(self._others)

    def status_age(self, rank: int) -> float | None:
        """Seconds since the last status of `rank` arrived; None if none has arrived."""
        received = self._exchange.received.get(rank)
        return received.age if received else None

    def delaying(self, seconds: float) -> list[int]:
        """The ranks, by `RankEnv.rank`, that still compute a step while other ranks wait for them.

        seconds: how long this rank must have waited in the phase sync; if it computes itself, how long
        another rank must have waited. A value below two median steps counts as two median steps. The
        result is empty if no rank has waited for so long, or if no step is measured yet. Ranks whose phase is
        not known are left out.
        """
        mine, median = self._run_status.record(), self._run_status.step_seconds
        received = {rank: known for rank, known in self._exchange.received.items() if rank in self._others}
        recent = [known.status for known in received.values() if known.age < FRESH_SECONDS]
        waiting = [status for status in [mine, *recent] if status.waits and status.phase == "sync"]
        if mine.phase not in COMPUTING:
            waiting = [status for status in waiting if status is mine]
        waited = max((status.phase_seconds for status in waiting), default=0.0)
        if not median or waited < max(seconds, DELAYING_STEPS * median):
            return []
        phases = {self._me.rank: mine.phase, **{rank: known.status.phase for rank, known in received.items()}}
        return [rank for rank, phase in phases.items() if phase in COMPUTING]

    def is_alive(self, rank: int) -> bool:
        """Whether the last status of `rank` arrived in the last FRESH_SECONDS and does not report its end."""
        received = self._exchange.received.get(rank)
        return received is not None and received.age < FRESH_SECONDS and not received.status.ended

    def stop(self) -> None:
        """Stop watching and publishing. The health endpoint answers queries as long as the process runs."""
        self._stopped.set()
        self._run_status.stop()
        self._exchange.stop()

    def close(self) -> None:
        """Stop for good, although the process continues: nothing is published, and no query is answered."""
        self.stop()
        self._exchange.is_started = False
        if self._endpoint:
            self._endpoint.close()

    def _status(self) -> RunStatusRecord:
        condition = self._interface.read()
        return replace(self._run_status.record(), **condition, endpoint=self.endpoint, ended=self._own_end)

    def _answer_query(self, with_stacks: bool) -> RunStatusRecord:
        """The answer to a query: this rank's run status, and on request the stacks of all threads."""
        status = self._status()
        return replace(status, line=main_line(), stacks=stacks()) if with_stacks else status

    def _publish_end(self, outcome: str, hurry: bool) -> None:
        """Publish the end of this rank. Rank 0, which may own the store, waits for the others to read it."""
        self._own_end = RankEnd(outcome, self._attempt.reason, self._is_echo)
        self.stop()
        if not self._exchange.is_started:
            return
        deadline = time.monotonic() + (HURRIED_FAREWELL_SECONDS if hurry else FAREWELL_SECONDS)
        self._exchange.publish()
        if outcome == "finished" or not self._env.is_coordinator or self._run_status.phase == "done":
            return
        while time.monotonic() < deadline and not all(
            self._query(rank).result == EndpointResult.REFUSES
            for rank in self._others - self._published_ends().keys()
        ):
            self._exchange.publish(0.5)
            time.sleep(0.2)

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
                    self._run_status.update(diagnosis=None)
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
        """Report which rank delays a stage that is late; end the attempt if a rank stays lost."""
        first = not delay.reported
        evidence = self._collect_evidence(with_stacks=first)
        sentence = describe_delay(evidence)
        verdicts = {each.peer.rank: each.verdict for each in evidence if each.is_lost}
        if delay.should_report(verdicts, late_seconds):
            stack_lines = self._save_stacks(evidence) if first else ""
            self._run_status.update(diagnosis=sentence)
            self._log.warning(
                f"{capitalize(sentence)}.{stack_lines}",
                extra=fields("diagnosis", diagnosis=sentence, late_seconds=late_seconds),
            )
        if delay.is_over:
            self._end(self._end_by_loss(evidence, ""))

    def _save_stacks(self, evidence: list[RankEvidence]) -> str:
        """Write the stacks that ranks sent to stacks-RANK.txt; returns a line for the log per rank."""
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
        answer, received = self._query(rank, with_stacks, seconds), self._exchange.received.get(rank)
        status = received.status if received and answer.status.is_empty else answer.status
        peer = self._peers.get(rank) or Peer(rank, status.host or "not yet known", "")
        if received is None:
            return RankEvidence(peer, answer.result, Freshness.NONE, status)
        # A short stall time queries before the status of a frozen rank is that old.
        is_fresh = received.age < min(FRESH_SECONDS, self._stall) and received.at > since
        freshness = Freshness.FRESH if is_fresh else Freshness.STALE
        return RankEvidence(peer, answer.result, freshness, status, received.age)

    def _query(self, rank: int, with_stacks: bool = False, seconds: float = QUERY_SECONDS) -> Answer:
        address, received = self._addresses.get(rank), self._exchange.received.get(rank)
        if address is None and received:
            address = EndpointAddress.parse(received.status.endpoint)
        return query(address, with_stacks, seconds) if address else Answer(EndpointResult.UNKNOWN)

    # -- ends of other ranks ---------------------------------------------------------------------------

    def _published_ends(self) -> dict[int, RankEnd]:
        """The ends that peers have published, by rank."""
        received = dict(self._exchange.received)
        return {rank: end for rank, known in received.items() if (end := known.status.ended)}

    def _end_of_a_peer(self) -> RunEnd | None:
        """The end of this attempt that follows from the published end of another rank; None if there is none.

        An end that is only due to the loss of another rank is used if there is no other. A final end is used
        before a retryable one.
        """
        ends = {rank: end for rank, end in self._published_ends().items() if end.outcome != "finished"}
        if self._elastic:
            ends = {rank: end for rank, end in ends.items() if rank == 0}
        own = {rank: end for rank, end in ends.items() if not end.is_echo}
        for rank, end in sorted((own or ends).items(), key=lambda item: item[1].outcome != "final"):
            peer = self._peers.get(rank) or Peer(rank, self._exchange.received[rank].status.host, "")
            kind = Final if end.outcome == "final" else Retryable
            return kind(end.reason if end.reason.startswith("rank ") else f"{peer}: {end.reason}")
        return None

    def explain(self, error: Retryable) -> RunEnd:
        """Find the cause of a failed collective, in about EXPLAIN_SECONDS; returns the end of the attempt.

        error: the exception of the collective. The result follows from the end that another rank has
        published, except an end that is only due to the loss of a further rank. If there is no such end, the
        result follows from a diagnosis of the ranks.
        """
        began = time.monotonic()
        evidence: list[RankEvidence] = []
        while (waited := time.monotonic() - began) < EXPLAIN_SECONDS:
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

    def announce_end(self, outcome: str, reason: str) -> None:
        """Publish to the other ranks that this rank is ending; its outcome file is written later.

        outcome: finished, stopped, retryable or final. reason: a sentence.
        """
        self._own_end = RankEnd(outcome, reason, self._is_echo)
        self._exchange.publish()

    def _end(self, end: RunEnd) -> None:
        """Publish and write the outcome, and end this process, whose main thread may wait in a collective."""
        self.announce_end(end.outcome, str(end))
        self._attempt.end_process(end, self._log)


def _clock() -> float:
    """CLOCK_BOOTTIME in seconds, which includes the time in suspend; CLOCK_MONOTONIC where it is missing."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
