"""Two fleets that want one host, and two operators of one fleet. Takes 4 minutes.

Hosts 1 and 2 are the fleet home, 3 and 2 the fleet attic; a second address of this machine on the lab's
network is that of a second operator's controller.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lab import Fleet
from .three import NAME, TINY, Three

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def rules(three: Three, host: int) -> list[str]:
    """The ufw rules of a fleet on a host."""
    return [line for line in three.inside(host, "ufw show added").splitlines() if "nanofleet" in line]


def state(three: Three, host: int) -> str:
    """All that a fleet puts on a host and another could take away."""
    return three.inside(
        host,
        "ufw show added; cat /etc/sysctl.d/60-nanofleet.conf /opt/nanofleet/fleet.json;"
        " cat /proc/sys/net/ipv4/ip_local_port_range; systemctl list-units 'nanofleet-*' --no-legend;"
        " ls /opt",
    )


@pytest.fixture(scope="module")
def attic(three: Three, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet of the third host and the second, which is in the fleet home as well."""
    inventory = tmp_path_factory.mktemp("inventories") / "attic" / "hosts.yml"
    inventory.parent.mkdir()
    assert three.all.inventory is not None
    text = re.sub(rf" +{NAME}-1:\n +ansible_host: \S+\n", "", three.all.inventory.read_text())
    third = re.search(rf" +{NAME}-3:\n +ansible_host: \S+\n", text)
    assert third
    text = text.replace(third[0], "").replace("  hosts:\n", f"  hosts:\n{third[0]}", 1)
    inventory.write_text(text)
    return Fleet(three.all.workdir, inventory)


@pytest.fixture
def second_address(three: Three) -> Iterator[str]:
    """Another address of this machine on the lab's network, as that of another controller."""
    gateway, own = (three.addresses[0].rsplit(".", 1)[0] + end for end in (".1", ".200"))
    shown = subprocess.run(
        ["ip", "-o", "address", "show", "to", gateway], capture_output=True, text=True, check=True
    )
    bridge = shown.stdout.split()[1]
    subprocess.run(["ip", "address", "add", f"{own}/24", "dev", bridge], check=True)
    yield own
    subprocess.run(["ip", "address", "del", f"{own}/24", "dev", bridge], check=True)


def test_a_second_fleet_is_refused_by_name_before_anything_is_changed(
    three: Three, attic: Fleet, dataset: Path
) -> None:
    three.home.play("setup.yml", data_dir=dataset)
    before = state(three, 2)
    assert "comment 'nanofleet home'" in before
    for playbook, settings in (
        ("setup.yml", {"data_dir": dataset}),
        ("train.yml", TINY),
        ("bench.yml", {}),
        ("stop.yml", {}),
        ("stop.yml", {"stop_now": True}),
        ("reset.yml", {"reset_confirm": True}),
    ):
        refused = attic.play(playbook, fails=True, **settings)
        printed = " ".join(refused.stdout.split())
        for words in (
            f"{NAME}-2 serves the fleet home: {NAME}-1",
            "set up by ",
            "put fleet_id: home into group_vars/fleet.yml",
            f"reset.yml -e fleet_id=home -e reset_confirm=true --limit {NAME}-2",
            "No host was changed",
        ):
            assert words in printed, f"{playbook}: {printed}"
        assert refused.changed() == 0
    assert state(three, 2) == before
    assert three.inside(3, "ls /opt; ufw show added | grep nanofleet || true") == ""


def test_two_operators_of_one_fleet_reach_the_tracker_and_change_nothing_of_each_other(
    three: Three, dataset: Path, tmp_path: Path, second_address: str
) -> None:
    gateway = second_address.rsplit(".", 1)[0] + ".1"
    three.home.play("setup.yml", data_dir=dataset, tracker_controllers=gateway)
    assert three.home.inventory is not None
    inventory = tmp_path / "office" / "hosts.yml"
    inventory.parent.mkdir()
    text = three.home.inventory.read_text().replace("  vars:\n", "  vars:\n    fleet_id: home\n")
    inventory.write_text(
        text.replace("-o IdentitiesOnly=yes", f"-o IdentitiesOnly=yes -o BindAddress={second_address}")
        # A shared connection would come from the first one's address.
        .replace("/cp\"", "/cp2\"")
    )  # fmt: skip
    second = Fleet(tmp_path, inventory)
    workers = three.inside(2, "cat /opt/nanofleet/fleet.json; ufw show added")

    added = second.play("setup.yml", data_dir=dataset)
    changed = {host: count for host, count in added.stats["changed"].items() if count}
    # The claim, the firewall, the tracker's unit and its restart.
    assert changed == {f"{NAME}-1": 4}
    assert three.inside(2, "cat /opt/nanofleet/fleet.json; ufw show added") == workers
    for operator in (three.home, second, three.home):
        assert operator.play("setup.yml", data_dir=dataset).changed() == 0
    of_tracker = [line for line in rules(three, 1) if "port 5000" in line]
    for address in (gateway, second_address):
        assert any(f"from {address} " in line for line in of_tracker), of_tracker
        health = ["curl", "-sf", "--noproxy", "*", "--interface", address, "-m", "5",
                  f"http://{three.addresses[0]}:5000/health"]  # fmt: skip
        assert subprocess.run(health, capture_output=True, text=True, check=True).stdout == "OK"

    three.home.play("setup.yml", data_dir=dataset, tracker_controllers=gateway)
    assert not any(f"from {second_address} " in line for line in rules(three, 1)), "one was taken out"


def test_another_name_for_the_same_hosts_renames_the_fleet(three: Three, dataset: Path) -> None:
    for name in ("house", "home"):
        printed = three.home.play("setup.yml", data_dir=dataset, fleet_id=name).stdout
        assert f"It is now named {name}." in " ".join(printed.split())
        assert {line.partition("comment ")[2] for line in rules(three, 2)} == {f"'nanofleet {name}'"}
        assert f"of the fleet {name}." in three.inside(2, "cat /etc/sysctl.d/60-nanofleet.conf")
        assert three.home.play("setup.yml", data_dir=dataset, fleet_id=name).changed() == 0


def test_rules_and_hosts_of_an_older_release_are_taken_over(three: Three, dataset: Path) -> None:
    before = rules(three, 2)
    for rule in before:
        words = rule.partition(" comment")[0].removeprefix("ufw ")
        three.inside(2, f"ufw {words} comment nanofleet")
    three.inside(2, "rm /opt/nanofleet/fleet.json")
    three.home.play("status.yml")
    three.home.play("setup.yml", data_dir=dataset)
    assert rules(three, 2) == before
    assert '"fleet_id": "home"' in three.inside(2, "cat /opt/nanofleet/fleet.json")


def test_a_host_serves_one_fleet_after_the_other(three: Three, attic: Fleet, dataset: Path) -> None:
    three.home.play("reset.yml", reset_confirm=True)
    assert three.inside(2, "ls /opt; ufw show added | grep nanofleet || true") == ""
    attic.play("setup.yml", data_dir=dataset)
    before = state(three, 2)
    assert "comment 'nanofleet attic'" in before
    printed = three.home.play("reset.yml", fails=True, reset_confirm=True).stdout
    assert f"{NAME}-2 serves the fleet attic" in " ".join(printed.split())
    assert state(three, 2) == before
    attic.play("reset.yml", reset_confirm=True)
