"""Trainings that must not start, or whose start is broken off: refused with a sentence, or going on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.faults import FAULTS

from .messages import message
from .site import COORDINATOR, WORKER, Site
from .test_links import DROP

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _free_hosts(site: Site) -> None:
    site.clear()


@pytest.fixture(scope="module", autouse=True)
def _default(site: Site) -> Iterator[None]:
    """Runs are elastic, as by default: a start that fails is refused or reported in the same way."""
    site.elastic = "auto"
    yield
    site.elastic = "false"


def refusal(
    site: Site, run_id: str, fault: str, words: str, also: tuple[str, ...] = (), **settings: object
) -> str:
    """What train.yml says when it refuses, as one line; a row of it. also: what the same message has."""
    started = time.monotonic()
    output = site.train(run_id, fails=True, **settings)
    seconds = time.monotonic() - started
    text = " ".join(output.split())
    assert words in text, output
    printed = message(output, words)
    assert all(word in printed for word in also), printed
    site.note(fault, seconds, printed, "refused, nothing was started")
    site.nothing_is_left()
    return text


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        ("another version of torch", "2.11.0", "setup.yml"),
        ("one byte of a shard altered", "altered", "setup.yml"),
    ],
)
def test_hosts_that_have_come_to_differ(site: Site, name: str, words: str, remedy: str) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    site.inside(WORKER, fault.plant)
    try:
        refusal(site, "differs", name, words, also=(site.names[1], remedy))
    finally:
        site.inside(WORKER, fault.fix)


def test_packets_dropped_since_the_last_good_look(site: Site) -> None:
    """A rule that somebody adds is a change of the fleet: the next start looks before anything is started."""
    name = f"before-{int(time.time())}"
    site.train(name, doctor="auto")
    site.stop(name)
    peer = site.addresses[COORDINATOR - 1]
    site.inside(WORKER, DROP.format("I", peer))
    try:
        text = refusal(
            site, "dropped", "packets dropped before a start", f"-s {peer}/32 -j DROP", doctor="auto"
        )
    finally:
        site.inside(WORKER, DROP.format("D", peer))
    assert f"{site.names[1]} has another firewall since the last check without a fault" in text
    assert f"Fix: sudo iptables -D INPUT -s {peer}/32 -j DROP" in text


def test_bfloat16_where_it_is_emulated(site: Site, tmp_path: Path) -> None:
    """oneDNN may not use the instructions for it; a processor that has none is refused by preflight."""
    elsewhere = site.changed(tmp_path, "launch_properties: {Environment: ONEDNN_MAX_CPU_ISA=AVX2}")
    words = "only emulates it"
    name = f"emulated-{int(time.time())}"
    text = refusal(elsewhere, name, "bfloat16 where it is emulated", words, dtype="bfloat16")
    assert "dtype is bfloat16, but" in text
    assert "Set dtype to float32, or to auto" in text or "-e dtype=auto" in text


def test_a_loss_that_is_not_a_number_ends_the_run_everywhere(site: Site, tmp_path: Path) -> None:
    name = f"nan-{int(time.time())}"
    with site.awaits_line(name, "final:", "the run has diverged", seconds=120) as awaited:
        site.begin("train.yml", name, tmp_path, matrix_lr="1e30", embedding_lr="1e30").end()
    site.ended(name, 30)
    for host in (COORDINATOR, WORKER):
        outcome = site.json(host, name, "outcome.json")
        assert outcome["outcome"] == "final", outcome
        assert "diverged" in outcome["reason"]
    shown = site.play("status.yml", name)
    assert "Start a new run with lower ones" in " ".join(shown.split())
    site.nothing_is_left()
    site.note("a loss that is not a number", awaited.seconds, awaited.line, "ended on all hosts")


def test_units_that_are_left_from_before(site: Site) -> None:
    """One that failed is cleared; one that is up is refused, with how to end it."""
    name = f"stale-{int(time.time())}"
    for host in (COORDINATOR, WORKER):
        site.inside(
            host,
            f"systemd-run --quiet --unit nanofleet-{name} false;"
            f" timeout 30 sh -c 'until systemctl --quiet is-failed nanofleet-{name}; do sleep 0.2; done'",
        )
    site.train(name)
    site.stop(name)
    site.inside(WORKER, "systemd-run --quiet --unit nanofleet-before sleep 1000")
    try:
        text = refusal_left_alone(site, name)
    finally:
        site.inside(WORKER, "systemctl stop nanofleet-before")
    assert "stop.yml -e run_id=before" in text


def refusal_left_alone(site: Site, name: str) -> str:
    started = time.monotonic()
    output = site.train(name, fails=True)
    words = "is busy with another run, before (unit nanofleet-before.service)"
    assert words in " ".join(output.split()), output
    assert site.unit(WORKER, "before")["ActiveState"] == "active", "it is not ours to end"
    site.note(
        "a unit left from before",
        time.monotonic() - started,
        message(output, "is busy"),
        "refused, nothing was started",
    )
    return " ".join(output.split())


def test_two_trains_at_once(site: Site, tmp_path: Path) -> None:
    """Typed twice in two terminals: never two runs, and the refusal has the reason."""
    names = [f"{word}-{int(time.time())}" for word in ("one", "two")]
    started = time.monotonic()
    plays = [site.begin("train.yml", name, tmp_path) for name in names]
    codes = [play.end() for play in plays]
    seconds = time.monotonic() - started
    refused = [play.output for play, code in zip(plays, codes, strict=True) if code]
    assert refused, "both trained"
    for output in refused:
        assert re.search(rf"another run.*({'|'.join(names)})|another run computes", output, re.DOTALL), output
    up = [name for name in names if site.unit(COORDINATOR, name)["ActiveState"] == "active"]
    assert len(up) == codes.count(0) <= 1
    for name, code in zip(names, codes, strict=True):
        if code == 0:
            site.trains(name)
            site.stop(name)
    site.nothing_is_left()
    printed = message(refused[0], "another run")
    site.note("two trains at once", seconds, printed, f"{codes.count(0)} of them trained")


@pytest.mark.parametrize(
    ("fault", "number"),
    [("Ctrl-C in the middle of train.yml", signal.SIGINT), ("the controller gone", signal.SIGKILL)],
)
def test_a_start_that_loses_its_controller(site: Site, tmp_path: Path, fault: str, number: int) -> None:
    """The units are up and need nobody: the run trains; train.yml again says so, and stop.yml ends it."""
    name = f"left-{number}-{int(time.time())}"
    play = site.begin("train.yml", name, tmp_path)
    site.until(
        lambda: all(site.unit(host, name)["ActiveState"] == "active" for host in (COORDINATOR, WORKER)),
        120,
        "units",
    )
    play.signal(number)
    assert play.end(60) != 0
    began = time.monotonic()
    site.trains(name)
    seconds = time.monotonic() - began
    again = " ".join(site.train(name).split())
    assert f"The run {name} is active" in again
    site.stop(name)
    site.nothing_is_left()
    site.note(fault, seconds, message(again, "is active"), "the run trains; stop.yml ends it")
