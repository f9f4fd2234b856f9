"""The lab of the fault suite, set up once, and the table that the suite writes.

NANOFLEET_FAULTS_LAB=NAME takes a lab that is up and set up, and leaves it so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import ROOT, Fleet
from e2e.conftest import dataset as dataset
from e2e.conftest import fleet as fleet

from .site import Row, Site

PAGE = ROOT / "docs" / "faults.md"
WHOLE = 20
"""Rows from which on the table is that of a whole run."""


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
    if len(found.rows) >= WHOLE:
        write_page(found)


def write_page(site: Site) -> None:
    """docs/faults.md's table, of what was really said."""
    before, _mark, rest = PAGE.read_text().partition("<!-- faults -->\n")
    _old, _mark, after = rest.partition("<!-- end -->")
    lines = ["| planted in a running training | seconds | what was said | then |", "|---|---|---|---|"]
    lines += [_line(row, site) for row in site.rows]
    PAGE.write_text(before + "<!-- faults -->\n" + "\n".join(lines) + "\n<!-- end -->" + after)


def _line(row: Row, site: Site) -> str:
    said = re.sub(r"^\[rank (\d+)\] ", "", " ".join(row.said.split()))
    for name, address, other, plain in zip(
        site.names, site.addresses, ("tower", "laptop"), ("10.0.0.1", "10.0.0.2"), strict=True
    ):
        said = said.replace(name, other).replace(address, plain)
    return f"| {row.fault} | {row.seconds:.0f} | {said.replace('|', '&#124;')} | {row.then} |"
