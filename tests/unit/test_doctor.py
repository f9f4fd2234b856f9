"""Doctor's verdicts: from what was measured to findings, the matrix and the report, without a host."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from role_files import load

ROLE = Path(__file__).resolve().parents[2] / "roles" / "doctor"


doctor = load(ROLE / "filter_plugins" / "doctor.py")
ways = load(ROLE / "filter_plugins" / "doctor_ways.py")
links = load(ROLE / "filter_plugins" / "doctor_links.py")
hosts = load(ROLE / "filter_plugins" / "doctor_hosts.py")
report = load(ROLE / "filter_plugins" / "doctor_report.py")

OPTIONS = {
    "port_low": 20000, "port_high": 20999, "store_port": 29500, "slow_mbit": 300.0, "slow_rtt_ms": 10.0,
    "min_free_gib": 1.0, "max_skew_s": 5.0, "trainer": "d1",
}  # fmt: skip
ADDRESSES = {"tower": "10.0.0.1", "laptop": "10.0.0.2", "attic": "10.0.0.3"}
Measured = dict[str, dict[str, Any]]


def a_port(port: int, role: str, state: str = "open", **more: Any) -> dict[str, Any]:
    return {"port": port, "role": role, "state": state, "detail": "", "seen": "", "ms": 0.2, **more}


def a_link(**more: Any) -> dict[str, Any]:
    return {
        "addresses": [], "mtu": 1500, "speed_mbit": 1000, "duplex": "full", "wireless": False,
        "physical": True, "carrier": True, **more,
    }  # fmt: skip


def fleet(*names: str) -> Measured:
    """Hosts with which nothing is wrong; the first serves the store."""
    found: Measured = {}
    disk = {"mount": "/", "free_gib": 50.0, "inodes_free": 10**6, "writable": True}
    for name in names:
        listens = [{"port": 20311, "role": "gloo", "picked": True}]
        listens += [{"port": port, "role": "gloo", "picked": False} for port in (20000, 20999)]
        if name == names[0]:
            listens.insert(0, {"port": 29500, "role": "store", "picked": False})
        found[name] = {
            "reachable": True, "why": "", "problem": "", "address": ADDRESSES[name], "interface": "eth0",
            "facts": {
                "skew_s": 0.0, "hostname": name, "resolves_to": [ADDRESSES[name]],
                "port_range": [20000, 20999], "machine": "x86_64", "cores": 4, "machine_cores": 4,
                "load": 0.1, "copy_gb_s": 12.5,
                "links": {"eth0": a_link(addresses=[f"{ADDRESSES[name]}/24"])},
                "disks": {"/opt/nanofleet": dict(disk), "/var/lib/nanofleet": dict(disk)},
            },
            "marks": {"/etc/hosts": f"{name} 1", "boot": f"b-{name}"},
            "ports": listens, "held": [], "active": [],
            "firewall": None, "ways": {}, "rates": {}, "data": {"findings": [], "manifest_sha256": "m"},
            "installed": {"torch": "2.13.0+cpu", "trainer": "d1", "environment": "e1", "python": "3.11.2"},
            "rehearsal": {
                "hosts": list(names), "error": "", "gemm_gflops": {"float32": 200.0, "bfloat16": 900.0},
                "allreduce_mbit": 800.0, "pairs": {},
            },
        }  # fmt: skip
    for host, peer in itertools.permutations(names, 2):
        found[host]["ways"][peer] = {
            "route": {"interface": "eth0", "source": ADDRESSES[host]}, "up": True,
            "ports": [{**a_port(**{k: each[k] for k in ("port", "role")}), **each, "seen": ADDRESSES[host]}
                      for each in found[peer]["ports"]],
            "rtt_ms": {"min": 0.1, "median": 0.2},
            "mtu": {"sent": 1500, "passes": 1500, "swallowed": False},
        }  # fmt: skip
    for a, b in itertools.combinations(names, 2):
        found[a]["rates"][b] = {"sent_mbit": 940.0, "received_mbit": 930.0}
        i, j = names.index(a), names.index(b)
        for name in (a, b):
            found[name]["rehearsal"]["pairs"][f"{i}-{j}"] = 700.0 + i + j
    return found


def shut(measured: Measured, host: str, peer: str, state: str, role: str = "gloo", **more: Any) -> None:
    for port in measured[host]["ways"][peer]["ports"]:
        if port["role"] == role:
            port.update(state=state, seen="", **more)


def all_findings(measured: Measured, hostvars: dict[str, Any] | None = None) -> list[dict[str, str]]:
    variables = hostvars or {name: {} for name in measured}
    return [
        *hosts.host_findings(measured, variables, OPTIONS),
        *ways.way_findings(measured, OPTIONS),
        *links.link_findings(measured, OPTIONS),
    ]


def only(measured: Measured, hostvars: dict[str, Any] | None = None) -> dict[str, str]:
    found = all_findings(measured, hostvars)
    assert len(found) == 1, found
    assert set(found[0]) == {"kind", "host", "peer", "severity", "problem", "remedy"}
    return found[0]


@pytest.mark.parametrize("names", [("tower",), ("tower", "laptop"), ("tower", "laptop", "attic")])
def test_nothing_is_found_where_nothing_is_wrong(names: tuple[str, ...]) -> None:
    assert all_findings(fleet(*names)) == []


# -- ports -------------------------------------------------------------------------------------------------

DROP = {
    "text": "iptables -A INPUT -s 10.0.0.1/32 -p tcp --dport 20000:20999 -j DROP",
    "remedy": "sudo iptables -D INPUT -s 10.0.0.1/32 -p tcp --dport 20000:20999 -j DROP",
    "chain": "INPUT", "protocol": "tcp", "source": "10.0.0.1/32", "ports": "20000:20999", "length": "",
}  # fmt: skip


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


# -- the interface, packets, links -------------------------------------------------------------------------


def test_a_forced_interface_is_told_once_and_not_its_consequences() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(interface="docker0", address="172.17.0.1")
    shut(measured, "tower", "laptop", "filtered")
    measured["tower"]["ways"]["laptop"].update(route={"interface": "wlan0", "source": ""}, up=False)
    found = only(measured)
    assert (found["kind"], found["host"]) == ("wrong-interface", "laptop")
    assert "docker0" in found["problem"]
    assert "set it to eth0" in found["remedy"]


def test_the_network_roles_sentence_is_split_into_problem_and_remedy() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(
        problem="laptop has no interface wlan9. Set fleet_interface of laptop.", interface=""
    )
    found = only(measured)
    assert found["problem"] == "laptop has no interface wlan9."
    assert "Set fleet_interface of laptop." in found["remedy"]


def test_a_black_hole_names_the_size_and_a_rule_if_there_is_one() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["ways"]["laptop"]["mtu"] = {"sent": 1500, "passes": 1400, "swallowed": True}
    found = only(measured)
    assert (found["kind"], found["host"], found["severity"]) == ("mtu", "tower", "error")
    assert "those of 1400 arrive" in found["problem"]
    assert "ip link set eth0 mtu 1400  (on tower" in found["remedy"]
    rule = {**DROP, "length": "1401:65535", "remedy": "sudo iptables -D INPUT x"}
    measured["laptop"]["firewall"] = {"ufw": "inactive", "allows": [], "rules": [rule]}
    found = only(measured)
    assert (found["host"], found["remedy"]) == ("laptop", "sudo iptables -D INPUT x  (on laptop)")


def test_a_smaller_path_that_says_so_is_no_fault() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["ways"]["laptop"]["mtu"] = {"sent": 1500, "passes": 1420, "swallowed": False}
    assert all_findings(measured) == []


def test_another_source_address_and_a_long_way_are_warnings() -> None:
    measured = fleet("tower", "laptop")
    for port in measured["tower"]["ways"]["laptop"]["ports"]:
        port["seen"] = "192.168.7.7"
    measured["laptop"]["ways"]["tower"]["rtt_ms"] = {"min": 20.0, "median": 40.0}
    found = {each["kind"]: each for each in all_findings(measured)}
    assert set(found) == {"source-address", "slow-answer"}
    assert {each["severity"] for each in found.values()} == {"warning"}
    assert "192.168.7.7" in found["source-address"]["problem"]


def test_a_slow_way_names_the_sender_and_what_it_costs() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["rates"]["laptop"]["received_mbit"] = 95.0
    found = only(measured)
    assert (found["kind"], found["host"], found["severity"]) == ("slow-link", "laptop", "warning")
    assert "95 Mbit/s (940 the other way)" in found["problem"]
    assert "42 s" in found["problem"]


def test_a_host_that_is_slow_to_everybody_is_named_once() -> None:
    measured = fleet("tower", "laptop", "attic")
    measured["tower"]["rates"]["laptop"]["received_mbit"] = 90.0
    measured["laptop"]["rates"]["attic"]["sent_mbit"] = 80.0
    found = only(measured)
    assert found["host"] == "laptop"
    assert "sends at 90 Mbit/s at most" in found["problem"]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"speed_mbit": 100}, "slow-link", "100 Mbit/s: a bad cable"),
        ({"duplex": "half"}, "slow-link", "half duplex"),
        ({"wireless": True}, "wifi", "eno1, 10.0.0.77"),
    ],
)
def test_what_the_interface_says_explains_slow_rates(change: dict[str, Any], kind: str, words: str) -> None:
    measured = fleet("tower", "laptop")
    table = measured["laptop"]["facts"]["links"]
    table["eth0"].update(change)
    if kind == "wifi":
        table["eno1"] = a_link(addresses=["10.0.0.77/24"])
        table["docker0"] = a_link(addresses=["172.17.0.1/16"], physical=False)
    measured["tower"]["rates"]["laptop"] = {"sent_mbit": 90.0, "received_mbit": 90.0}
    found = only(measured)
    assert (found["kind"], found["host"], found["severity"]) == (kind, "laptop", "warning")
    assert words in found["problem"]


def test_wifi_without_a_cable_is_no_finding() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["links"]["eth0"].update(wireless=True)
    measured["laptop"]["facts"]["links"]["eno1"] = a_link(addresses=[], carrier=False)
    assert all_findings(measured) == []


# -- hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (False, "Nor does it answer tower: it is off, asleep"),
        (True, "tower can see it: only the controller's"),
    ],
)
def test_a_host_that_is_asleep_is_told_with_what_the_others_see(up: bool, words: str) -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(reachable=False, why="ssh: connect: Connection timed out", facts={}, ways={})
    measured["tower"]["ways"]["laptop"].update(ports=[], up=up, rtt_ms=None, mtu=None)
    variables = {"tower": {}, "laptop": {"ansible_host": "10.0.0.2", "ansible_user": "me"}}
    found = only(measured, variables)
    assert (found["kind"], found["host"], found["remedy"]) == ("unreachable", "laptop", "ssh me@10.0.0.2")
    assert words in found["problem"]


def test_a_host_without_python_and_one_that_fails_otherwise() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(facts={}, why="/bin/sh: 1: /usr/bin/python3: not found")
    assert "apt install python3" in only(measured)["remedy"]
    measured["laptop"].update(why="Illegal instruction")
    assert "Illegal instruction" in only(measured)["problem"]


@pytest.mark.parametrize(("skew", "words"), [(90.0, "90 s ahead of"), (-30.0, "30 s behind")])
def test_clock_skew_has_a_direction(skew: float, words: str) -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["skew_s"] = skew
    assert words in only(measured)["problem"]


def test_a_slow_answer_is_no_skew() -> None:
    look = {"facts": {"sent": 100.0, "time": 107.0, "cores": 1}}
    assert doctor._facts(look, 109.0)["skew_s"] == 0
    assert doctor._facts({"facts": {"sent": 100.0, "time": 190.0}}, 101.0)["skew_s"] == 89
    assert doctor._facts({"facts": {"sent": 100.0, "time": 40.0}}, 101.0)["skew_s"] == -60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"free_gib": 0.2}, "0.2 GiB free"),
        ({"inodes_free": 3}, "inodes"),
        ({"writable": False}, "only be read"),
    ],
)
def test_a_full_disk_is_named_once_by_its_mount(change: dict[str, Any], words: str) -> None:
    measured = fleet("tower", "laptop")
    for disk in measured["laptop"]["facts"]["disks"].values():
        disk.update(change)
    found = only(measured)
    assert words in found["problem"]
    assert "/, which holds /opt/nanofleet" in found["problem"]


def test_a_name_that_is_loopback_is_a_warning() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["resolves_to"] = ["127.0.1.1"]
    found = only(measured)
    assert (found["kind"], found["severity"]) == ("loopback-name", "warning")
    measured["laptop"]["facts"]["resolves_to"] = ["10.0.0.2", "127.0.1.1"]
    assert all_findings(measured) == []


def test_a_held_port_names_process_and_unit() -> None:
    measured = fleet("tower", "laptop")
    held = {"port": 29500, "role": "store", "reason": "held"}
    measured["tower"]["held"] = [held]
    assert "only root can name" in only(measured)["problem"]
    who = {"pid": 41, "user": "me", "command": "python3 train.py", "unit": ""}
    measured["tower"]["held"] = [{**held, **who}]
    found = only(measured)
    assert "process 41 of me (python3 train.py)" in found["problem"]
    assert found["remedy"].startswith("sudo kill 41  (on tower")
    measured["tower"]["held"] = [{**held, **who, "unit": "old.service"}]
    assert only(measured)["remedy"].startswith("sudo systemctl stop old.service")


def test_a_runs_own_store_is_no_finding_and_gloo_ports_in_use_are_none() -> None:
    measured = fleet("tower", "laptop")
    unit = "nanofleet-d8.service"
    measured["tower"]["active"] = [unit]
    measured["tower"]["held"] = [
        {
            "port": 29500,
            "role": "store",
            "reason": "held",
            "pid": 7,
            "user": "n",
            "command": "t",
            "unit": unit,
        },
        {"port": 20000, "role": "gloo", "reason": "held"},
    ]
    assert all_findings(measured) == []


def test_altered_and_missing_shards_are_told_by_name() -> None:
    measured = fleet("tower", "laptop")
    said = [
        "shard_00001.parquet was altered (its sha256 is not the manifest's)",
        "shard_00002.parquet is missing",
    ]
    measured["laptop"]["data"] = {"findings": said, "manifest_sha256": "m"}
    found = only(measured)
    assert (found["kind"], found["host"]) == ("data", "laptop")
    assert all(phrase in found["problem"] for phrase in said)
    assert found["remedy"] == "ansible-playbook setup.yml"
    measured["laptop"]["data"]["findings"] = ["manifest.json is missing"]
    assert all_findings(measured) == [], "a host that is not set up yet has nothing to be wrong"


def test_the_odd_torch_is_named_once_and_the_builds_tag_does_not_count() -> None:
    measured = fleet("tower", "laptop", "attic")
    measured["attic"]["installed"]["torch"] = "2.13.0"
    assert all_findings(measured) == []
    measured["tower"]["installed"].update(torch="2.11.0+cpu", environment="e9")
    found = only(measured)
    assert (found["kind"], found["host"]) == ("versions", "tower")
    assert "torch 2.11.0, but laptop, attic 2.13.0" in found["problem"]


def test_environments_are_compared_among_hosts_of_a_kind() -> None:
    measured = fleet("tower", "laptop", "attic")
    measured["attic"]["facts"]["machine"] = "aarch64"
    measured["attic"]["installed"]["environment"] = "e2"
    assert all_findings(measured) == []
    measured["laptop"]["installed"]["environment"] = "e3"
    assert only(measured)["host"] == "laptop"


def test_another_trainer_everywhere_is_told_of_all() -> None:
    measured = fleet("tower", "laptop")
    for of_host in measured.values():
        of_host["installed"]["trainer"] = "d0"
    assert only(measured)["host"] == "tower, laptop"


def test_a_failed_rehearsal_is_told_with_its_own_words() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["rehearsal"]["error"] = "connectFullMesh failed"
    found = only(measured)
    assert (found["kind"], found["host"]) == ("all-reduce", "laptop")
    assert "with tower failed: connectFullMesh failed" in found["problem"]


def test_a_busy_host_is_a_warning_but_not_while_it_trains() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["load"] = 9.0
    assert only(measured)["severity"] == "warning"
    measured["laptop"]["active"] = ["nanofleet-d8.service"]
    assert all_findings(measured) == []


# -- who does what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 9))
def test_rounds_hold_every_pair_once_and_no_host_twice_in_one(count: int) -> None:
    found = doctor.rounds(list(range(count)))
    pairs = [frozenset(pair) for each in found for pair in each]
    assert sorted(map(sorted, pairs)) == sorted(map(list, itertools.combinations(range(count), 2)))
    for each in found:
        busy = [host for pair in each for host in pair]
        assert len(busy) == len(set(busy))
    assert len(found) <= count


def test_the_end_that_gets_through_calls_and_nobody_across_a_black_hole() -> None:
    measured = fleet("tower", "laptop")
    assert doctor.calls([["tower", "laptop"]], measured) == {"tower": "laptop"}
    for role in ("gloo", "store"):
        shut(measured, "tower", "laptop", "filtered", role)
    assert doctor.calls([["tower", "laptop"]], measured) == {"laptop": "tower"}
    measured["laptop"]["ways"]["tower"]["mtu"]["swallowed"] = True
    assert doctor.calls([["tower", "laptop"]], measured) == {}


def test_only_hosts_at_the_ends_of_a_broken_way_are_looked_at_as_root() -> None:
    measured = fleet("tower", "laptop", "attic")
    assert doctor.turned_away(measured) == []
    shut(measured, "tower", "laptop", "filtered")
    assert doctor.turned_away(measured) == ["laptop", "tower"]


def test_who_rehearses_with_whom() -> None:
    measured = fleet("tower", "laptop", "attic")
    names = list(measured)
    assert doctor.can_rehearse(names, measured, 16) == {"hosts": names, "why": ""}
    shut(measured, "laptop", "attic", "filtered")
    found = doctor.can_rehearse(names, measured, 16)
    assert found["hosts"] == ["tower", "laptop"]
    assert "attic" in found["why"]
    assert doctor.part(names, measured, "attic", 16, 29500, 0.4)["hosts"] == ["attic"]
    part = doctor.part(names, measured, "laptop", 16, 29500, 0.4)
    assert (part["rank"], part["master"], part["rounds"]) == (1, "10.0.0.1", [[[0, 1]]])
    assert "add -f 3" in doctor.can_rehearse(names, fleet(*names), 2)["why"]
    without_store = doctor.can_rehearse(names[1:], fleet(*names), 16)
    assert (without_store["hosts"], "store" in without_store["why"]) == ([], True)
    measured["tower"]["installed"] = None
    assert doctor.can_rehearse(names, measured, 16)["hosts"] == []


def test_peers_are_taken_from_what_the_listeners_said_else_from_the_inventory() -> None:
    hostvars = {
        "tower": {},
        "laptop": {"__doctor_listening": {"address": "10.0.0.2", "ports": [{"port": 1, "role": "gloo"}]}},
        "attic": {"ansible_host": "10.0.0.3", "ansible_port": 2222},
    }
    assert doctor.peers(list(hostvars), hostvars, "tower") == [
        {"host": "laptop", "address": "10.0.0.2", "ports": [{"port": 1, "role": "gloo"}], "ssh_port": 22},
        {"host": "attic", "address": "10.0.0.3", "ports": [], "ssh_port": 2222},
    ]


def test_what_was_registered_becomes_what_was_measured() -> None:
    hostvars: dict[str, Any] = {
        "tower": {
            "__launch_held": {"active_units": [], "listeners": [{"port": 29500, "pid": 41, "user": "me"}]},
            "__doctor_host": {"facts": {"sent": 1.0, "time": 1.5}, "marks": {"boot": "b"}},
            "__doctor_looked": 2.0,
            "__doctor_listening": {
                "address": "10.0.0.1", "interface": "eth0", "ports": [],
                "held": [{"port": 29500, "role": "store", "reason": "held"}],
            },
            "__doctor_ways": {"peers": {"laptop": {"ports": []}}},
            "__doctor_rates": [{"peers": {"laptop": {"sent_mbit": 1.0}}}, {"skipped": True}],
            "__doctor_installed": {"rc": 0, "stdout": 'warning\n{"torch": "2.13"}'},
            "__doctor_rehearsed": {"rc": 1, "stdout": "", "stderr": "x"},
        },
        "laptop": {"__launch_held": {"unreachable": True, "msg": "timed out"}},
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


# -- due ---------------------------------------------------------------------------------------------------

SETTINGS = {"hosts": "tower laptop", "store_port": 29500}
UNREAD: dict[str, dict[str, Any]] = {"tower": {}, "laptop": {}}
"""No host's firewall was read."""


