"""Trainings that must not start: each is refused with a sentence, and nothing is left of it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from e2e.faults import FAULTS
from e2e.lab import Fleet

from .said import message
from .site import WORKER, Site

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _free_hosts(site: Site) -> None:
    site.clear()


def refusal(site: Site, run_id: str, fault: str, words: str, **knobs: object) -> str:
    """What train.yml says when it refuses, as one line; a row of it."""
    started = time.monotonic()
    output = site.train(run_id, fails=True, **knobs)
    seconds = time.monotonic() - started
    text = " ".join(output.split())
    assert words in text, output
    site.note(fault, seconds, message(output, words), "refused, nothing was started")
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
        text = refusal(site, "differs", name, words)
    finally:
        site.inside(WORKER, fault.mend)
    assert site.names[1] in text
    assert remedy in text


def test_bfloat16_where_it_is_emulated(site: Site, tmp_path: Path) -> None:
    """oneDNN is kept from the instructions that the processor has for it."""
    assert site.fleet.inventory is not None
    inventory = tmp_path / "hosts.yml"
    emulated = "launch_properties: {Environment: ONEDNN_MAX_CPU_ISA=AVX2}"
    inventory.write_text(
        re.sub(r"^  vars:$", f"  vars:\n    {emulated}", site.fleet.inventory.read_text(), flags=re.M)
    )
    assert emulated in inventory.read_text()
    elsewhere = replace(site, fleet=Fleet(site.fleet.workdir, inventory))
    words = "dtype is bfloat16, but this CPU only emulates it"
    name = f"emulated-{int(time.time())}"
    text = refusal(elsewhere, name, "bfloat16 where it is emulated", words, dtype="bfloat16")
    assert "Set dtype to float32, or to auto" in text
