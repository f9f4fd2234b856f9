"""What the doctor measures on which host, and when a check of the fleet is due."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_measured as doctor
from measured_fleet import DROP, UFW, close_ports, fleet
from port_range import HIGH, LOW

# -- who does what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 9))
def test_rounds_hold_every_pair_once_and_no_host_twice_in_one(count: int) -> None:
    found = doctor.pairs_in_rounds(range(count))
    pairs = [frozenset(pair) for each in found for pair in each]
    assert sorted(map(sorted, pairs)) == sorted(map(list, itertools.combinations(range(count), 2)))
    for each in found:
        busy = [host for pair in each for host in pair]
        assert len(busy) == len(set(busy))
    assert len(found) <= count


def test_the_host_that_reaches_its_partner_connects_and_none_across_a_black_hole() -> None:
    measured, names = fleet("tower", "laptop"), ["tower", "laptop"]
    assert doctor.rate_rounds(names, measured) == [{"tower": "laptop"}]
    for role in ("gloo", "store"):
        close_ports(measured, "tower", "laptop", "filtered", role)
    assert doctor.rate_rounds(names, measured) == [{"laptop": "tower"}]
    measured["laptop"]["paths"]["tower"]["mtu"]["swallowed"] = True
    assert doctor.rate_rounds(names, measured) == [{}]


def test_firewalls_are_read_as_root_at_the_ends_of_a_broken_path_only() -> None:
    measured = fleet("tower", "laptop", "attic")
    assert doctor.blocked_hosts(measured) == []
    close_ports(measured, "tower", "laptop", "filtered")
    assert doctor.blocked_hosts(measured) == ["laptop", "tower"]


def test_who_rehearses_with_whom() -> None:
    measured = fleet("tower", "laptop", "attic")
    names = list(measured)
    assert doctor.can_rehearse(names, measured, 16) == {"hosts": names, "why": ""}
    close_ports(measured, "laptop", "attic", "filtered")
    found = doctor.can_rehearse(names, measured, 16)
    assert found["hosts"] == ["tower", "laptop"]
    assert "attic" in found["why"]
    assert doctor.rehearsal_part(names, measured, "attic", 16, 29500, {})["hosts"] == ["attic"]
    part = doctor.rehearsal_part(names, measured, "laptop", 16, 29500, {"depth": 12})
    assert part["config"] == {"depth": 12}
    assert (part["rank"], part["master"], part["rounds"]) == (1, "10.0.0.1", [[[0, 1]]])
    assert "add -f 3" in doctor.can_rehearse(names, fleet(*names), 2)["why"]
    without_store = doctor.can_rehearse(names[1:], fleet(*names), 16)
    assert (without_store["hosts"], "store" in without_store["why"]) == ([], True)
    measured["tower"]["installed"] = None
    assert doctor.can_rehearse(names, measured, 16)["hosts"] == []


def test_addresses_of_peers_are_those_published_else_those_of_the_inventory() -> None:
    hostvars = {
        "tower": {},
        "laptop": {
            "network_address": "10.0.0.2",
            "__doctor_listening": {"ports": [{"port": 1, "role": "gloo"}]},
        },
        "attic": {"ansible_host": "10.0.0.3", "ansible_port": 2222},
    }
    assert doctor.peers(list(hostvars), hostvars, "tower") == [
        {"host": "laptop", "address": "10.0.0.2", "ports": [{"port": 1, "role": "gloo"}], "ssh_port": 22},
        {"host": "attic", "address": "10.0.0.3", "ports": [], "ssh_port": 2222},
    ]


def test_what_was_registered_becomes_what_was_measured() -> None:
    hostvars: dict[str, Any] = {
        "tower": {
            "__doctor_held": {"active_units": [], "listeners": [{"port": 29500, "pid": 41, "user": "me"}]},
            "__doctor_host": {"facts": {"sent": 1.0, "time": 1.5}, "marks": {"boot": "b"}},
            "__doctor_answered": 2.0,
            "__doctor_listening": {
                "ports": [],
                "held": [{"port": 29500, "role": "store", "reason": "held"}],
            },
            "__doctor_probed": {"peers": {"laptop": {"ports": []}}},
            "__doctor_rates": {"peers": {"laptop": {"sent_mbit": 1.0}}},
            "__doctor_installed": {"installed": {"torch": "2.13"}},
            "__doctor_rehearsed": {"skipped": True},
        },
        "laptop": {"__doctor_held": {"unreachable": True, "msg": "timed out"}},
    }  # fmt: skip
    measured = doctor.measured(list(hostvars), hostvars)
    assert measured["tower"]["held"] == [
        {"port": 29500, "pid": 41, "user": "me", "role": "store", "reason": "held"}
    ]
    assert measured["tower"]["rates"] == {"laptop": {"sent_mbit": 1.0}}
    assert measured["tower"]["installed"] == {"torch": "2.13"}
    assert measured["tower"]["rehearsal"] is None
    assert measured["tower"]["facts"]["skew_s"] == 0
    assert (measured["laptop"]["reachable"], measured["laptop"]["why"]) == (False, "timed out")
    for result, rehearsal in (
        ({"rc": 0, "stdout": '{"error": ""}'}, {"error": ""}),
        # It is killed while it measures the speed of a step, or not.
        ({"rc": 137, "stdout": '{"predicted": null}\n'}, {"predicted": None}),
        (
            {"rc": 0, "stdout": '{"predicted": null}\n{"predicted": {"depth": 8}}'},
            {"predicted": {"depth": 8}},
        ),
        (
            {"rc": 1, "stdout": "", "stderr": "Traceback\nOSError: libtorch.so"},
            {"error": "OSError: libtorch.so"},
        ),
        ({"rc": 137, "stdout": "", "stderr": ""}, {"error": "it did not end in time"}),
    ):
        hostvars["tower"]["__doctor_rehearsed"] = result
        assert doctor.measured(["tower"], hostvars)["tower"]["rehearsal"] == rehearsal
    hostvars["tower"]["__doctor_holders"] = {"listeners": [{"port": 29500, "pid": 42}]}  # read as root
    assert doctor.measured(["tower"], hostvars)["tower"]["held"][0]["pid"] == 42


@pytest.mark.parametrize("name", ["__doctor_held", "__doctor_host", "__doctor_rules"])
def test_a_skipped_task_does_not_replace_a_result_that_is_judged(name: str) -> None:
    """A task that is skipped registers too: the reason why a host cannot be reached would be lost."""
    folder = Path(__file__).resolve().parents[2] / "roles" / "doctor" / "tasks"
    forms = [["main.yml", "hosts.yml", "root.yml", "rules.yml"], ["due.yml", "root.yml"]]
    for form in forms:
        texts = [(folder / file).read_text() for file in form]
        assert sum(text.count(f"register: {name}\n") for text in texts) <= 1


# -- due ---------------------------------------------------------------------------------------------------

SETTINGS = {"store_port": 29500, "port_low": LOW, "port_high": HIGH}
UNREAD: dict[str, dict[str, Any]] = {"tower": {}, "laptop": {}}
"""No host's firewall was read."""