def test_a_fleet_is_due_until_a_good_report_and_after_a_change() -> None:
    measured = fleet("tower", "laptop")
    state = doctor.fleet_state(measured, SETTINGS, UNREAD)
    kept = json.dumps({"state": state, "report": {}})
    assert "no good report" in doctor.due(state, "", "auto")
    assert "no good report" in doctor.due(state, "{broken", "auto")
    assert doctor.due(state, kept, "auto") == ""
    assert doctor.due(state, kept, "always") != ""
    assert doctor.due(state, "", "never") == ""
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


def test_a_fleet_is_due_when_a_host_turns_other_packets_away() -> None:
    def state_with(text: str) -> dict[str, Any]:
        rules = {"ufw": "active", "allows": [], "rules": [{"text": text}]}
        return doctor.fleet_state(measured, SETTINGS, {**UNREAD, "laptop": {"__doctor_rules": rules}})

    measured = fleet("tower", "laptop")
    kept = json.dumps({"state": state_with("nft counter packets 1 bytes 52 drop")})
    assert doctor.due(state_with("nft counter packets 7 bytes 364 drop"), kept, "auto") == ""
    why = doctor.due(state_with("iptables -A INPUT -s 10.0.0.1 -j DROP"), kept, "auto")
    assert why == "laptop has another firewall since the last good report"
    unread = json.dumps({"state": doctor.fleet_state(measured, SETTINGS, UNREAD)})
    assert "made without root on laptop" in doctor.due(state_with(""), unread, "auto")


