"""CONTRIBUTING names files that exist, CHANGELOG has the version, workflows pin their actions."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ADDING = (
    (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add a setting")[2].partition("## Tests")[0]
)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[\w./-]*)`", ADDING))))
def test_a_file_that_contributing_names_exists(path: str) -> None:
    assert list(ROOT.glob(path.rstrip("/").replace("NAME", "*")))


def test_contributing_names_modules_by_their_paths() -> None:
    assert not re.findall(r"`([a-z_]+\.py)`", ADDING)


def test_the_changelog_has_the_version_as_released_and_a_place_for_what_follows() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", headings[1])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_read_only(workflow: Path) -> None:
    text = workflow.read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", each) for each in used), used
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
