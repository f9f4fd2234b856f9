"""The decision table: every cell, its sentence, the time until it ends a run, the copy in the docs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.distributed.process_group import Peer
from trainer.health.attempt import Attempt
from trainer.health.diagnosis import (
    TABLE,
    EndpointResult,
    Freshness,
    diagnose,
    shows_host,
)
from trainer.health.report import RankEvidence, describe_delay, describe_loss
from trainer.health.run_status import RunStatus
from trainer.health.status_exchange import ReceivedStatus
from trainer.health.status_record import RunStatusRecord
from trainer.health.watchdog import Watchdog
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.outcome import Retryable

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
LAPTOP = Peer(1, "laptop", "10.0.0.2")
STATUS = RunStatusRecord(phase="sync", step=811, stage="step", phase_seconds=94.0)
DOCTOR = ": `ansible-playbook doctor.yml` finds the fault"
SEEN = ", last seen in sync of step 812 94 s ago"

RUNS = "rank 1 (laptop) has been in sync of step 812 for 94 s"
FROZEN = "rank 1 (laptop) is frozen (its host takes the connection, the process does not answer)"
GONE = "rank 1 (laptop) is gone (its host answers, the process does not exist any more)"
UNREACHABLE = (
    "rank 1 (laptop) cannot be reached (its host does not answer at 10.0.0.2: down, asleep or cut off)"
)
UNHEARD = "rank 1 (laptop) has published no status since sync of step 812, 94 s ago"
ABSENT = (
    "rank 1 (laptop) has not connected to the rendezvous store (`ansible-playbook status.yml` shows "
    "whether it runs)"
)


def impaired(evidence: str) -> str:
    return f"traffic with rank 1 (laptop) is impaired ({evidence}){DOCTOR}"


FRESH = "its status arrived 4 s ago, but "
CUT = "packets of full size do not arrive at its health endpoint"
REFUSED = "the connection to its health endpoint is refused"
SILENT = "its health endpoint takes the connection and does not answer"
CLOSED = "its health endpoint cannot be reached"

CELLS = [
    ("fresh", "answers", True, "runs", RUNS),
    ("stale", "answers", True, "runs", RUNS),
    ("none", "answers", True, "runs", RUNS),
    ("fresh", "cut short", True, "impaired", impaired(FRESH + CUT)),
    ("stale", "cut short", True, "impaired", impaired(CUT)),
    ("none", "cut short", True, "impaired", impaired(CUT)),
    ("fresh", "refuses", True, "impaired", impaired(FRESH + REFUSED)),
    ("stale", "refuses", True, "gone", GONE + SEEN),
    ("none", "refuses", True, "gone", GONE),
    ("fresh", "silent", True, "impaired", impaired(FRESH + SILENT)),
    ("stale", "silent", True, "frozen", FROZEN + SEEN),
    ("none", "silent", True, "frozen", FROZEN),
    ("fresh", "unreachable", True, "impaired", impaired(FRESH + CLOSED)),
    ("stale", "unreachable", True, "impaired", impaired(f"its host answers, but {CLOSED}")),
    ("none", "unreachable", True, "impaired", impaired(f"its host answers, but {CLOSED}")),
    ("fresh", "unreachable", False, "impaired", impaired(FRESH + CLOSED)),
    ("stale", "unreachable", False, "unreachable", UNREACHABLE + SEEN),
    ("none", "unreachable", False, "unreachable", UNREACHABLE),
    ("fresh", "unknown", True, "runs", RUNS),
    ("stale", "unknown", True, "unheard", UNHEARD),
    ("none", "unknown", True, "absent", ABSENT),
    ("fresh", "unknown", False, "runs", RUNS),
    ("stale", "unknown", False, "unheard", UNHEARD),
    ("none", "unknown", False, "absent", ABSENT),
]


@pytest.mark.parametrize(("status", "endpoint", "reachable", "verdict", "sentence"), CELLS)
def test_every_cell_has_its_verdict_and_sentence(
    status: str, endpoint: str, reachable: bool, verdict: str, sentence: str
) -> None:
    assert diagnose(Freshness(status), EndpointResult(endpoint), reachable) == verdict
    received = STATUS if status != "none" or endpoint == "answers" else RunStatusRecord()
    age = 4.0 if status == "fresh" else 94.0
    sighting = RankEvidence(LAPTOP, EndpointResult(endpoint), Freshness(status), received, age, reachable)
    assert describe_delay([sighting]) == sentence


def test_the_table_has_these_cells_and_no_other() -> None:
    cells = {(endpoint, reachable, status) for (endpoint, reachable), row in TABLE.items() for status in row}
    assert cells == {(EndpointResult(e), reachable, Freshness(s)) for s, e, reachable, *_ in CELLS}
    assert {endpoint for endpoint, _ in TABLE} == set(EndpointResult)
    for endpoint in EndpointResult:  # one that shows its host to be reachable has no row of the contrary
        assert ((endpoint, False) in TABLE) != shows_host(endpoint)
        assert all(diagnose(status, endpoint, False) for status in Freshness)


def test_a_fresh_status_is_never_called_dead() -> None:
    for endpoint in EndpointResult:
        for reachable in (True, False):
            assert not diagnose(Freshness.FRESH, endpoint, reachable).is_dead


def test_a_collective_that_failed_names_impaired_traffic() -> None:
    sighting = RankEvidence(LAPTOP, EndpointResult.SILENT, Freshness.FRESH, STATUS, 4.0, True)
    printed = describe_loss([sighting], "Timed out.")
    assert printed == f"Timed out. Traffic with rank 1 (laptop) is impaired ({FRESH}{SILENT}){DOCTOR}."
    gone = RankEvidence(Peer(2, "attic", "10.0.0.3"), EndpointResult.REFUSES)
    assert describe_loss([sighting, gone], "Timed out.").startswith("Lost rank 2 (attic): it is gone")
    assert describe_loss([sighting, gone], "Timed out.").endswith(f"{DOCTOR}.")


# -- the evidence, gathered by a watchdog ------------------------------------------------------------------


@pytest.fixture
def frozen() -> Iterator[str]:
    """The address of an endpoint whose kernel accepts and whose process does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1 {server.getsockname()[1]} secret"


