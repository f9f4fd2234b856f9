"""Findings of the doctor about interfaces, packets and rates."""

from __future__ import annotations

from typing import Any

import pytest
from measured_fleet import DROP, a_link, all_findings, close_ports, fleet, only, predict


def test_a_wrong_interface_is_reported_without_its_consequences() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(interface="docker0", address="172.17.0.1")
    close_ports(measured, "tower", "laptop", "filtered")
    measured["tower"]["paths"]["laptop"].update(route={"interface": "wlan0", "source": ""}, up=False)
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF521", "laptop")
    assert "docker0" in found["problem"]
    assert found["remedy"].endswith("set that of laptop to eth0; then: ansible-playbook setup.yml")


def test_the_network_roles_sentence_is_split_into_problem_and_remedy() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(
        problem="laptop has no interface wlan9. Set fleet_interface of laptop.", interface=""
    )
    found = only(measured)
    assert found["problem"].endswith("can be chosen for this host: laptop has no interface wlan9.")
    assert "set fleet_interface of laptop." in found["remedy"]


def test_a_black_hole_names_the_size_and_a_rule_if_there_is_one() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["paths"]["laptop"]["mtu"] = {"sent": 1500, "passes": 1400, "swallowed": True}
    found = only(measured)
    assert (found["code"], found["host"], found["severity"]) == ("NF532", "tower", "error")
    assert "those of 1400 arrive" in found["problem"]
    assert "ip link set eth0 mtu 1400  (on tower" in found["remedy"]
    rule = {**DROP, "length": "1401:65535", "remedy": "sudo iptables -D INPUT x"}
    measured["laptop"]["firewall"] = [rule]
    found = only(measured)
    assert (found["host"], found["remedy"]) == ("laptop", "sudo iptables -D INPUT x  (on laptop)")
    measured["laptop"]["firewall"] = []
    measured["tower"]["paths"]["laptop"]["mtu"]["passes"] = 0
    assert "ping -c 100 10.0.0.2" in only(measured)["remedy"], "no size is known that arrives"


def test_a_smaller_path_mtu_that_the_kernel_knows_is_no_finding() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["paths"]["laptop"]["mtu"] = {"sent": 1500, "passes": 1420, "swallowed": False}
    assert all_findings(measured) == []


def test_another_source_address_and_a_long_round_trip_are_warnings() -> None:
    measured = fleet("tower", "laptop")
    for port in measured["tower"]["paths"]["laptop"]["ports"]:
        port["seen"] = "192.168.7.7"
    measured["laptop"]["paths"]["tower"]["rtt_ms"] = {"min": 20.0, "median": 40.0}
    found = {each["code"]: each for each in all_findings(measured)}
    assert set(found) == {"NF533", "NF534"}
    assert {each["severity"] for each in found.values()} == {"warning"}
    assert "192.168.7.7" in found["NF533"]["problem"]


NEEDS = (
    "A step of depth 8 and 4,096 tokens is predicted to take 50.1 s with sync=dense (transfers: 42.4 s), "
    "20.3 s with sync=exact (transfers: 14.9 s), 8.0 s with sync=local (transfers: 0.2 s)."
)


def test_a_slow_path_is_reported_with_its_sender_and_what_a_step_needs_of_it() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["rates"]["laptop"]["received_mbit"] = 95.0
    found = only(measured)
    assert (found["code"], found["host"], found["severity"]) == ("NF541", "laptop", "warning")
    assert found["problem"] == (
        "This host sends 95 Mbit/s to tower (940 Mbit/s in the other direction) over eth0. "
        "Below 300 Mbit/s a link can limit the speed of training."
    )
    assert "tc qdisc show dev eth0  (on laptop; the first prints the rate of the link" in found["remedy"]
    assert found["remedy"].endswith("; then check cable, port and switch)")
    predict(measured)
    found = only(measured)
    assert found["problem"].endswith(f"the speed of training. {NEEDS}")
    assert "ansible-playbook train.yml -e sync=exact or with -e sync=local" in found["remedy"]
    predict(measured, advice=())
    assert "sync=exact" not in str(only(measured)), "it would not be faster"


