"""Six faults of a running training (make test): what is reported, how soon, what becomes of the run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .messages import message
from .site import COORDINATOR, STATE, WORKER, Site, slack
from .test_links import DROP

pytestmark = [pytest.mark.lab, pytest.mark.faults]


@pytest.fixture(scope="module")
def run(site: Site) -> str:
    """A run that trains; its faults are those it recovers from."""
    name = f"quick-{int(time.time())}"  # a lab that is used again may have finished one of the name
    site.train(name)
    return name


def test_a_killed_rank_comes_back_and_the_run_goes_on(site: Site, run: str) -> None:
    site.trains(run, beyond=30)  # past its first checkpoint
    log, step = site.log_size(COORDINATOR, run), site.step(run)
    with site.awaits_line(run, "Lost rank 1", site.names[1]) as awaited:
        site.inside(WORKER, f"kill -KILL {site.pid(WORKER, run)}")
    assert awaited.seconds < 20
    site.resumed(run, log)
    site.trains(run, beyond=step)
    shown = site.play("status.yml", run)
    assert "1 ended" in shown
    assert "Lost rank 1" in shown
    assert site.unit(COORDINATOR, run)["NRestarts"] == "1"
    site.note(
        "SIGKILL of a rank", awaited.seconds, awaited.line, "resumed", site.pause(run, awaited, step, log)
    )


def test_another_run_is_refused_while_one_is_active(site: Site, run: str, tmp_path: Path) -> None:
    started = time.monotonic()
    refused = site.train("other", fails=True)
    assert f"is busy with another run, {run} (unit nanofleet-{run}.service)" in " ".join(refused.split())
    assert f"stop.yml -e run_id={run}" in refused
    site.note(
        "a second run",
        time.monotonic() - started,
        message(refused, "is busy"),
        "refused; the first continues",
    )


def test_stop_with_a_dead_host_names_it_and_ends_the_rest(site: Site, run: str) -> None:
    site.trains(run)
    site.outside("podman kill {name}", WORKER)
    try:
        started = time.monotonic()
        printed = site.play("stop.yml", run, fails=True, stop_now="true")
        seconds = time.monotonic() - started
        assert site.unit(COORDINATOR, run)["ActiveState"] in ("inactive", "failed")
        assert f"No answer from {site.names[1]}, so no run was stopped there" in " ".join(printed.split())
        fix = (
            "Fix: start the host, or correct SSH or sudo there if the error above is about them, then ansible"
        )
        assert fix in " ".join(printed.split())
        site.nothing_is_left(hosts=(COORDINATOR,))
    finally:
        site.outside("podman start {name}", WORKER)
        site.boots(WORKER)
    # The stop did not reach the host, so its boot returns it to the run; the second stop ends it there.
    site.play("stop.yml", run, stop_now="true")
    site.nothing_is_left()
    assert seconds < 25 * slack()
    site.note("stop with a dead host", seconds, message(printed, "No answer from"), "ended on the others")


def test_a_held_port_is_named_with_its_process(site: Site) -> None:
    site.inside(
        COORDINATOR,
        "systemd-run --quiet --unit=squatter --collect python3 -m http.server 29500"
        " && timeout 30 sh -c 'until ss -Htln | grep -q :29500; do sleep 0.2; done'",
    )
    try:
        started = time.monotonic()
        refused = site.train("held", fails=True)
        seconds = time.monotonic() - started
    finally:
        site.inside(COORDINATOR, "systemctl stop squatter")
    lines = refused.splitlines()
    at = next(
        at for at, line in enumerate(lines) if "Port 29500, which the rendezvous store of a run" in line
    )
    printed, typed = lines[at].strip(), lines[at + 1].strip()
    assert printed.startswith(f"NF220  {site.names[COORDINATOR - 1]}")
    assert "unit squatter.service" in printed
    assert typed.startswith("Fix: sudo systemctl stop squatter.service")
    site.note("the store's port is held", seconds, f"{printed} {typed}", "refused, nothing was started")


def test_a_stop_during_the_start_ends_it(site: Site, tmp_path: Path) -> None:
    play = site.begin("train.yml", "early", tmp_path)
    site.until(lambda: site.unit(COORDINATOR, "early")["ActiveState"] == "active", 60, "the unit", play)
    peer = site.addresses[COORDINATOR - 1]
    site.inside(WORKER, DROP.format("I", peer))  # the ranks do not meet, so no step comes before the stop
    try:
        started = time.monotonic()
        printed = site.play("stop.yml", "early")
        seconds = time.monotonic() - started
    finally:
        site.inside(WORKER, DROP.format("D", peer))
    assert play.end() != 0, play.output
    assert "The cause: stop.yml has requested its end" in " ".join(play.output.split())
    site.nothing_is_left()
    site.note("stop during the start", seconds, message(printed, "without saving"), "ended")


def test_a_full_disk_at_a_checkpoint_costs_a_warning_and_no_attempt(site: Site) -> None:
    name = f"full-{int(time.time())}"
    folder = f"{STATE}/runs/{name}/checkpoints"
    site.inside(
        COORDINATOR,
        f"install -d -o nanofleet -g nanofleet {STATE}/runs/{name} {folder}"
        f" && mount -t tmpfs -o size=64m,mode=777 tmpfs {folder}",
    )
    try:
        site.train(name)
        site.until(
            lambda: site.json(COORDINATOR, name, "heartbeat-0.json").get("checkpoint"), 60, "a checkpoint"
        )
        step = site.step(name)
        with site.awaits_line(name, "warning: The checkpoint of step", "was not saved") as awaited:
            filling = f"while :; do cat /dev/zero >> {folder}/ballast; sleep 0.2; done"
            site.inside(
                COORDINATOR, f"systemd-run --quiet --collect --unit=filling sh -c '{filling}' 2> /dev/null"
            )
        site.trains(name, beyond=site.step(name))
        pause = site.pause(name, awaited, step, 0, restarts=False)
        assert "was not saved: it takes" in " ".join(site.play("status.yml", name).split())
        with site.awaits_line(name, "Saved checkpoints/step_", seconds=90) as again:
            site.inside(COORDINATOR, f"systemctl stop filling; rm {folder}/ballast")
        assert site.unit(COORDINATOR, name)["NRestarts"] == "0"
        site.play("stop.yml", name)
        assert site.json(COORDINATOR, name, "outcome.json")["outcome"] == "stopped"
    finally:
        site.inside(COORDINATOR, f"systemctl stop filling nanofleet-{name}; umount {folder}", check=False)
    site.nothing_is_left()
    then = f"continued; saved again {again.seconds:.0f} s after room was made"
    site.note("disk full at a checkpoint", awaited.seconds, awaited.line, then, pause)
