"""Two people operate one fleet; and who on a host can read the data, or misuse what root does with them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .lab import LAB, ROOT, Fleet

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1800)]

HOSTS = (f"{LAB}-1", f"{LAB}-2")
DATA = "/var/lib/nanofleet/data"


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("other")
    source = Path(sysconfig.get_paths()["stdlib"]) / "xml"
    command = [sys.executable, "-m", "trainer", "prepare", "--out", str(out), "--vocab-size", "512"]
    subprocess.run([*command, "--source", str(source)], cwd=ROOT, check=True)
    return out


@pytest.fixture(scope="module")
def colleague(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The same fleet as another operator reaches it, who has a login user with sudo on every host."""
    home = "/home/ops2"
    for host in HOSTS:
        fleet.on(host, "id ops2 2>/dev/null || useradd --create-home --shell /bin/bash ops2")
        fleet.on(host, f"install -d -m 0700 -o ops2 {home}/.ssh")
        fleet.on(host, f"install -m 0600 -o ops2 /home/ops/.ssh/authorized_keys {home}/.ssh/")
        fleet.on(host, "echo 'ops2 ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ops2")
    assert fleet.inventory
    # Of the same name, by which both mean the same fleet.
    inventory = tmp_path_factory.mktemp("colleague").joinpath(*fleet.inventory.parts[-3:])
    inventory.parent.mkdir(parents=True)
    text = fleet.inventory.read_text()
    assert "ansible_user: ops\n" in text
    inventory.write_text(text.replace("ansible_user: ops\n", "ansible_user: ops2\n"))
    return Fleet(fleet.workdir, inventory)


def test_another_operator_sends_other_data_and_the_first_one_sends_them_back(
    fleet: Fleet, colleague: Fleet, dataset: Path, other_data: Path
) -> None:
    fleet.play("setup.yml", data_dir=dataset)
    colleague.play("setup.yml", data_dir=dataset)  # admits this login user to the service user's group
    for operator in (colleague, fleet):
        assert not operator.play("setup.yml", data_dir=dataset).changes(), "both see the same fleet"
    for operator, data in ((colleague, other_data), (fleet, dataset)):
        assert operator.play("setup.yml", data_dir=data).changed() > 0
        assert operator.play("setup.yml", data_dir=data).changed() == 0
        manifest = hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()
        for host in HOSTS:
            assert fleet.on(host, f"sha256sum {DATA}/manifest.json").split()[0] == manifest
            owners = fleet.on(host, f"find {DATA} -path {DATA}/rows -prune -o -printf '%U %G\\n' | sort -u")
            assert owners == fleet.on(host, "echo $(id -u nanofleet) $(id -g nanofleet)")


def test_the_data_are_read_by_the_service_user_and_its_group_alone(fleet: Fleet, dataset: Path) -> None:
    fleet.play("setup.yml", data_dir=dataset)
    for host in HOSTS:
        assert fleet.on(host, f"stat -c %a {DATA}") == "750"
        assert fleet.on(host, f"runuser -u nobody -- cat {DATA}/manifest.json 2>&1 || true").endswith(
            "denied"
        )
        assert fleet.on(host, f"runuser -u nanofleet -- head -c 1 {DATA}/manifest.json") == "{"


def test_root_follows_no_link_that_the_service_user_planted(fleet: Fleet, dataset: Path) -> None:
    """In the data folder; the folder around it is root's."""
    host, shards = HOSTS[1], f"{DATA}/shards"
    fleet.on(host, "install -d -o root -m 0755 /srv/precious && echo kept >/srv/precious/manifest.json")
    fleet.on(
        host,
        f"runuser -u nanofleet -- sh -c 'rm -r {shards} && ln -s /srv/precious {shards} && ! mv {DATA} x'",
    )
    assert fleet.play("setup.yml", data_dir=dataset).changed() > 0
    listing = fleet.on(host, "find /srv/precious -printf '%f %U %m '; cat /srv/precious/manifest.json")
    assert listing == "precious 0 755 manifest.json 0 644 kept"
    assert fleet.on(host, f"stat -c '%F %U' {shards}") == "directory nanofleet"
    assert fleet.play("setup.yml", data_dir=dataset).changed() == 0


def test_a_link_in_the_place_of_the_data_folder_is_refused(fleet: Fleet, dataset: Path) -> None:
    """Of a version that gave the folder around it to the service user."""
    host = HOSTS[1]
    fleet.on(host, "install -d -o root -m 0755 /srv/elsewhere && echo kept >/srv/elsewhere/manifest.json")
    fleet.on(host, f"mv {DATA} {DATA}.aside && ln -s /srv/elsewhere {DATA} && chown -h nanofleet {DATA}")
    try:
        refused = fleet.play("setup.yml", fails=True, data_dir=dataset)
        assert f"{DATA} is a link or not a folder. Remove it" in " ".join(refused.stdout.split())
        listing = fleet.on(host, "find /srv/elsewhere -printf '%f %U %m '; cat /srv/elsewhere/manifest.json")
        assert listing == "elsewhere 0 755 manifest.json 0 644 kept"
    finally:
        fleet.on(host, f"rm {DATA} && mv {DATA}.aside {DATA}")
    assert fleet.play("setup.yml", data_dir=dataset).changed() == 0