def test_a_settings_type_does_not_make_a_fleet_due() -> None:
    measured = fleet("tower")
    kept = json.dumps({"state": doctor.fleet_state(measured, {"store_port": 29500}, UNREAD)})
    assert doctor.due(doctor.fleet_state(measured, {"store_port": "29500"}, UNREAD), kept, "auto") == ""


# -- the report --------------------------------------------------------------------------------------------

ABOUT = {"time": 1.0, "seconds": 12.34, "quick": False, "rehearsal": {"hosts": [], "why": ""}}


def test_the_report_has_what_a_program_needs_and_survives_json() -> None:
    measured = fleet("tower", "laptop")
    made = json.loads(json.dumps(report.report(measured, [], ABOUT)))
    assert (made["schema"], made["good"], made["seconds"]) == (1, True, 12.3)
    assert made["hosts"]["laptop"]["gemm_gflops"] == {"float32": 200.0, "bfloat16": 900.0}
    assert made["hosts"]["laptop"]["copy_gb_s"] == 12.5
    pairs = {(pair["from"], pair["to"]): pair for pair in made["pairs"]}
    assert pairs["tower", "laptop"]["mbit"] == 940
    assert pairs["laptop", "tower"]["mbit"] == 930
    assert pairs["laptop", "tower"]["allreduce_mbit"] == pairs["tower", "laptop"]["allreduce_mbit"] == 701
    assert pairs["tower", "laptop"]["open"]
    assert made["not_measured"] == []


