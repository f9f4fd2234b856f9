"""A host serves one fleet: the claim, who is refused, and the name of a fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils.project_folder import fleet_id
from ansible_collections.nanofleet.fleet.plugins.modules import fleet_claim
from role_files import call

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {"tower": "10.0.0.1", "laptop": "10.0.0.2"}


@pytest.mark.parametrize(
    ("inventory", "name"),
    [
        ("/home/ada/nanofleet/inventory/home/hosts.yml", "home"),
        ("/home/ada/nanofleet/inventory/home.yml", "home"),
        ("/home/ada/two pcs.ini", "two-pcs"),
        ("/srv/.lab/attic/inventory/hosts.yml", "attic"),
        ("/etc/ansible/hosts", "ansible"),
        ("/inventory/hosts.yml", "fleet"),
        ("/home/ssh/hosts.yml", "home"),
        ("", "fleet"),
        (None, "fleet"),
    ],
)
def test_a_fleet_has_the_name_of_its_inventory(inventory: str | None, name: str) -> None:
    assert fleet_id(inventory) == name


class Host:
    """A host whose claim is in a folder here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = folder / "opt" / "nanofleet" / "fleet.json", monkeypatch

    def claim(self, fleet: str, state: str = "claimed", check: bool = False, **given: Any) -> dict[str, Any]:
        return call(
            fleet_claim, self.monkeypatch, check,
            **{"path": str(self.path), "state": state, "fleet_id": fleet, "host": "laptop", "hosts": HOSTS,
               "by": "ada@desk", "at": "2026-11-23T10:00:00Z", **given},
        )  # fmt: skip

    @property
    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_a_claim_is_written_once_and_keeps_who_and_when(host: Host) -> None:
    assert host.claim("home", check=True)["changed"]
    assert not host.path.exists()
    assert host.claim("home", controller="10.0.0.9")["changed"]
    again = host.claim("home", controller="10.0.0.9", by="bob@den", at="2027-01-01T00:00:00Z")
    assert (again["changed"], again["renamed"], again["refusal"]) == (False, "", "")
    assert host.kept == {"schema": 1, "fleet_id": "home", "hosts": HOSTS, "by": "ada@desk",
                         "at": "2026-11-23T10:00:00Z", "controllers": ["10.0.0.9"]}  # fmt: skip


def test_another_fleet_is_refused_by_name_and_changes_nothing(host: Host) -> None:
    host.claim("home")
    before = host.path.read_text()
    for state in ("claimed", "checked", "absent"):
        refused = host.claim("attic", state, hosts={"shed": "10.0.0.3", "laptop": "10.0.0.2"})
        assert refused["changed"] is False
        for words in (
            "laptop serves the fleet home: tower (10.0.0.1), laptop (10.0.0.2)",
            "set up by ada@desk at 2026-11-23T10:00:00Z",
            "put fleet_id: home into group_vars/fleet.yml",
            "ansible-playbook reset.yml -e fleet_id=home -e reset_confirm=true --limit laptop",
        ):
            assert words in refused["refusal"]
    assert host.path.read_text() == before


def test_the_same_hosts_under_another_name_are_the_same_fleet(host: Host) -> None:
    host.claim("home")
    checked = host.claim("house", "checked")
    assert (checked["refusal"], checked["changed"]) == ("", False)
    assert host.claim("house")["renamed"] == "home"
    assert (host.kept["fleet_id"], host.kept["by"]) == ("house", "ada@desk")


def test_a_fleet_may_change_its_hosts(host: Host) -> None:
    host.claim("home")
    assert host.claim("home", hosts={**HOSTS, "shed": "10.0.0.3"})["changed"]
    assert "shed" in host.kept["hosts"]


def test_a_changed_membership_does_not_keep_a_run_from_being_started(host: Host) -> None:
    """train.yml by a copy of the inventory without a host; setup.yml, which removes rules, is strict."""
    host.claim("home")
    rest, shared = {"laptop": "10.0.0.2"}, {"laptop": "10.0.0.2", "shed": "10.0.0.3"}
    assert host.claim("copy", "checked", hosts=rest, partial=True)["refusal"] == ""
    assert host.claim("copy", "checked", hosts={**HOSTS, "shed": "10.0.0.3"}, partial=True)["refusal"] == ""
    assert "serves the fleet home" in host.claim("copy", "claimed", hosts=rest)["refusal"]
    assert "serves the fleet home" in host.claim("attic", "checked", hosts=shared, partial=True)["refusal"]


def test_a_host_without_a_claim_is_anybodys(host: Host) -> None:
    found = host.claim("attic", "checked")
    assert (found["failed"], found["changed"], found["refusal"], found["renamed"]) == (False, False, "", "")


def test_controllers_are_added_and_only_a_list_replaces_them(host: Host) -> None:
    host.claim("home", controller="10.0.0.9")
    second = host.claim("home", controller="fd00:0::8")
    assert (second["changed"], second["controllers"]) == (True, ["10.0.0.9", "fd00::8"])
    assert not host.claim("home", controller="10.0.0.9")["changed"], "the first one's next setup"
    for nobody in ("127.0.0.1", "::1", "fe80::1%eth0", "", "a name"):
        assert not host.claim("home", controller=nobody)["changed"]
    assert host.claim("home", controller="10.0.0.9", controllers=["10.0.0.7"])["controllers"] == [
        "10.0.0.7", "10.0.0.9",
    ]  # fmt: skip


def test_a_removal_leaves_no_empty_folder(host: Host) -> None:
    host.claim("home")
    assert host.claim("home", "absent")["removed"] == [str(host.path)]
    assert not host.path.parent.exists()
    assert host.claim("home", "absent")["changed"] is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged. Fix: read it"),
        ("[]", "is damaged. Fix: read it"),
        ('{"schema": 1}', "is damaged. Fix: read it"),
        ('{"schema": 2}', "set up by a newer release"),
    ],
)
def test_a_claim_that_cannot_be_read_stops(host: Host, text: str, says: str) -> None:
    host.path.parent.mkdir(parents=True)
    host.path.write_text(text)
    result = host.claim("home")
    assert result["failed"]
    assert says in result["msg"]
    assert says in host.claim("home", "checked")["refusal"], "so that nothing begins on the other hosts"
    assert host.path.read_text() == text
