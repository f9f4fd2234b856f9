"""The lab of the fault suite, set up once, and the table that the suite writes.

NANOFLEET_FAULTS_LAB=NAME takes a lab that is up and set up, and leaves it so. NANOFLEET_FAULTS_PAGE=1 writes
what was reported to docs/faults.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.lab import ROOT, Fleet

from .messages import Row
from .site import Site

PAGE = ROOT / "docs" / "faults.md"
HEAD = [
    "| fault | reported after, s | message | outcome | next step after, s | steps repeated |",
    "|---|---|---|---|---|---|",
]


@pytest.fixture(scope="session")
def site(
    request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Two hosts, set up."""
    name = os.environ.get("NANOFLEET_FAULTS_LAB", "")
    if name:
        inventory = ROOT / ".lab" / name / "inventory" / "hosts.yml"
        there = Fleet(tmp_path_factory.mktemp("runner"), inventory)
    else:
        there = request.getfixturevalue("fleet")
        there.play("setup.yml", data_dir=dataset)
    found = Site.of(there, dataset)
    yield found
    if os.environ.get("NANOFLEET_FAULTS_PAGE"):
        write_page(found)


@pytest.fixture(scope="module", autouse=True)
def _free_hosts(site: Site) -> None:
    """Nothing runs there that a test which failed has left."""
    site.clear()


def write_page(site: Site) -> None:
    """The table of docs/faults.md: the rows of these faults are new, the others as they were."""
    before, _mark, rest = PAGE.read_text().partition("<!-- faults -->\n")
    old, _mark, after = rest.partition("<!-- end -->")
    lines = {line.split(" | ")[0]: line for line in old.splitlines()[len(HEAD) :]}
    lines |= {line.split(" | ")[0]: line for line in (_line(row, site) for row in site.rows)}
    table = "\n".join([*HEAD, *lines.values()])
    PAGE.write_text(f"{before}<!-- faults -->\n{table}\n<!-- end -->{after}")


def _line(row: Row, site: Site) -> str:
    printed = re.sub(r"^\[rank (\d+)\] ", "", " ".join(row.printed.split()))
    for name, address, other, plain in zip(
        site.names, site.addresses, ("tower", "laptop"), ("10.0.0.1", "10.0.0.2"), strict=True
    ):
        printed = printed.replace(name, other).replace(address, plain)
    printed = re.sub(r"(ansible-playbook) -i \S+", r"\1", printed)  # the lab's inventory
    printed = printed.replace(str(site.data), "data")
    printed = re.sub(r"\b([a-z]+)(-\d+)?-\d{10}\b", r"\1", printed)  # runs carry the time in their names
    cost = f"{row.pause.seconds:.0f} | {row.pause.repeated}" if row.pause else "- | -"
    return f"| {row.fault} | {row.seconds:.0f} | {printed.replace('|', '&#124;')} | {row.then} | {cost} |"
