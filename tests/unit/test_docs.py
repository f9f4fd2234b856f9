"""What the documents may claim: no address of another project, figures with where they were measured."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_clones_this_repository_and_no_other() -> None:
    clones = re.findall(r"git clone (\S+)", (ROOT / "README.md").read_text())
    assert clones
    assert all(address.startswith("<this") for address in clones), clones


@pytest.mark.parametrize("page", [ROOT / "docs" / "performance.md", ROOT / "docs" / "ladder.md"])
def test_speeds_say_where_they_were_measured_before_the_first_of_them(page: Path) -> None:
    text = " ".join(page.read_text().split())
    first = re.search(r"\| one host \||`?tok/s", text)
    assert first
    assert "containers on one machine" in text[: first.start()]


def test_the_loss_curve_is_claimed_with_its_tolerance_and_its_exception() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    claim = text[text.index("the loss curve does not") :][:500]
    assert "1e-3" in claim
    assert "`local`" in claim


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
