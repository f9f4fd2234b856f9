"""Hosts that freeze, sleep, lose power, leave and join, and what becomes of their run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.lab import Fleet

from .messages import message
from .site import COORDINATOR, IMPATIENT, STATE, TINY, WORKER, Site
from .test_links import UP

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

SLEEP = "podman exec {name} ip link set eth0 down && podman pause {name}"
WAKE = "podman unpause {name} && " + UP
"""A paused container's kernel still answers for it, so its link goes down as well."""


@pytest.fixture(scope="module")
def run(site: Site) -> Iterator[str]:
    with site.running("hosts") as run_id:
        yield run_id


def test_a_host_asleep(site: Site, run: str) -> None:
    log = site.log_size(WORKER, run)
    site.survives(
        run,
        "a host asleep",
        lambda: site.outside(SLEEP, WORKER),
        "Lost rank 1",
        "down, asleep or cut off",
        within=2 * IMPATIENT + 15,
        fix=lambda: site.outside(WAKE, WORKER),
    )
    woken = site.inside(WORKER, f"tail -c +{log + 1} {STATE}/runs/{run}/train.log")
    assert re.search(r"This process (itself had stood|stood) still for \d+ s", woken), woken


def test_a_host_without_power_returns_to_its_run_by_itself(site: Site, run: str) -> None:
    def boot() -> None:
        site.outside("podman start {name}", WORKER)
        site.boots(WORKER)

    site.survives(
        run,
        "a host's power cut, then rebooted",
        lambda: site.outside("podman kill {name}", WORKER),
        "Lost rank 1",
        within=2 * IMPATIENT + 15,
        fix=boot,
    )


def test_a_host_leaves_for_good_and_another_joins(site: Site, run: str, tmp_path: Path) -> None:
    """It is shut down in order; the rest continues from the checkpoint, with an inventory of the rest."""
    before, step = site.log_size(COORDINATOR, run), site.step(run)
    with site.awaits_line(run, site.names[1], "Asked to end by SIGTERM", seconds=30) as awaited:
        site.outside("podman stop --time 30 {name}", WORKER)
    try:
        rest = tmp_path / "hosts.yml"
        assert site.fleet.inventory is not None
        text = site.fleet.inventory.read_text()
        address = site.addresses[1]
        rest.write_text(
            re.sub(rf"workers:\n  hosts:\n    {site.names[1]}:\n.*{re.escape(address)}\n", "workers:\n", text)
        )
        assert address not in rest.read_text()
        log = site.log_size(COORDINATOR, run)
        alone = Fleet(site.fleet.workdir, rest).play(
            "train.yml", run_id=run, data_dir=site.data, launch_stall_seconds=IMPATIENT, elastic=False, **TINY
        )
        site.resumed(run, log)
        site.trains(run, beyond=step + 1)
        assert "its units are ended, and it resumes on" in " ".join(alone.stdout.split())
        site.note(
            "a host shut down, and gone for good",
            awaited.seconds,
            awaited.line,
            "resumed without it by train.yml",
            site.pause(run, awaited, step, before),
        )
    finally:
        site.outside("podman start {name}", WORKER)
        site.boots(WORKER)
    # Its unit starts again with the host and waits for the run of two hosts; the run on one host continues.
    site.trains(run, beyond=site.step(run) + 1)

    began = time.monotonic()
    while_active = site.train(run)
    site.play("stop.yml", run)
    log, step = site.log_size(COORDINATOR, run), site.json(COORDINATOR, run, "outcome.json")["step"]
    site.train(run, launch_stall_seconds=IMPATIENT)
    site.resumed(run, log)
    site.trains(run, beyond=step)
    site.pid(WORKER, run)
    site.note(
        "a host joins",
        time.monotonic() - began,
        message(while_active, "to continue on these"),
        "resumed on both",
    )
    site.losses(run)  # no step twice, none left out


def test_a_frozen_rank_is_named_within_the_minute(site: Site, run: str) -> None:
    """SIGSTOP with the minute that people have: given up after another one, back after SIGCONT."""
    site.play("stop.yml", run)
    site.train(run)
    step, before = site.step(run), site.log_size(COORDINATOR, run)
    with site.awaits_line(run, "Lost rank 1", "is frozen", seconds=140) as given_up:
        pid = 0

        def freeze() -> None:
            nonlocal pid
            pid = site.pid(WORKER, run)
            site.inside(WORKER, f"kill -STOP {pid}")

        with site.awaits_line(
            run, "is frozen (its host takes the connection, the process does not answer)", seconds=75
        ) as named:
            freeze()
        assert named.seconds < 75
        assert "frozen" in site.play("status.yml", run)
    log = site.log_size(COORDINATOR, run)
    with site.awaits_line(run, "stood still for", host=WORKER, seconds=30) as continued:
        site.inside(WORKER, f"kill -CONT {pid}")
    site.resumed(run, log)
    site.trains(run)
    after = continued.planted_at - named.planted_at
    site.note(
        "SIGSTOP of a rank",
        named.seconds,
        named.line,
        f"ended after {given_up.seconds:.0f} s; resumed after SIGCONT at {after:.0f} s",
        site.pause(run, named, step, before),
    )
