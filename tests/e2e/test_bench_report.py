"""bench.yml on a lab: figures that are real, kept case by case, and hosts that are as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .lab import LAB, Fleet

pytestmark = [pytest.mark.lab, pytest.mark.slow]

TINY = {"depth": 2, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "bench_steps": 2}
HOSTS = (f"{LAB}-1", f"{LAB}-2")
STAGES = f"single-1024-on-{HOSTS[1]},single-512-on-{HOSTS[0]},exact-1024,dense-1024"


@pytest.fixture(scope="module", autouse=True)
def _ready(fleet: Fleet, dataset: Path) -> None:
    fleet.play("setup.yml", data_dir=dataset)


def test_a_fleet_is_measured_and_left_as_it_was(fleet: Fleet, tmp_path: Path) -> None:
    before = {host: fleet.on(host, "ls /var/lib/nanofleet/runs") for host in HOSTS}
    printed = fleet.play("bench.yml", bench_cases=STAGES, bench_out=tmp_path, **TINY).stdout
    rows = {row["case"]: row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert set(rows) == set(STAGES.split(","))
    for mode in ("exact", "dense"):
        row = rows[f"{mode}-1024"]
        assert row["hosts"] == sorted(HOSTS)
        assert 0.98 < row["payload_by_interface"] / row["payload"] < 1.25
        assert row["ratio"] > 0
        assert row["bound"] > 0
    assert rows["exact-1024"]["payload"] < rows["dense-1024"]["payload"]
    assert "of the bound" in printed
    assert (tmp_path / "bench.png").stat().st_size > 1000
    assert {host: fleet.on(host, "ls /var/lib/nanofleet/runs") for host in HOSTS} == before
    for host in HOSTS:
        assert "bench" not in fleet.on(host, "systemctl list-units --all --plain 'nanofleet-*'; ls /tmp")

    again = fleet.play("bench.yml", bench_cases=STAGES, bench_out=tmp_path, **TINY)
    assert "Measured now: nothing" in again.stdout
    assert "Measure exact-1024" not in again.stdout


def test_a_case_that_cannot_be_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    refused = fleet.play("bench.yml", fails=True, bench_cases="exakt-1024", bench_out=tmp_path, **TINY)
    assert "must be single or" in refused.stdout
