"""Who is where when a run does not go on, in sentences.

"rank 1 (laptop) has been in backward of step 812 for 94 s (98 % of a core); rank 0 (tower) waits in sync"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.distributed.process_group import Peer
from trainer.health.diagnosis import Endpoint, Status, Verdict, diagnose

BUSY, IDLE = 0.5, 0.1  # of a core, used by the thread that trains
HOT = 90.0  # degrees Celsius

DOCTOR = "`ansible-playbook doctor.yml` finds the fault"


@dataclass(frozen=True)
class Sighting:
    """The evidence on a rank: its endpoint, its run status of `age` seconds, its host's reachability."""

    peer: Peer
    endpoint: Endpoint
    status: Status = Status.NONE
    words: Mapping[str, Any] = field(default_factory=dict)
    age: float = 0.0
    reachable: bool = False

    @property
    def verdict(self) -> Verdict:
        return diagnose(self.status, self.endpoint, self.reachable)

    @property
    def is_lost(self) -> bool:
        """Whether the run cannot go on with it as it is."""
        return self.verdict.is_dead or self.verdict == Verdict.IMPAIRED

    @property
    def waits(self) -> bool:
        return self.verdict == Verdict.RUNS and bool(self.words.get("waits"))


def where(words: Mapping[str, Any]) -> str:
    """The place that words of a rank tell of: backward of step 812, load, evaluate after step 250."""
    phase, step = words.get("phase") or "load", int(words.get("step") or 0)
    if words.get("stage") == "step":
        return f"{phase} of step {step + 1}"
    return f"{phase} after step {step}" if phase in ("evaluate", "checkpoint", "done") else str(phase)


def describe(sighting: Sighting) -> str:
    """What is to be said of one rank."""
    peer, words, verdict = sighting.peer, sighting.words, sighting.verdict
    if verdict == Verdict.ABSENT:
        return f"{peer} has not arrived"
    if verdict == Verdict.UNHEARD:
        return f"{peer} was{_last_seen(sighting)}"
    if verdict == Verdict.IMPAIRED:
        return f"{_impairment(sighting)}: {DOCTOR}"
    if verdict.is_dead:
        return f"{peer} {_death(sighting)}"
    if sighting.waits:
        return f"{peer} waits in {where(words)}{_down(words)}"
    return f"{peer} has been in {where(words)} for {words.get('phase_seconds', 0):.0f} s{_effort(words)}"


def _death(sighting: Sighting) -> str:
    last = f",{_last_seen(sighting)}" if sighting.words else ""
    if sighting.verdict == Verdict.GONE:
        return f"is gone (its host answers, the process does not exist any more){last}"
    if sighting.verdict == Verdict.FROZEN:
        return f"is frozen (its host takes the connection, the process does not answer){last}"
    at = f" at {sighting.peer.address}" if sighting.peer.address else ""
    return f"cannot be reached (its host does not answer{at}: down, asleep or cut off){last}"


def _impairment(sighting: Sighting) -> str:
    """The traffic to a rank that runs, or may run, and the evidence in brackets."""
    result = {
        Endpoint.CUT_SHORT: "its health endpoint answers, but packets of full size do not arrive",
        Endpoint.REFUSES: "the connection to its health endpoint is refused",
        Endpoint.SILENT: "its health endpoint takes the connection and does not answer",
    }.get(sighting.endpoint, "its health endpoint cannot be reached")
    if sighting.status == Status.FRESH:
        result = f"its status arrived {sighting.age:.0f} s ago, but {result}"
    elif sighting.endpoint == Endpoint.UNREACHABLE:
        result = f"its host answers, but {result}"
    return f"traffic with {sighting.peer} is impaired ({result})"


def _last_seen(sighting: Sighting) -> str:
    return f" last seen in {where(sighting.words)} {sighting.age:.0f} s ago"


def _down(words: Mapping[str, Any]) -> str:
    return f" (its interface {words['interface']} is down)" if words.get("up") is False else ""


def _arrives(sighting: Sighting) -> str:
    words = sighting.words
    if words.get("received") is None:
        return f"{sighting.peer}{_down(words)}"
    rate = f"{words['received'] / 1000:,.0f} kB/s arrive at {words['interface']}"
    return f"{rate} of {sighting.peer}{_down(words)}"


def _effort(words: Mapping[str, Any]) -> str:
    """How busy a rank is that works, and what slows it down, in brackets."""
    notes = []
    cpu = words.get("cpu")
    if cpu is not None:
        verdict = "slow: " if cpu >= BUSY else "idle: " if cpu < IDLE else ""
        notes.append(f"{verdict}{100 * cpu:.0f} % of a core")
    if words.get("throttled"):
        notes.append("throttled")
    if (words.get("temperature") or 0) >= HOT:
        notes.append(f"{words['temperature']:.0f} °C")
    return f" ({', '.join(notes)})" if notes else ""


def blame(sightings: Sequence[Sighting]) -> str:
    """One sentence on all ranks, those that the others wait for first."""
    waiting = [sighting for sighting in sightings if sighting.waits]
    if len(waiting) == len(sightings) > 1:
        places = sorted({where(sighting.words) for sighting in waiting})
        seconds = min(float(sighting.words.get("phase_seconds", 0)) for sighting in waiting)
        return (
            f"all ranks have waited in {' and '.join(places)} for {seconds:.0f} s: the network between them "
            f"is slow, or was cut, and they go on within two minutes of its mending ({DOCTOR}): "
            + ", ".join(map(_arrives, waiting))
        )
    missing = [sighting for sighting in sightings if sighting.verdict.is_dead]
    missing += [sighting for sighting in sightings if sighting.verdict == Verdict.IMPAIRED]
    others = [sighting for sighting in sightings if not sighting.waits and sighting not in missing]
    # Who has been at it longest is who is waited for.
    others.sort(key=lambda sighting: -float(sighting.words.get("phase_seconds", 0)))
    return "; ".join(describe(sighting) for sighting in [*missing, *others, *waiting])


def lost(sightings: Sequence[Sighting], fallback: str, stood_still: float = 0.0) -> str:
    """The sentence for a collective that failed: who of the others is lost, and how; else `fallback`.

    Impaired traffic is named in both cases.

    stood_still: seconds for which this rank itself did not run, in which the others may have given it up.
    """
    dead = [sighting for sighting in sightings if sighting.verdict.is_dead]
    impaired = [capital(describe(each)) for each in sightings if each.verdict == Verdict.IMPAIRED]
    own = f"This process itself had stood still for {stood_still:.0f} s; meanwhile: " if stood_still else ""
    if dead:
        said = [f"Lost {'; '.join(f'{s.peer}: it {_death(s)}' for s in dead)}. {_remedy(dead)}"]
    else:
        said = [fallback] if fallback else []
    return own + " ".join([*said, *(f"{sentence}." for sentence in impaired)])


def _remedy(dead: Sequence[Sighting]) -> str:
    hosts = ", ".join(dict.fromkeys(sighting.peer.host for sighting in dead))
    if all(sighting.verdict == Verdict.GONE for sighting in dead):
        return f"Its log on {hosts} has the reason; none there: it was killed, by hand or for want of memory."
    if all(sighting.verdict == Verdict.UNREACHABLE for sighting in dead):
        return f"Look whether {hosts} is up, awake and on the network."
    return f"Look whether {hosts} is stopped, suspended or starved of memory."


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