def test_a_fleet_is_due_until_a_good_report_and_after_a_change() -> None:
    measured = fleet("tower", "laptop")
    state = doctor.fleet_state(measured, SETTINGS, UNREAD)
    kept = json.dumps({"state": state, "report": {}})
    assert "has not yet checked this fleet" in doctor.due(state, "", "auto")
    assert "has not yet checked this fleet" in doctor.due(state, "{broken", "auto")
    assert doctor.due(state, kept, "auto") == ""
    assert doctor.due(state, kept, "always") != ""
    assert doctor.due(state, "", "never") == ""
    unreadable = copy.deepcopy(measured)
    unreadable["laptop"]["marks"]["/etc/hosts"] = "unreadable"
    unread = doctor.fleet_state(unreadable, SETTINGS, UNREAD)
    assert doctor.due(unread, kept, "auto") == ""
    assert doctor.due(state, json.dumps({"state": unread}), "auto") == "", "read by a login of another group"
    for change, words in (
        (("marks", {"/etc/hosts": "other", "boot": "b-laptop"}), "laptop has another /etc/hosts"),
        (("marks", {"/etc/hosts": "laptop 1", "boot": "b2"}), "laptop was started"),
        (("address", "10.0.0.9"), "another address"),
        (("interface", "wlan0"), "another interface"),
    ):
        changed = copy.deepcopy(measured)
        changed["laptop"][change[0]] = change[1]
        assert words in doctor.due(doctor.fleet_state(changed, SETTINGS, UNREAD), kept, "auto")
    other = doctor.fleet_state(measured, {**SETTINGS, "store_port": 29600}, UNREAD)
    assert "ports" in doctor.due(other, kept, "auto")


def test_a_fleet_is_due_when_a_host_has_other_rules_about_the_fleet() -> None:
    def state_with(**rule: str) -> dict[str, Any]:
        rules = {"rules": [UFW, {**DROP, **rule}]}
        return doctor.fleet_state(measured, SETTINGS, {**UNREAD, "laptop": {"__doctor_rules": rules}})

    measured = fleet("tower", "laptop")
    kept = json.dumps({"state": state_with(source="192.0.2.9/32")})
    assert doctor.due(state_with(source="192.0.2.10/32"), kept, "auto") == "", "a stranger"
    for change in ({"source": "10.0.0.1/32"}, {"source": ""}):
        why = doctor.due(state_with(**change), kept, "auto")
        assert why == "laptop has another firewall since the last check without a fault"
    unread = json.dumps({"state": doctor.fleet_state(measured, SETTINGS, UNREAD)})
    assert "did not read the firewall of laptop" in doctor.due(state_with(), unread, "auto")


def test_a_settings_type_does_not_make_a_fleet_due() -> None:
    measured = fleet("tower")
    kept = json.dumps({"state": doctor.fleet_state(measured, SETTINGS, UNREAD)})
    assert (
        doctor.due(doctor.fleet_state(measured, {**SETTINGS, "store_port": "29500"}, UNREAD), kept, "auto")
        == ""
    )
