"""Findings of the doctor about ports between hosts."""

from __future__ import annotations

import pytest
from measured_fleet import DROP, UFW, all_findings, close_ports, fleet, only
from port_range import DASHED, HIGH, LOW


@pytest.mark.parametrize("names", [("tower",), ("tower", "laptop"), ("tower", "laptop", "attic")])
def test_nothing_is_found_where_nothing_is_wrong(names: tuple[str, ...]) -> None:
    assert all_findings(fleet(*names)) == []


def test_a_range_blocked_in_one_direction_is_reported_with_the_rule_and_its_removal() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = [DROP]
    found = only(measured)
    assert (found["code"], found["host"], found["peer"]) == ("NF528", "laptop", "tower")
    assert f"tower gets no answer from laptop on Gloo's ports {DASHED}" in found["problem"]
    assert "connections from laptop to tower work." in found["problem"]
    assert found["remedy"] == f"{DROP['remedy']}  (on laptop)"


def test_part_of_the_range_is_named_by_its_ports() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["paths"]["laptop"]["ports"][2].update(state="filtered")
    assert f"on Gloo's port {HIGH}:" in only(measured)["problem"]


@pytest.mark.parametrize(
    ("state", "words"),
    [("filtered", "gets no answer"), ("refused", "is refused"), ("unreachable", "cannot reach")],
)
def test_a_blocked_store_port_is_reported_with_its_state(state: str, words: str) -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "laptop", "tower", state, "store", detail="No route to host")
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF527", "tower")
    assert words in found["problem"]
    assert "store's port 29500" in found["problem"]
    assert "-K" in found["remedy"], "without root nobody knows the rule"


def test_setup_fixes_ufw_without_a_rule_for_the_peer() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["firewall"] = []
    close_ports(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = [UFW]
    found = only(measured)
    assert "no rule that lets tower in" in found["problem"]
    assert found["remedy"] == "ansible-playbook setup.yml"
    allow = {**DROP, "firewall": "ufw", "verdict": "accept", "source": "10.0.0.1"}
    measured["laptop"]["firewall"] = [UFW, allow]
    assert "the cause may be a router" in only(measured)["problem"]


def test_rules_about_other_packets_are_not_the_cause() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["firewall"] = []
    close_ports(measured, "tower", "laptop", "filtered")
    for innocent in (
        {"source": "10.0.0.9"}, {"ports": "22,80"}, {"protocol": "udp"}, {"length": "1301:65535"},
        {"chain": "FORWARD"}, {"source": "! 10.0.0.0/24"},
    ):  # fmt: skip
        measured["laptop"]["firewall"] = [{**DROP, **innocent}]
        assert "No firewall rule of" in only(measured)["problem"], innocent
    for guilty in ({"source": ""}, {"source": "10.0.0.0/8"}, {"ports": ""}, {"ports": f"{DASHED}"}):
        measured["laptop"]["firewall"] = [{**DROP, **guilty}]
        assert "This firewall rule on laptop is the cause: " in only(measured)["problem"], guilty


def test_a_rule_of_the_sender_is_found_there() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = []
    rule = {**DROP, "chain": "OUTPUT", "source": "10.0.0.2", "remedy": "sudo iptables -D OUTPUT"}
    measured["tower"]["firewall"] = [rule]
    found = only(measured)
    assert (found["host"], found["peer"]) == ("tower", "laptop")
    assert found["remedy"] == "sudo iptables -D OUTPUT  (on tower)"


def test_a_rule_about_answers_is_the_cause_only_if_it_covers_all_ephemeral_ports() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = []
    measured["tower"]["firewall"] = [{**DROP, "source": "10.0.0.2", "ports": "20500"}]
    assert "tower that may drop" not in only(measured)["problem"]
    assert "No firewall rule of" in only(measured)["problem"]
    measured["tower"]["firewall"] = [{**DROP, "source": "10.0.0.2", "ports": "1024-65535"}]
    assert "This firewall rule on tower is the cause: " in only(measured)["problem"]


def test_a_policy_about_requests_precedes_a_rule_about_answers() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"] = [UFW]
    measured["tower"]["firewall"] = [{**DROP, "source": "10.0.0.2"}]
    assert only(measured)["remedy"] == "ansible-playbook setup.yml"


def test_one_rule_that_closes_many_paths_is_one_finding_that_names_them() -> None:
    measured = fleet("tower", "laptop", "attic")
    rule = {**DROP, "source": ""}
    measured["laptop"]["firewall"] = [rule]
    for host in ("tower", "attic"):
        close_ports(measured, host, "laptop", "filtered")
    assert "The same: attic to laptop." in only(measured)["problem"]


def test_ports_outside_the_range_show_that_the_range_was_not_narrowed() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["port_range"] = [32768, 60999]
    for port in measured["tower"]["paths"]["laptop"]["ports"]:
        if port["picked"]:
            port.update(port=41234, state="filtered")
    found = only(measured)
    assert found["code"] == "NF526"
    assert "32768 to 60999" in found["problem"]
    assert found["remedy"] == "ansible-playbook setup.yml"


def test_another_hosts_answer_is_misrouted() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "misrouted", detail="tower")
    found = only(measured)
    assert found["code"] == "NF522"
    assert "10.0.0.2, the address of laptop, it reaches tower instead" in found["problem"]


def test_no_answer_at_all_from_a_host_that_the_controller_reaches() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["tower"]["paths"]["laptop"].update(up=False, rtt_ms=None, mtu=None)
    found = only(measured)
    assert found["code"] == "NF523"
    assert "fleet_address of laptop" in found["remedy"]
    measured["laptop"]["firewall"] = [UFW]  # and no rule that admits the host
    assert only(measured)["code"] == "NF528"


def test_rules_that_only_root_can_read_are_not_taken_for_no_rules() -> None:
    measured = fleet("tower", "laptop")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["laptop"]["firewall"], measured["tower"]["firewall"] = [], None
    found = only(measured)
    assert found["problem"].endswith("Only root can read the firewall rules of tower.")
    assert found["remedy"].startswith("repeat the command with -K")
    assert "(on tower)" in found["remedy"]


def test_a_silent_port_and_another_program_have_different_findings() -> None:
    for state, code in (("silent", "NF524"), ("foreign", "NF525")):
        measured = fleet("tower", "laptop")
        close_ports(measured, "tower", "laptop", state)
        found = only(measured)
        assert found["code"] == code
        listed = f"sudo ss -Hltnp 'sport = :{LOW + 311} or sport = :{LOW} or " in found["remedy"]
        assert listed == ("ping -c 100 10.0.0.2" in found["remedy"]) == (state == "silent")
        assert ("ip neigh show 10.0.0.2" in found["remedy"]) == (state == "foreign")
