"""A network that is cut, cut one way, or slow, under one run: what its ranks say, and that it continues."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .site import COORDINATOR, IMPATIENT, WORKER, Site

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

DOWN = "podman exec {name} ip link set eth0 down"
UP = "podman exec {name} ip link set eth0 up && podman exec {name} ip route replace default via {gateway}"
DROP = "iptables -{} INPUT -s {} -j DROP"
NO_LARGE = "iptables -{} OUTPUT -d {} -p tcp -m length --length 701:65535 -j DROP"
SLOW = "tc qdisc add dev eth0 root tbf rate 100kbit burst 4kb latency 400ms"


@pytest.fixture(scope="module")
def run(site: Site) -> Iterator[str]:
    with site.running("links") as run_id:
        yield run_id


def test_a_link_down_for_twenty_seconds_costs_no_attempt(site: Site, run: str) -> None:
    started = time.monotonic()

    def fix() -> None:
        time.sleep(max(0.0, 20 - (time.monotonic() - started)))
        site.outside(UP, WORKER)

    site.survives(
        run,
        "link down for 20 s",
        lambda: site.outside(DOWN, WORKER),
        "cannot be reached",
        within=IMPATIENT + 10,
        fix=fix,
        restarts=False,
    )


def test_a_link_down_for_long_is_named_and_the_run_comes_back_with_it(site: Site, run: str) -> None:
    """The attempt ends; the next ones wait for the host in vain until the link is there again."""
    site.survives(
        run,
        "link down for good",
        lambda: site.outside(DOWN, WORKER),
        "retryable:",
        "Lost rank 1",
        "cannot be reached",
        within=2 * IMPATIENT + 15,
        fix=lambda: (time.sleep(30), site.outside(UP, WORKER)),
    )


def test_packets_dropped_one_way(site: Site, run: str) -> None:
    peer = site.addresses[COORDINATOR - 1]
    site.survives(
        run,
        "packets dropped one way",
        lambda: site.inside(WORKER, DROP.format("I", peer)),
        "cannot be reached",
        within=IMPATIENT + 15,
        fix=lambda: site.inside(WORKER, DROP.format("D", peer)),
        restarts=False,
    )


def test_a_link_of_100_kbit(site: Site, run: str) -> None:
    site.survives(
        run,
        "a link of 100 kbit/s",
        lambda: site.inside(WORKER, SLOW),
        "the network between them is slow or interrupted",
        "kB/s arrive at eth0",
        within=IMPATIENT + 30,
        fix=lambda: site.inside(WORKER, "tc qdisc del dev eth0 root"),
        restarts=False,
    )


def test_large_packets_dropped_one_way(site: Site, run: str) -> None:
    """The rank lives and its small packets arrive: it is not called frozen."""
    peer = site.addresses[COORDINATOR - 1]
    awaited = site.survives(
        run,
        "packets above 700 bytes dropped one way",
        lambda: site.inside(WORKER, NO_LARGE.format("I", peer)),
        "raffic with rank 1",
        "packets of full size do not arrive",
        "`ansible-playbook doctor.yml` finds the fault",
        within=IMPATIENT + 15,
        fix=lambda: site.inside(WORKER, NO_LARGE.format("D", peer)),
        restarts=False,
    )
    assert "is frozen" not in awaited.log


def test_large_packets_dropped_for_good_end_the_attempt_and_doctor_names_the_rule(
    site: Site, run: str
) -> None:
    """Later than the death of a rank would end it."""
    peer = site.addresses[COORDINATOR - 1]
    doctor: list[str] = []

    def fix() -> None:
        doctor.append(site.fleet.play("doctor.yml", fails=True).stdout)
        site.inside(WORKER, NO_LARGE.format("D", peer))

    awaited = site.survives(
        run,
        "packets above 700 bytes dropped for good",
        lambda: site.inside(WORKER, NO_LARGE.format("I", peer)),
        "retryable:",
        "raffic with rank 1",
        "is impaired",
        within=7 * IMPATIENT + 15,
        fix=fix,
    )
    assert "Lost rank" not in awaited.line
    assert "is frozen" not in awaited.log
    found = " ".join(doctor[0].split())
    assert "are lost without an error" in found
    cause = f"This firewall rule on {site.names[WORKER - 1]} is the cause: "
    assert f"{cause}iptables -A OUTPUT -d {peer}/32" in found
