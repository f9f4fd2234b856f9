"""Who reaches the ports of a run: a host beside the fleet scans both of its hosts while they train.

Three hosts, of which the inventory lists two. With ufw active, inactive and absent, over IPv4 and IPv6, the
host that is left out reaches SSH and nothing else, and a host of the fleet reaches all that a run needs.

    pytest tests/e2e/test_exposure.py
    NANOFLEET_SECURITY_PAGE=1 pytest tests/e2e/test_exposure.py      # and write the table of docs/security.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from port_range import HIGH, LOW

from .lab import ROOT, Fleet
from .three import NAME, TINY, Three

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PAGE = ROOT / "docs" / "security.md"
FIREWALLS = {
    "active": "ufw --force enable",
    "inactive": "ufw disable",
    "absent": "ufw disable; mv /usr/sbin/ufw /usr/sbin/ufw.away",
}
"""What makes ufw so; `absent` begins as it is installed."""


HEAD = [
    "| ufw | over | scanned from | ssh 22 | store 29500 | tracker 5000 | Gloo, health endpoint |",
    "|---|---|---|---|---|---|---|",
]


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    """Rows of the page's table."""
    found: list[str] = []
    yield found
    if os.environ.get("NANOFLEET_SECURITY_PAGE"):
        write_page(found)


def write_page(rows: list[str]) -> None:
    before, _mark, rest = PAGE.read_text().partition("<!-- scan -->\n")
    table = "\n".join([*HEAD, *rows])
    PAGE.write_text(f"{before}<!-- scan -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")


def row(firewall: str, address: str, source: str, listening: list[int], seen: dict[int, str]) -> str:
    def cell(port: int) -> str:
        return (seen.get(port) or "no answer") if port in listening else "(no listener)"

    ranks = [port for port in listening if LOW <= port <= HIGH]
    reached = sum(seen.get(port) == "open" for port in ranks)
    family = "IPv6" if ":" in address else "IPv4"
    cells = [firewall, family, source, cell(22), cell(29500), cell(5000), f"{reached} of {len(ranks)} open"]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("firewall", FIREWALLS)
def test_only_the_fleet_reaches_the_ports_of_a_run(
    three: Three, dataset: Path, rows: list[str], firewall: str
) -> None:
    for host in (1, 2):
        three.inside(host, FIREWALLS[firewall])
    try:
        set_up = three.home.play("setup.yml", data_dir=dataset).stdout
        assert "IPAddressDeny= has no effect" not in set_up
        three.home.play("train.yml", run_id=firewall, **TINY)
        check(three, firewall, rows)
    finally:
        three.home.play("stop.yml", stop_now=True)
        for host in (1, 2):
            three.inside(host, "test ! -e /usr/sbin/ufw.away || mv /usr/sbin/ufw.away /usr/sbin/ufw")


def check(three: Three, firewall: str, rows: list[str]) -> None:
    """Scan both hosts from outside, and each from the other, over both families."""
    for host, peer in ((1, 2), (2, 1)):
        listening = three.listeners(host)
        ranks = [port for port in listening if LOW <= port <= HIGH]
        assert len(ranks) >= 2, "Gloo's listener and the health endpoint"
        assert (29500 in listening, 5000 in listening) == (host == 1, host == 1)
        for address in (three.addresses[host - 1], f"fd42::1{host}"):
            seen = three.scan(3, address)
            printed = f"host {host}, {address}, ufw {firewall}"
            assert seen.pop(22, "") == "open", f"{printed}: the scan itself works"
            if host == 1:
                rows.append(row(firewall, address, "a host outside", listening, {22: "open", **seen}))
            assert [port for port, answer in seen.items() if answer == "open"] == [], printed
        within = three.scan(peer, three.addresses[host - 1], *listening)
        if host == 1:
            rows.append(row(firewall, three.addresses[0], "a host of the fleet", listening, within))
        assert [port for port in listening if within.get(port) != "open"] == [], (
            f"the fleet reaches host {host}"
        )


def test_a_fleet_on_ipv6_is_closed_as_well(three: Three, dataset: Path, tmp_path: Path) -> None:
    """Store and tracker by IPv6 addresses, without ufw."""
    inventory = tmp_path / "home" / "hosts.yml"
    inventory.parent.mkdir()
    assert three.home.inventory is not None
    text = three.home.inventory.read_text()
    for number in (1, 2):
        text = text.replace(
            f"{NAME}-{number}:\n", f"{NAME}-{number}:\n      fleet_address: fd42::1{number}\n"
        )
    # Gloo takes an interface's first address, IPv4 before IPv6, so both families are in play.
    inventory.write_text(text.replace("  vars:\n", "  vars:\n    fleet_id: home\n"))
    six = Fleet(three.home.workdir, inventory)
    for host in (1, 2):
        three.inside(host, "ufw disable")
    six.play("setup.yml", data_dir=dataset)
    six.play("train.yml", run_id="six", **TINY)
    try:
        assert "[fd42::11]:5000" in three.inside(1, "ss -Hltn"), "the tracker listens there"
        for address in ("fd42::11", three.addresses[0]):
            seen = three.scan(3, address)
            assert (seen.pop(22), [port for port, printed in seen.items() if printed == "open"]) == (
                "open",
                [],
            )
        assert three.scan(2, "fd42::11", 5000, 29500) == {5000: "open", 29500: "open"}
    finally:
        six.play("stop.yml", stop_now=True)
