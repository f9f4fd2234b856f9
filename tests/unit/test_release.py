"""Hosts that are not, or no longer, in the fleet: refused by name, and released by reset.yml --limit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_hosts as hosts
from ansible_collections.nanofleet.fleet.plugins.module_utils import preflight_inventory as preflight
from ansible_collections.nanofleet.fleet.plugins.module_utils import reset_report as reset
from preflight_probe import GOOD, put

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"tower": "192.0.2.1", "laptop": "192.0.2.2", "old": "192.0.2.3", "localhost": "127.0.0.1"}
FLEET = {"coordinator": ["tower"], "workers": ["laptop"]}


def play(groups: dict[str, list[str]], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    inventory: dict[str, Any] = {
        group: {"hosts": {name: {"ansible_host": ADDRESSES[name]} for name in names}}
        for group, names in groups.items()
    }
    inventory.setdefault("fleet", {"children": {"coordinator": {}, "workers": {}}})
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(
        ["ansible-playbook", "-i", str(folder / "hosts.yml"), *words], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def printed(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stdout.split())


@pytest.mark.processes
@pytest.mark.parametrize("playbook", ["setup.yml", "train.yml", "reset.yml"])
def test_a_host_of_fleet_that_is_in_neither_group_is_refused_before_any_is_touched(
    playbook: str, tmp_path: Path
) -> None:
    done = play({**FLEET, "fleet": ["tower", "laptop", "old"]}, tmp_path, playbook)
    assert done.returncode != 0
    assert (
        "This host is in the group fleet, but neither in coordinator nor in workers: no run uses it."
        in printed(done)
    )
    assert f"ansible-playbook -i {tmp_path}/hosts.yml reset.yml --limit old -e reset_confirm=true" in printed(
        done
    )
    assert "UNREACHABLE" not in done.stdout


def test_a_worker_that_is_not_in_fleet_is_refused(tmp_path: Path) -> None:
    done = play({**FLEET, "fleet": ["tower"]}, tmp_path, "train.yml")
    assert done.returncode != 0
    assert "The group fleet, on which every playbook runs, does not contain laptop." in printed(done)


@pytest.mark.processes
@pytest.mark.parametrize("where", ["workers", "released"])
def test_reset_yml_with_a_limit_runs_on_that_host_alone(where: str, tmp_path: Path) -> None:
    groups = {"coordinator": ["tower"], "workers": ["laptop"], "released": []}
    groups[where] = [*groups[where], "old"]
    words = ["reset.yml", "--limit", "old", "--list-hosts"]
    plays = play(groups, tmp_path, *words).stdout.split("play #")[1:]
    assert [[line.strip() for line in each.splitlines()[3:] if line.strip()] for each in plays] == [
        ["old"]
    ] * 4


def test_a_limit_does_not_pass_over_the_check_of_the_settings(tmp_path: Path) -> None:
    done = play(FLEET, tmp_path, "reset.yml", "--limit", "laptop", "-e", "reset_confrm=true")
    assert done.returncode != 0
    assert "Did you mean reset_confirm?" in printed(done)
    assert "UNREACHABLE" not in done.stdout


def test_a_limit_never_means_the_controller(tmp_path: Path) -> None:
    listed = play(
        {**FLEET, "here": ["localhost"]}, tmp_path, "reset.yml", "--limit", "all", "--list-hosts"
    ).stdout
    assert "laptop\n" in listed.split("play #3")[1]
    assert "localhost\n" not in listed.split("play #2")[1]


HOSTVARS = {name: {"runtime_removed": ["/opt/nanofleet"]} for name in ADDRESSES}


def test_a_release_shows_what_is_left_to_do_about_the_others() -> None:
    lines = reset.report(["laptop"], HOSTVARS, True, ["/home/me/.wheelhouse"], fleet=["tower", "laptop"])
    assert lines[-2:] == [
        "Remove laptop from coordinator and workers in the inventory.",
        "The firewall rules of tower for laptop are removed by the next setup: ansible-playbook setup.yml",
    ]
    lines = reset.report(["old"], HOSTVARS, True, [], fleet=["tower", "laptop"])
    assert lines[-1].startswith("The firewall rules of tower, laptop for old are removed by the next setup")
    assert not [line for line in lines if line.startswith("Remove ")]


@pytest.mark.parametrize(("host", "stops"), [("laptop", True), ("old", False)])
def test_an_active_run_on_a_host_out_of_reach_of_stop_yml_is_left_to_the_reset(
    host: str, stops: bool
) -> None:
    hostvars = {host: {**HOSTVARS[host], "run_remove_active": ["d8"]}}
    lines = " ".join(reset.report([host], hostvars, False, [], fleet=["tower", "laptop"]))
    assert "so the reset would be refused" in lines
    assert "-e reset_force=true" in lines
    assert ("stop.yml" in lines) is stops


def former(claim: str, addresses: dict[str, str]) -> list[tuple[str, str]]:
    variables = {"__preflight_probe": {"stdout": put(GOOD, claim=claim)}, "__preflight_root": {"stdout": ""}}
    limits = {
        "free_gb": 3,
        "skew_s": 5,
        "pythons": ["3.11"],
        "architectures": ["x86_64"],
        "addresses": addresses,
    }
    found = hosts.host_findings(["tower"], {"tower": {**variables, "ansible_become": False}}, limits)
    return [(f["host"], f["remedy"]) for f in found if f["severity"] == "warning"]


CLAIM = '{"schema": 1, "fleet_id": "home", "hosts": {"tower": "192.0.2.1", "old": "192.0.2.3"}}'


def test_a_host_that_has_left_since_the_last_setup_is_named_with_how_to_release_it() -> None:
    assert former(CLAIM, {"tower": "192.0.2.1", "laptop": "192.0.2.2"}) == [
        (
            "old",
            "uninstall nanofleet there: ansible-playbook reset.yml -i 192.0.2.3, -u USER -e fleet_id=home "
            "--limit 192.0.2.3 -e reset_confirm=true  (USER: your login there)",
        )
    ]


@pytest.mark.parametrize(
    ("claim", "addresses"),
    [
        (CLAIM, {"tower": "192.0.2.1", "old": "192.0.2.3"}),
        (CLAIM, {"tower": "192.0.2.1", "renamed": "192.0.2.3"}),
        (CLAIM.replace("tower", "other"), {"tower": "192.0.2.1"}),
        ("", {"tower": "192.0.2.1"}),
        ("[", {"tower": "192.0.2.1"}),
        ('{"hosts": []}', {"tower": "192.0.2.1"}),
    ],
)
def test_nobody_is_named_who_is_there_or_of_another_fleet(claim: str, addresses: dict[str, str]) -> None:
    assert former(claim, addresses) == []


def test_a_name_is_quoted_in_the_command_that_releases_it() -> None:
    assert "--limit 'a b'" in preflight.reset_command("a b")