def test_the_screen_has_one_matrix_and_one_line_a_finding() -> None:
    measured = fleet("tower", "laptop")
    shut(measured, "laptop", "tower", "filtered", "store")
    measured["laptop"]["facts"]["load"] = 9.0
    made = report.report(measured, all_findings(measured), ABOUT)
    lines = report.text(made).splitlines()
    assert lines[0].split() == ["from", "\\", "to", "tower", "laptop"]
    assert sum(line.startswith("FAULT  tower: ") for line in lines) == 1
    assert sum(line.startswith("warning  laptop: ") for line in lines) == 1
    assert all(" Type: " in line for line in lines if line.startswith(("FAULT", "warning")))
    assert lines[-1] == "1 finding prevents training, 1 warning. Looked for 12 s; nothing was changed."
    assert any("store ports filtered" in line for line in lines)
    assert any("fp32 200, bf16 900 GFLOP/s" in line for line in lines)
    assert any("0.20 ms, packets to 1500" in line for line in lines)
    assert not made["good"]


def test_warnings_alone_do_not_prevent_training() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["resolves_to"] = ["127.0.1.1"]
    made = report.report(measured, all_findings(measured), ABOUT)
    assert made["good"]
    assert report.text(made).splitlines()[-1].startswith("Nothing prevents training, 1 warning.")


def test_what_was_not_measured_is_said() -> None:
    measured = fleet("tower", "laptop")
    measured["tower"]["active"] = ["nanofleet-d8.service"]
    (said,) = report.report(measured, [], ABOUT)["not_measured"]
    assert "nanofleet-d8.service is active" in said
    measured = fleet("tower", "laptop")
    for of_host in measured.values():
        of_host.update(installed=None, rehearsal=None, data={"findings": ["manifest.json is missing"]})
    why = doctor.can_rehearse(list(measured), measured, 16)
    said = "; ".join(report.report(measured, [], {**ABOUT, "rehearsal": why})["not_measured"])
    assert "setup.yml" in said
    assert "data of tower, laptop" in said
    assert "doctor.yml" in report.report(fleet("tower"), [], {**ABOUT, "quick": True})["not_measured"][0]


def test_a_host_that_does_not_answer_has_its_place_in_the_matrix() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(
        reachable=False, facts={}, ways={}, rates={}, installed=None, data=None, rehearsal=None
    )
    lines = report.matrix(report.report(measured, [], ABOUT))
    assert any("does not answer" in line for line in lines)