@pytest.fixture
def watchdog(tmp_path: Path) -> Watchdog:
    """That of rank 0 of 3, which has heard of no other yet."""
    env = RankEnv(world_size=3, host="tower")
    return Watchdog(RunStatus(tmp_path, env, "run"), env, tmp_path, Attempt(tmp_path, env), RunLogger(env))


def refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1 {server.getsockname()[1]} secret"


def meet(watchdog: Watchdog, *ends: tuple[str, str]) -> None:
    """The other ranks: host and address of the endpoint of each."""
    peers = [Peer(rank, host, "") for rank, (host, _) in enumerate(ends, 1)]
    watchdog.set_peers(peers, {rank: endpoint for rank, (_, endpoint) in enumerate(ends, 1)})


def verdicts(watchdog: Watchdog) -> list[str]:
    return [str(each.verdict) for each in watchdog._collect_evidence(seconds=0.2)]


def hear(watchdog: Watchdog, rank: int, seconds_ago: float) -> None:
    watchdog._exchange.received[rank] = ReceivedStatus(STATUS, 1, time.monotonic() - seconds_ago)


def test_a_rank_that_published_its_status_seconds_ago_is_not_called_frozen(
    watchdog: Watchdog, frozen: str
) -> None:
    meet(watchdog, ("laptop", frozen), ("attic", frozen))
    hear(watchdog, 1, 4)
    hear(watchdog, 2, 40)
    assert verdicts(watchdog) == ["runs", "impaired", "frozen"]
    sentence = describe_delay(watchdog._collect_evidence(seconds=0.2))
    assert sentence.startswith("rank 2 (attic) is frozen")
    assert "; traffic with rank 1 (laptop) is impaired (its status arrived" in sentence


def test_a_host_is_reachable_if_another_rank_on_it_is(
    watchdog: Watchdog, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[1] == 9:
            raise TimeoutError
        return original(address, timeout=timeout)

    original: Callable[..., socket.socket] = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", connect)
    meet(watchdog, ("laptop", "127.0.0.1 9 secret"), ("laptop", frozen))
    assert verdicts(watchdog) == ["runs", "impaired", "frozen"]
    meet(watchdog, ("laptop", "127.0.0.1 9 secret"), ("attic", frozen))
    assert verdicts(watchdog) == ["runs", "unreachable", "frozen"]


def test_a_rank_that_was_just_killed_is_gone_though_its_status_is_young(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step is late it may still run; once a collective has failed, only a later status says so."""
    meet(watchdog, ("laptop", refused()), ("attic", refused()))
    hear(watchdog, 1, 4)
    hear(watchdog, 2, 4)
    assert verdicts(watchdog) == ["runs", "impaired", "impaired"]
    monkeypatch.setattr(watchdog._exchange, "publish", lambda seconds: True)
    printed = str(watchdog.explain(Retryable("Connection closed.")))
    assert printed.startswith("Lost rank 1 (laptop): it is gone")
    hear(watchdog, 1, -60)  # it publishes again, after the failure
    hear(watchdog, 2, -60)
    assert str(watchdog.explain(Retryable("Connection closed."))).startswith(
        "Connection closed. Traffic with rank 1 (laptop) is impaired"
    )


def test_the_docs_have_the_table_of_the_code() -> None:
    table = PAGE.read_text().partition("<!-- table -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [tuple(row) for row in rows] == [
        (str(endpoint), "reachable" if reachable else "not reachable", *map(str, row.values()))
        for (endpoint, reachable), row in TABLE.items()
    ]
