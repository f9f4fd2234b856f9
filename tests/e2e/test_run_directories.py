"""A run's directories on the hosts: links that the service user plants in them, and one that is removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lab import LAB, Fleet

pytestmark = [pytest.mark.lab, pytest.mark.slow]

TINY = {
    "depth": 2, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "total_batch_size": 1024,
    "device_batch_size": 4, "warmup_steps": 2, "eval_tokens": 2048, "steps": 400_000, "eval_every": 0,
    "doctor": "never",
}  # fmt: skip
STATE, ROOTS = "/var/lib/nanofleet", "/etc/planted"
RUN = f"{STATE}/runs/planted"
HOSTS = (f"{LAB}-1", f"{LAB}-2")
REMOVE = f"mv {RUN} {RUN}-removed && rm -r {RUN}-removed"  # in one step: the rank still writes into it


@pytest.fixture(scope="module")
def hosts(fleet: Fleet, dataset: Path) -> Fleet:
    """The fleet, set up."""
    fleet.play("setup.yml", data_dir=dataset)
    return fleet


@pytest.fixture
def run(hosts: Fleet) -> Iterator[str]:
    """A run that trains, and is gone afterwards."""
    hosts.play("train.yml", run_id="planted", **TINY)
    yield "planted"
    for host in HOSTS:
        hosts.on(host, f"systemctl stop nanofleet-planted; rm -rf {RUN} {ROOTS}; true")


def plant(fleet: Fleet, command: str) -> str:
    """Files of root's, then a command of the service user on the coordinator; returns of_root()."""
    fleet.on(HOSTS[0], f"install -d -m 0700 {ROOTS} {ROOTS}/folder; echo secret-of-root >{ROOTS}/file")
    fleet.on(HOSTS[0], f"chmod 600 {ROOTS}/file; cd {RUN}; runuser -u nanofleet -- sh -c '{command}'")
    return of_root(fleet)


def of_root(fleet: Fleet) -> str:
    """Owner, group, mode, name and content of root's files."""
    return fleet.on(HOSTS[0], f"find {ROOTS} -printf '%u %g %m %p\\n' | sort; cat {ROOTS}/file")


def test_a_stop_follows_no_planted_link(hosts: Fleet, run: str) -> None:
    """The link itself asks the run to stop, so stop.yml may find that it has ended."""
    before = plant(hosts, f"ln -s {ROOTS}/file stop")
    hosts.play("stop.yml", run_id=run)
    assert of_root(hosts) == before
    assert '"outcome": "stopped"' in hosts.on(HOSTS[0], f"cat {RUN}/outcome.json")


def test_a_start_refuses_a_run_directory_that_is_a_link(hosts: Fleet, run: str) -> None:
    hosts.play("stop.yml", run_id=run, stop_now=True)
    before = plant(hosts, f"cd ..; mv planted away; ln -s {ROOTS}/folder planted; :")
    refused = hosts.play("train.yml", fails=True, run_id=run, **TINY).stdout
    hosts.on(HOSTS[0], f"rm -r {STATE}/runs/away")
    assert of_root(hosts) == before
    assert f"{RUN} is a link to {ROOTS}/folder" in " ".join(refused.split())


def test_a_start_names_a_link_in_the_run_directory(hosts: Fleet, run: str) -> None:
    hosts.play("stop.yml", run_id=run, stop_now=True)
    before = plant(hosts, f"ln -sf {ROOTS}/file train.log; ln -sf {ROOTS}/file outcome.json")
    refused = " ".join(hosts.play("train.yml", fails=True, run_id=run, **TINY).stdout.split())
    assert f"{RUN}/train.log on {HOSTS[0]} is a symbolic link to {ROOTS}/file" in refused
    for playbook in ("status.yml", "logs.yml"):
        assert "secret-of-root" not in hosts.play(playbook, run_id=run).stdout
    assert of_root(hosts) == before


def test_a_second_setup_takes_no_folder_of_roots_for_one_of_the_service_user(
    hosts: Fleet, dataset: Path, run: str
) -> None:
    """Upgraded from a version that gave the state folder to the service user, who has put links there."""
    hosts.play("stop.yml", run_id=run, stop_now=True)
    before = plant(hosts, "true")
    hosts.on(
        HOSTS[0], f"cd {STATE}; mv mlflow records; ln -s {ROOTS}/folder mlflow; chown -h nanofleet mlflow"
    )
    try:
        printed = hosts.play("setup.yml", fails=True, data_dir=dataset).stdout
    finally:
        hosts.on(HOSTS[0], f"cd {STATE}; rm mlflow; mv records mlflow")
    assert f"{STATE}/mlflow already exists as a link" in " ".join(printed.split())
    assert of_root(hosts) == before
    assert hosts.on(HOSTS[0], f"stat -c %U {STATE}") == "root"
    hosts.play("setup.yml", data_dir=dataset)


def test_a_run_is_closed_to_the_world_and_open_to_whoever_logs_in(
    hosts: Fleet, run: str, tmp_path: Path
) -> None:
    hosts.play("stop.yml", run_id=run)
    login = hosts.on(HOSTS[0], "getent group nanofleet").rpartition(":")[2]
    assert login
    hosts.on(HOSTS[0], f"runuser -u {login} -- test -r {RUN}/train.log")
    assert hosts.on(HOSTS[0], f"runuser -u nobody -- ls {STATE}/runs 2>&1 || true").endswith(
        "Permission denied"
    )
    assert hosts.on(HOSTS[0], f"find {RUN} -perm /o=rwx ! -type l") == ""
    hosts.play("fetch.yml", run_id=run, fetch_to=tmp_path)
    assert list(tmp_path.glob(f"{run}/{HOSTS[0]}/checkpoints/step_*/model.safetensors"))


def test_a_run_directory_that_is_removed_on_a_worker_is_named_and_put_back(hosts: Fleet, run: str) -> None:
    hosts.on(HOSTS[1], REMOVE)
    status = " ".join(hosts.play("status.yml", run_id=run).stdout.split())
    assert f"{HOSTS[1]} active - no directory" in status
    assert f"Missing: {RUN} on {HOSTS[1]}, where the unit is active." in status
    again = " ".join(hosts.play("train.yml", run_id=run, **TINY).stdout.split())
    assert f"its directory is missing on {HOSTS[1]}" in again
    assert "from its checkpoint of step" in again, "it was saved before its units were ended"
    # Now the unit ends as well, and systemd cannot start it again.
    hosts.on(HOSTS[1], f"{REMOVE}; systemctl kill -s KILL nanofleet-planted; sleep 15")
    assert "Missing:" in hosts.play("status.yml", run_id=run).stdout
    hosts.play("train.yml", run_id=run, **TINY)
    for host in HOSTS:
        assert hosts.on(host, "systemctl is-active nanofleet-planted") == "active"
    run_file = json.loads(hosts.on(HOSTS[1], f"cat {RUN}/run.json"))
    assert run_file["hosts"] == list(HOSTS)
