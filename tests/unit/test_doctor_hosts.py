"""Findings of the doctor about single hosts and about hosts that differ."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import doctor_measured as doctor
from measured_fleet import all_findings, fleet, only
from port_range import LOW


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (False, "It does not answer tower either: it is off, asleep"),
        (True, "tower can reach it: only the controller's"),
    ],
)
def test_an_unreachable_host_is_reported_with_whether_its_peers_reach_it(up: bool, words: str) -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"].update(reachable=False, why="ssh: connect: Connection timed out", facts={}, paths={})
    measured["tower"]["paths"]["laptop"].update(ports=[], up=up, rtt_ms=None, mtu=None)
    variables = {"tower": {}, "laptop": {"ansible_host": "10.0.0.2", "ansible_user": "me"}}
    found = only(measured, variables)
    assert (found["code"], found["host"]) == ("NF101", "laptop")
    assert found["remedy"].endswith("then try: ssh me@10.0.0.2")
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
    found = only(measured)
    assert words in found["problem"]
    assert found["remedy"].startswith("sudo timedatectl set-ntp true  (on laptop; if NTP is not supported")


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
        ({"writable": False}, "mounted read-only"),
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
    assert (found["code"], found["severity"]) == ("NF505", "warning")
    measured["laptop"]["facts"]["resolves_to"] = ["10.0.0.2", "127.0.1.1"]
    assert all_findings(measured) == []


def test_a_held_port_names_process_and_unit() -> None:
    measured = fleet("tower", "laptop")
    held = {"port": 29500, "role": "store", "reason": "held"}
    measured["tower"]["held"] = [held]
    found = only(measured)
    assert "only root can name (a listener that an interrupted doctor.yml has left" in found["problem"]
    assert found["remedy"].startswith("wait 30 s and repeat the command, or sudo kill PID, the number in")
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
        {"port": LOW, "role": "gloo", "reason": "held"},
    ]
    assert all_findings(measured) == []


def test_altered_and_missing_shards_are_named() -> None:
    measured = fleet("tower", "laptop")
    printed = [
        "shard_00001.parquet was altered (its sha256 is not the manifest's)",
        "shard_00002.parquet is missing",
    ]
    measured["laptop"]["data"] = {"findings": printed, "manifest_sha256": "m"}
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF509", "laptop")
    assert all(phrase in found["problem"] for phrase in printed)
    assert found["remedy"] == "ansible-playbook setup.yml"
    measured["laptop"]["data"]["findings"] = ["manifest.json is missing"]
    assert all_findings(measured) == [], "a host that is not set up yet has nothing to be wrong"


def test_a_differing_torch_is_reported_once_and_the_tag_of_the_build_is_ignored() -> None:
    measured = fleet("tower", "laptop", "attic")
    measured["attic"]["installed"]["torch"] = "2.13.0"
    assert all_findings(measured) == []
    measured["tower"]["installed"].update(torch="2.11.0+cpu", environment="e9")
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF511", "tower")
    assert "version of torch on this host is 2.11.0, but on laptop, attic it is 2.13.0" in found["problem"]
    assert found["problem"].endswith("All hosts need the same one.")


def test_environments_are_compared_among_hosts_of_a_kind() -> None:
    measured = fleet("tower", "laptop", "attic")
    measured["attic"]["installed"].update(machine="aarch64", environment="e2")
    assert all_findings(measured) == []
    measured["laptop"]["installed"]["environment"] = "e3"
    found = only(measured)
    assert found["host"] == "laptop"
    assert found["problem"].endswith(
        "Hosts with the same Python, processor and build of torch need the same one."
    )


def test_another_trainer_on_all_hosts_is_one_finding() -> None:
    measured = fleet("tower", "laptop")
    for of_host in measured.values():
        of_host["installed"]["trainer"] = "d0"
    assert only(measured)["host"] == "tower, laptop"
    measured["laptop"]["installed"]["trainer"] = "d9"
    assert (only(measured)["code"], only(measured)["host"]) == ("NF510", "tower, laptop")


def test_a_failed_rehearsal_is_reported_with_its_error() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["rehearsal"]["error"] = "connectFullMesh failed"
    found = only(measured)
    assert (found["code"], found["host"]) == ("NF512", "laptop")
    assert "with tower failed: connectFullMesh failed" in found["problem"]


def test_a_busy_host_is_a_warning_but_not_while_it_trains() -> None:
    measured = fleet("tower", "laptop")
    measured["laptop"]["facts"]["load"] = 9.0
    assert only(measured)["severity"] == "warning"
    measured["laptop"]["active"] = ["nanofleet-d8.service"]
    assert all_findings(measured) == []
