"""The diagnosis of a rank: a table gives the verdict for its run status, its health endpoint and its host.

    diagnose(Freshness.FRESH, EndpointResult.SILENT, reachable=True)    # Verdict.IMPAIRED

docs/diagnosis.md explains the same table to a reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

FRESH_SECONDS = 10.0  # a rank publishes its status every second; a loaded host adds delay


class Freshness(StrEnum):
    """The age of the last run status that has arrived from a rank through the rendezvous store.

    FRESH: less than FRESH_SECONDS. STALE: older. NONE: no status has arrived.
    """

    FRESH = "fresh"
    STALE = "stale"
    NONE = "none"


class EndpointResult(StrEnum):
    """The result of a query to a rank's health endpoint.

    ANSWERS: the rank has answered. CUT_SHORT: small packets pass, packets of full size do not.
    REFUSES: the connection was refused, or closed by something that is not this rank.
    SILENT: the kernel accepted the connection, and the process sent nothing.
    UNREACHABLE: there was no connection. UNKNOWN: the address of the endpoint has not arrived yet.
    """

    ANSWERS = "answers"
    CUT_SHORT = "cut short"  # a small packet came back; packets of full size do not pass
    REFUSES = "refuses"  # the connection was refused, or closed by something that is not this rank
    SILENT = "silent"  # the kernel accepted the connection; the process sent nothing
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"  # its address has not arrived yet


class Verdict(StrEnum):
    """The diagnosed state of a rank; `describe_rank` in report.py has a sentence for each.

    RUNS: its process runs. IMPAIRED: it runs, but not all traffic with it passes.
    FROZEN: its process does not run. GONE: its process has ended. UNREACHABLE: its host does not answer.
    UNHEARD: the address of its health endpoint is unknown and its status is stale.
    ABSENT: neither its address nor a status has arrived.
    """

    RUNS = "runs"
    IMPAIRED = "impaired"
    FROZEN = "frozen"
    GONE = "gone"
    UNREACHABLE = "unreachable"
    UNHEARD = "unheard"
    ABSENT = "absent"

    @property
    def is_dead(self) -> bool:
        """Whether the rank is frozen, gone or unreachable."""
        return self in (Verdict.FROZEN, Verdict.GONE, Verdict.UNREACHABLE)


_R, _I, _F, _G = Verdict.RUNS, Verdict.IMPAIRED, Verdict.FROZEN, Verdict.GONE
_U, _H, _A = Verdict.UNREACHABLE, Verdict.UNHEARD, Verdict.ABSENT

# A host is reachable if a health endpoint on it answered, refused or accepted a connection: this rank's own
# or that of another rank on the same host. So an unreachable host leaves only the last two endpoint results.
TABLE: Mapping[tuple[EndpointResult, bool], Mapping[Freshness, Verdict]] = {
    key: dict(zip(Freshness, verdicts, strict=True))
    for key, verdicts in {
        # endpoint, host is reachable: status fresh, stale, none
        (EndpointResult.ANSWERS, True): (_R, _R, _R),
        (EndpointResult.CUT_SHORT, True): (_I, _I, _I),
        (EndpointResult.REFUSES, True): (_I, _G, _G),
        (EndpointResult.SILENT, True): (_I, _F, _F),
        (EndpointResult.UNREACHABLE, True): (_I, _I, _I),
        (EndpointResult.UNREACHABLE, False): (_I, _U, _U),
        (EndpointResult.UNKNOWN, True): (_R, _H, _A),
        (EndpointResult.UNKNOWN, False): (_R, _H, _A),
    }.items()
}


def shows_host(endpoint: EndpointResult) -> bool:
    """Whether this result of a query shows that packets reach the rank's host and are answered."""
    return endpoint not in (EndpointResult.UNREACHABLE, EndpointResult.UNKNOWN)


def diagnose(freshness: Freshness, endpoint: EndpointResult, reachable: bool) -> Verdict:
    """The verdict on a rank, from TABLE.

    freshness: age of its last run status. endpoint: result of a query to its health endpoint. reachable:
    whether a query to another health endpoint on the same host showed that the host is reachable.
    """
    return TABLE[endpoint, reachable or shows_host(endpoint)][freshness]
