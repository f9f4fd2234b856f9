"""What doctor says of ports between hosts."""

from __future__ import annotations

import pytest
from measured_fleet import DROP, all_findings, fleet, only, shut


@pytest.mark.parametrize("names", [("tower",), ("tower", "laptop"), ("tower", "laptop", "attic")])
def test_nothing_is_found_where_nothing_is_wrong(names: tuple[str, ...]) -> None:
    assert all_findings(fleet(*names)) == []


def test_a_range_blocked_one_way_names_the_rule_and_what_deletes_it() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": [DROP]}
    found = only(measured)
    assert (found["kind"], found["host"], found["peer"]) == ("blocked-ports", "laptop", "tower")
    assert "tower gets no answer from laptop on Gloo's range 20000-20999" in found["problem"]
    assert "the other way is open" in found["problem"]
    assert found["remedy"] == f"{DROP['remedy']}  (on laptop)"


def test_part_of_the_range_is_named_by_its_ports() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["ways"]["laptop"]["ports"][2].update(state="filtered")
    assert "on port 20999 of Gloo's range" in only(measured)["problem"]


@pytest.mark.parametrize(
    ("state", "words"),
    [("filtered", "gets no answer"), ("refused", "is refused"), ("unreachable", "cannot reach")],
)
def test_a_blocked_store_port_is_told_with_how_it_is_blocked(state: str, words: str) -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "laptop", "tower", state, "store", detail="No route to host")
    found = only(measured)
    assert (found["kind"], found["host"]) == ("blocked-store", "tower")
    assert words in found["problem"]
    assert "store's port 29500" in found["problem"]
    assert "-K" in found["remedy"], "without root nobody knows the rule"


def test_ufw_without_a_rule_for_the_peer_is_mended_by_setup() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = {"ufw": "active", "allows": [], "rules": []}
    found = only(measured)
    assert "no rule that lets tower in" in found["problem"]
    assert found["remedy"] == "ansible-playbook setup.yml"
    allow = {**DROP, "source": "10.0.0.1"}
    measured["laptop"]["firewall"] = {"ufw": "active", "allows": [allow], "rules": []}
    assert "another firewall" in only(measured)["problem"]


def test_rules_for_others_are_not_blamed() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "tower", "laptop", "filtered")
    for innocent in (
        {"source": "10.0.0.9"}, {"ports": "22,80"}, {"protocol": "udp"}, {"length": "1301:65535"},
        {"chain": "FORWARD"}, {"source": "! 10.0.0.0/24"},
    ):  # fmt: skip
        measured["laptop"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": [{**DROP, **innocent}]}
        assert "No rule for it was found" in only(measured)["problem"], innocent
    for guilty in ({"source": ""}, {"source": "10.0.0.0/8"}, {"ports": ""}, {"ports": "20000-20999"}):
        measured["laptop"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": [{**DROP, **guilty}]}
        assert "The rule on laptop is" in only(measured)["problem"], guilty


def test_a_rule_of_the_sender_is_found_there() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": []}
    rule = {**DROP, "chain": "OUTPUT", "source": "10.0.0.2", "remedy": "sudo iptables -D OUTPUT"}
    measured["tower"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": [rule]}
    found = only(measured)
    assert (found["host"], found["peer"]) == ("tower", "laptop")
    assert found["remedy"] == "sudo iptables -D OUTPUT  (on tower)"


def test_one_rule_that_closes_many_ways_is_one_finding_that_names_them() -> None:
    measured = fleet("tower", "laptop", "attic")
    rule = {**DROP, "source": ""}
    measured["laptop"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": [rule]}
    for host in ("tower", "attic"):
        shut(measured, host, "laptop", "filtered")
    assert "The same: attic to laptop." in only(measured)["problem"]


def test_ports_outside_the_range_say_that_the_range_was_not_narrowed() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["port_range"] = [32768, 60999]
    for port in measured["tower"]["ways"]["laptop"]["ports"]:
        if port["picked"]:
            port.update(port=41234, state="filtered")
    found = only(measured)
    assert found["kind"] == "range"
    assert "32768-60999" in found["problem"]
    assert found["remedy"] == "ansible-playbook setup.yml"


def test_another_hosts_answer_is_misrouted() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "tower", "laptop", "misrouted", detail="tower")
    found = only(measured)
    assert found["kind"] == "misrouted"
    assert "10.0.0.2 tower reaches tower instead" in found["problem"]


def test_no_answer_at_all_from_a_host_that_the_controller_reaches() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "tower", "laptop", "filtered")
    measured["tower"]["ways"]["laptop"].update(up=False, rtt_ms=None, mtu=None)
    found = only(measured)
    assert found["kind"] == "no-way"
    assert "fleet_address of laptop" in found["remedy"]


def test_silence_and_other_programs_are_told_apart() -> None:
    for state in ("silent", "foreign"):
        measured = fleet("tower", "laptop")
        shut(measured, "tower", "laptop", state)
        found = only(measured)
        assert found["kind"] == state
        assert "ss -Hltnp" in found["remedy"]
