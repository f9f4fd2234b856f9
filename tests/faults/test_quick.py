"""Six faults of a running training (make test-faults): what is said, how soon, what becomes of the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .site import STATE, Site

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow]

WORKER, COORDINATOR = 2, 1


@pytest.fixture(scope="module")
def run(site: Site) -> str:
    """A run that trains; its faults are those it recovers from."""
    name = f"quick-{int(time.time())}"  # a lab that is used again may have finished one of the name
    site.train(name)
    return name


def test_a_killed_rank_comes_back_and_the_run_goes_on(site: Site, run: str) -> None:
    site.trains(run, beyond=30)  # past its first checkpoint
    step = site.step(run)
    with site.hears(run, "Lost rank 1", site.names[1]) as said:
        site.inside(WORKER, f"kill -KILL {site.pid(WORKER, run)}")
    assert said.seconds < 20
    with site.hears(run, "Going on from the checkpoint"):
        pass
    recovered = site.trains(run, beyond=step)
    shown = site.play("status.yml", run)
    assert "1 ended" in shown
    assert "Lost rank 1" in shown
    assert site.unit(COORDINATOR, run)["NRestarts"] == "1"
    site.note("SIGKILL of a rank", said.seconds, said.line, f"recovered in {recovered:.0f} s")


def test_another_run_is_refused_while_one_is_active(site: Site, run: str, tmp_path: Path) -> None:
    started = time.monotonic()
    refused = site.train("other", fails=True)
    assert f"is busy with another run, {run} (unit nanofleet-{run}.service)" in " ".join(refused.split())
    assert f"stop.yml -e run_id={run}" in refused
    site.note(
        "a second run", time.monotonic() - started, _message(refused, "is busy"), "refused; the first goes on"
    )


def test_stop_with_a_dead_host_names_it_and_ends_the_rest(site: Site, run: str) -> None:
    site.trains(run)
    site.outside("podman kill {name}", WORKER)
    try:
        started = time.monotonic()
        said = site.play("stop.yml", run, fails=True, stop_now="true")
        seconds = time.monotonic() - started
        assert site.unit(COORDINATOR, run)["ActiveState"] in ("inactive", "failed")
        assert f"{site.names[1]} did not answer" in " ".join(said.split())
        site.nothing_is_left(hosts=(COORDINATOR,))
    finally:
        site.outside("podman start {name}", WORKER)
    site.until(
        lambda: "ssh" in site.inside(WORKER, "systemctl is-active ssh", check=False) or True, 5, "boot"
    )
    site.until(
        lambda: site.inside(WORKER, "systemctl is-system-running", check=False) in ("running", "degraded"),
        60,
        "boot",
    )
    site.nothing_is_left()
    assert seconds < 25
    site.note("stop with a dead host", seconds, _message(said, "did not answer"), "ended on the others")


def test_a_held_port_is_named_with_its_process(site: Site) -> None:
    site.inside(
        COORDINATOR,
        "systemd-run --quiet --unit=squatter --collect python3 -m http.server 29500"
        " && sleep 1 && ss -Htln | grep 29500",
    )
    try:
        started = time.monotonic()
        refused = site.train("held", fails=True)
        seconds = time.monotonic() - started
    finally:
        site.inside(COORDINATOR, "systemctl stop squatter")
    text = " ".join(refused.split())
    assert f"Port 29500 on {site.names[0]} is held by process" in text
    assert "sudo systemctl stop squatter.service" in text
    site.note(
        "the store's port is held", seconds, _message(refused, "Port 29500"), "refused, nothing was started"
    )


def test_a_stop_during_the_start_ends_it(site: Site, tmp_path: Path) -> None:
    play = site.begin("train.yml", "early", tmp_path)
    site.until(lambda: site.unit(COORDINATOR, "early")["ActiveState"] == "active", 60, "the unit")
    started = time.monotonic()
    said = site.play("stop.yml", "early")
    seconds = time.monotonic() - started
    assert play.end() != 0, play.output
    assert "did not start" in play.output
    assert "Stopped by stop.yml" in play.output
    site.nothing_is_left()
    site.note("stop during the start", seconds, _message(said, "nothing to save"), "ended")


def test_a_full_disk_at_a_checkpoint_ends_the_run_with_its_cause(site: Site) -> None:
    folder = f"{STATE}/runs/full/checkpoints"
    make = f"install -d -o nanofleet -g nanofleet {STATE}/runs/full {folder}"
    site.inside(COORDINATOR, f"{make} && mount -t tmpfs -o size=64k,mode=777 tmpfs {folder}")
    try:
        with site.hears("full", "final:", "No space is left", seconds=120) as said:
            site.train("full")
        site.ended("full", 60)
        outcomes = [site.json(host, "full", "outcome.json") for host in (1, 2)]
        assert outcomes[0]["outcome"] == "final", outcomes
        assert "No space is left" in outcomes[0]["reason"]
        assert outcomes[1]["outcome"] == "final", outcomes
        shown = site.play("status.yml", "full")
        assert "No space is left" in shown
    finally:
        site.inside(COORDINATOR, f"umount {folder}")
    site.nothing_is_left()
    site.note("disk full at a checkpoint", said.seconds, said.line, "ended, with the last good checkpoint")


def _message(output: str, word: str) -> str:
    """The line of a playbook's output, as YAML folds it, that has a word."""
    lines = output.splitlines()
    at = next(index for index, line in enumerate(lines) if word in line)
    start = max(i for i in range(at + 1) if "msg:" in lines[i] or i == at)
    return " ".join(line.strip() for line in lines[start : at + 1]).removeprefix("msg: ").strip("'\"|- ")