def test_the_network_of_a_step_is_not_shown_where_no_path_is_slow() -> None:
    measured = fleet("tower", "laptop")
    predict(measured)
    assert all_findings(measured) == []


@pytest.mark.parametrize(
    ("name", "made_as", "typed"),
    [
        ("tailscale0", "tun", "tailscale ping 10.0.0.2"),
        ("wg0", "wireguard", "sudo wg show wg0"),
        ("ztr2qmcn6n", "tun", "sudo zerotier-cli peers"),
    ],
)
def test_a_slow_path_over_a_vpn_names_it_and_the_lan_that_both_may_be_on(
    name: str, made_as: str, typed: str
) -> None:
    measured = fleet("tower", "laptop")
    vpn = a_link(addresses=["100.64.0.1/32"], mtu=1280, made_as=made_as, physical=False)
    measured["tower"]["facts"]["links"] |= {name: vpn, "eth0": a_link(addresses=["192.168.1.10/24"])}
    measured["tower"]["interface"] = name
    measured["tower"]["paths"]["laptop"]["route"] = {"interface": name, "source": "10.0.0.1"}
    measured["laptop"]["facts"]["links"]["eth1"] = a_link(addresses=["192.168.1.11/24"])
    measured["tower"]["rates"]["laptop"]["sent_mbit"] = 60.0
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF541", "tower")
    assert f"over {name} (" in found["problem"]
    assert "MTU 1280" in found["problem"]
    assert "set fleet_address of laptop to 192.168.1.11, if that is the LAN of both" in found["remedy"]
    assert typed in found["remedy"]
    measured["laptop"]["facts"]["links"]["eth1"]["addresses"] = ["192.168.7.11/24"]
    assert "fleet_address" not in only(measured)["remedy"]


def test_a_host_that_is_slow_to_everybody_is_named_once() -> None:
    measured = fleet("tower", "laptop", "attic")
    measured["tower"]["rates"]["laptop"]["received_mbit"] = 90.0
    measured["laptop"]["rates"]["attic"]["sent_mbit"] = 80.0
    found = only(measured)
    assert found["host"] == "laptop"
    assert "sends only 90 Mbit/s over eth0, even to its fastest peer" in found["problem"]
    predict(measured)
    assert NEEDS in only(measured)["problem"]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"speed_mbit": 100}, "NF543", "at only 100 Mbit/s"),
        ({"duplex": "half"}, "NF544", "half duplex"),
        ({"wireless": True}, "NF542", "eno1 (10.0.0.77) is connected by cable"),
    ],
)
def test_a_slow_interface_explains_slow_rates(change: dict[str, Any], code: str, words: str) -> None:
    measured = fleet("tower", "laptop")
    table = measured["laptop"]["facts"]["links"]
    table["eth0"].update(change)
    if "wireless" in change:
        table["eno1"] = a_link(addresses=["10.0.0.77/24"])
        table["docker0"] = a_link(addresses=["172.17.0.1/16"], physical=False)
    measured["tower"]["rates"]["laptop"] = {"sent_mbit": 90.0, "received_mbit": 90.0}
    found = only(measured)
    assert (found["code"], found["host"], found["severity"]) == (code, "laptop", "warning")
    assert words in found["problem"]
    predict(measured)
    assert NEEDS in only(measured)["problem"]


def test_wifi_without_a_cable_gets_a_recommendation_once() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["links"]["eth0"].update(wireless=True)
    predict(measured)
    found = only(measured)
    assert (found["code"], found["host"], found["severity"]) == ("NF545", "laptop", "warning")
    assert found["problem"] == (
        "This host has only WiFi (eth0). At the moment it carries 930 Mbit/s; this changes with the "
        f"distance to the access point and with other users. {NEEDS}"
    )
    assert "iw dev eth0 link  (on laptop" in found["remedy"]
    measured["tower"]["rates"]["laptop"] = {"sent_mbit": 640.0, "received_mbit": 90.0}
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF541", "laptop")
    assert "over eth0 (WiFi)" in found["problem"]


def test_wifi_without_a_cable_and_without_a_prediction_is_no_finding() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["links"]["eth0"].update(wireless=True)
    measured["laptop"]["facts"]["links"]["eno1"] = a_link(addresses=[], carrier=False)
    assert all_findings(measured) == []
