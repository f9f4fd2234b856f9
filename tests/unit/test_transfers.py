"""Bulk transfers check the host's key, and the collections that tasks use are those of requirements.yml."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLAYS = sorted(
    path
    for top in ("roles", "playbooks", "molecule")
    for path in (ROOT / top).rglob("*.yml")
    if path.name != "molecule.yml"
) + sorted(ROOT.glob("*.yml"))
FQCN = re.compile(r"\b([a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*)\.[a-z_][a-z0-9_]*\b")


class Loader(yaml.SafeLoader):
    """Ansible's own tags, as !unsafe, are of no account here."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_scalar(node))


def documents(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader)


def mappings(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a YAML document: plays, blocks, tasks and what is in them."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from mappings(child)


def synchronizes() -> list[tuple[str, dict[str, Any]]]:
    return [
        (str(path.relative_to(ROOT)), each[name])
        for path in PLAYS
        for each in mappings(documents(path))
        for name in ("synchronize", "ansible.posix.synchronize")
        if isinstance(each.get(name), dict)
    ]


def test_every_bulk_transfer_checks_the_hosts_key_as_the_inventory_says() -> None:
    """synchronize does not by default: it puts StrictHostKeyChecking=no before the inventory's options."""
    found = synchronizes()
    assert {path for path, _ in found} >= {
        "roles/runtime/tasks/update.yml",
        "roles/dataset/tasks/send.yml",
        "roles/run_fetch/tasks/host.yml",
    }
    unchecked = [path for path, options in found if options.get("verify_host") is not True]
    assert unchecked == [], "without verify_host: true rsync sends to whoever answers"
    assert [path for path, options in found if options.get("use_ssh_args") is not True] == []


OFF = re.compile(
    r"StrictHostKeyChecking[ =:\"']+(no|off|accept-new)\b"
    r"|host_key_checking[ =:\"'\],]+(false|no|off|0)\b"
    r"|verify_host[ =:]+(false|no|off)\b"
    r"|UserKnownHostsFile[ =:\"']+/dev/null",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "line",
    ["-o StrictHostKeyChecking=no", "host_key_checking = False", 'ANSIBLE_HOST_KEY_CHECKING": "0"'],
)
def test_what_switches_host_key_checks_off_is_recognised(line: str) -> None:
    assert OFF.search(line)


def test_nothing_switches_host_key_checks_off() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name and not name.endswith("test_transfers.py")]
    found = []
    for path in paths:
        if path.suffix not in {".md", ".png", ".svg", ".parquet"} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(ROOT)}: {hit[0]}" for hit in OFF.finditer(text)]
    assert found == []


def test_requirements_name_the_collections_that_are_used() -> None:
    used = {
        match[1]
        for path in PLAYS
        for each in mappings(documents(path))
        for key in each
        if isinstance(key, str) and (match := FQCN.fullmatch(key))
    }
    # Filters, tests and lookups of a collection stand inside of values and templates.
    inside = re.compile(r"(?:\||\bis|\bis not|lookup\(['\"]|query\(['\"])\s*" + FQCN.pattern)
    for path in [*PLAYS, *(ROOT / "roles").rglob("*.j2")]:
        used |= {match[1] for match in inside.finditer(path.read_text())}
    listed = yaml.safe_load((ROOT / "requirements.yml").read_text())["collections"]
    assert {each["name"] for each in listed} == used - {"ansible.builtin", "nanofleet.fleet"}
