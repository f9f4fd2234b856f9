"""Sentences on a run that makes no progress: which rank delays it, which rank is lost, and why.

"rank 1 (laptop) has been in backward of step 812 for 94 s (it computes slowly: its thread uses 98 % of a
core); rank 0 (tower) waits in sync"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.distributed.process_group import Peer
from trainer.health.diagnosis import EndpointResult, Freshness, Verdict, diagnose
from trainer.health.status_record import RunStatusRecord

BUSY, IDLE = 0.5, 0.1  # of a core, used by the thread that trains
HOT = 90.0  # degrees Celsius

DOCTOR = "`ansible-playbook doctor.yml` finds the fault"


@dataclass(frozen=True)
class RankEvidence:
    """The evidence on one rank while a step is late.

    peer: the rank.
    endpoint: result of a query to its health endpoint.
    status: its last run status.
    age: seconds since a status last arrived through the rendezvous store. freshness: the class of this age.
    reachable: whether any health endpoint on its host has responded.
    """

    peer: Peer
    endpoint: EndpointResult
    freshness: Freshness = Freshness.NONE
    status: RunStatusRecord = field(default_factory=RunStatusRecord)
    age: float = 0.0
    reachable: bool = False

    @property
    def verdict(self) -> Verdict:
        """The diagnosed state of the rank."""
        return diagnose(self.freshness, self.endpoint, self.reachable)

    @property
    def is_lost(self) -> bool:
        """Whether the rank is frozen, gone or unreachable, or traffic with it is impaired."""
        return self.verdict.is_dead or self.verdict == Verdict.IMPAIRED

    @property
    def is_waiting(self) -> bool:
        """Whether the rank runs and waits for others in a collective."""
        return self.verdict == Verdict.RUNS and self.status.waits


def describe_rank(each: RankEvidence) -> str:
    """The diagnosis of one rank as a sentence without a full stop: "rank 0 (tower) waits in sync".

    each: the evidence on that rank.
    """
    peer, status, verdict = each.peer, each.status, each.verdict
    if verdict == Verdict.ABSENT:
        return (
            f"{peer} has not connected to the rendezvous store (`ansible-playbook status.yml` shows whether "
            "it runs)"
        )
    if verdict == Verdict.UNHEARD:
        return f"{peer} has published no status since {status.position}, {each.age:.0f} s ago"
    if verdict == Verdict.IMPAIRED:
        return f"{_impairment(each)}: {DOCTOR}"
    if verdict.is_dead:
        return f"{peer} {_death(each)}"
    if each.is_waiting:
        return f"{peer} waits in {status.position}{_down(status)}"
    return f"{peer} has been in {status.position} for {status.phase_seconds:.0f} s{_effort(status)}"


def _death(each: RankEvidence) -> str:
    last = "" if each.status.is_empty else f", last seen in {_last_seen(each)}"
    if each.verdict == Verdict.GONE:
        return f"is gone (its host answers, the process does not exist any more){last}"
    if each.verdict == Verdict.FROZEN:
        return f"is frozen (its host takes the connection, the process does not answer){last}"
    at = f" at {each.peer.address}" if each.peer.address else ""
    return f"cannot be reached (its host does not answer{at}: down, asleep or cut off){last}"


def _impairment(each: RankEvidence) -> str:
    """The impaired traffic with a rank as a sentence without a full stop; the evidence is in brackets."""
    result = {
        EndpointResult.CUT_SHORT: "packets of full size do not arrive at its health endpoint",
        EndpointResult.REFUSES: "the connection to its health endpoint is refused",
        EndpointResult.SILENT: "its health endpoint takes the connection and does not answer",
    }.get(each.endpoint, "its health endpoint cannot be reached")
    if each.freshness == Freshness.FRESH:
        result = f"its status arrived {each.age:.0f} s ago, but {result}"
    elif each.endpoint == EndpointResult.UNREACHABLE:
        result = f"its host answers, but {result}"
    return f"traffic with {each.peer} is impaired ({result})"


def _last_seen(each: RankEvidence) -> str:
    return f"{each.status.position} {each.age:.0f} s ago"


def _down(status: RunStatusRecord) -> str:
    return f" (its interface {status.interface} is down)" if status.up is False else ""


def _arrives(each: RankEvidence) -> str:
    status = each.status
    if status.received is None:
        return f"{each.peer}{_down(status)}"
    rate = f"{status.received / 1000:,.0f} kB/s arrive at {status.interface}"
    return f"{rate} of {each.peer}{_down(status)}"


def _effort(status: RunStatusRecord) -> str:
    """CPU share, throttling and high temperature of a computing rank in brackets; "" if none is known."""
    notes = []
    if status.cpu is not None:
        verdict = "it computes slowly: " if status.cpu >= BUSY else ""
        verdict = "it does not compute: " if status.cpu < IDLE else verdict
        notes.append(f"{verdict}its thread uses {100 * status.cpu:.0f} % of a core")
    if status.throttled:
        notes.append("throttled")
    if status.temperature is not None and status.temperature >= HOT:
        notes.append(f"{status.temperature:.0f} °C")
    return f" ({', '.join(notes)})" if notes else ""


def describe_delay(evidence: Sequence[RankEvidence]) -> str:
    """One sentence on a late step, with a clause for each rank and without a full stop.

    evidence: the evidence on each rank. The ranks that delay the others come first.
    """
    waiting = [each for each in evidence if each.is_waiting]
    if len(waiting) == len(evidence) > 1:
        phases = sorted({each.status.position for each in waiting})
        seconds = min(each.status.phase_seconds for each in waiting)
        return (
            f"all ranks have waited in {' and '.join(phases)} for {seconds:.0f} s: the network between them "
            f"is slow or interrupted; the run continues within two minutes after it is fixed ({DOCTOR}): "
            + ", ".join(map(_arrives, waiting))
        )
    missing = [each for each in evidence if each.verdict.is_dead]
    missing += [each for each in evidence if each.verdict == Verdict.IMPAIRED]
    others = [each for each in evidence if not each.is_waiting and each not in missing]
    # The rank that has been in its phase for longest delays the others.
    others.sort(key=lambda each: -each.status.phase_seconds)
    return "; ".join(describe_rank(each) for each in [*missing, *others, *waiting])


def describe_loss(evidence: Sequence[RankEvidence], fallback: str, stood_still: float = 0.0) -> str:
    """The reason why an attempt ends, as sentences.

    They name the ranks that are lost (gone, frozen or unreachable), with a remedy, and the ranks with which
    traffic is impaired. evidence: what is known of each rank. fallback: the first sentence if no rank is
    lost; "" for none. stood_still: the seconds for which this process did not run, for example because its
    host was suspended; 0 is not mentioned.
    """
    dead = [each for each in evidence if each.verdict.is_dead]
    impaired = [capitalize(describe_rank(each)) for each in evidence if each.verdict == Verdict.IMPAIRED]
    own = f"This process stood still for {stood_still:.0f} s; meanwhile: " if stood_still else ""
    sentences = [fallback] if fallback else []
    if dead:
        sentences = [f"Lost {'; '.join(f'{s.peer}: it {_death(s)}' for s in dead)}. {_remedy(dead)}"]
    return own + " ".join([*sentences, *(f"{sentence}." for sentence in impaired)])


def _remedy(dead: Sequence[RankEvidence]) -> str:
    hosts = ", ".join(dict.fromkeys(each.peer.host for each in dead))
    if all(each.verdict == Verdict.GONE for each in dead):
        return (
            f"The log of {hosts} has the reason: ansible-playbook logs.yml. If the log has none, the "
            "process was killed by hand, or by the kernel because memory ran out (to check, on that "
            "host: sudo dmesg | grep -i oom)."
        )
    if all(each.verdict == Verdict.UNREACHABLE for each in dead):
        return f"Check that {hosts} is running, awake and connected to the network."
    return f"Check whether {hosts} is stopped, suspended or out of memory."


def capitalize(sentence: str) -> str:
    """`sentence` with a capital at its start."""
    return sentence[:1].upper() + sentence[1:]
