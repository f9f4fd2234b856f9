"""The page that compares an effort by hand with plain DDP and nanofleet is filled from what was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils.bench_plan import bench_plan

from benchmarks import replay
from benchmarks.record import write
from scripts import docs_figures
from trainer.bench import SCHEMA


def result(sync: str, seconds: float, sent: float) -> dict[str, Any]:
    rank = {
        "compute_dtype": "float32", "device": "cpu", "cpu": "a CPU", "processor": "x", "threads": 4,
        "peak_rss": 3e9, "cpu_share": 1.0, "rates": {"gemm": 1e11, "copy": 1e10}, "counted": sent,
        "sent": sent, "reduce_bandwidth": 1e8, "reduce_measured": 2.0, "reduce_computed": 2.0, "rows": 2,
    }  # fmt: skip
    return {
        "schema": SCHEMA, "depth": 8, "parameters": 125_829_354, "sequence_len": 1024, "tokens": 4096,
        "shares": [2, 2], "sync": sync,
        "world_size": 2, "hosts": ["tower", "laptop"], "steps": 5, "step_seconds": seconds,
        "split": {"sync": 0.1}, "share_of_limit": 0.5,
        "ranks": [rank | {"rank": number, "host": host} for number, host in enumerate(("tower", "laptop"))],
    }  # fmt: skip


RESULTS = {
    "ddp-4096": result("ddp", 12.0, 503e6),
    "exact-4096": result("exact", 8.0, 179e6),
    "fast-4096": result("fast", 6.0, 90e6),
}


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_its_cases_are_of_bench_yml() -> None:
    plan = bench_plan(",".join(replay.CASES), ["tower", "laptop"], [], {}, 0, 5)
    assert {case["config"]["total_batch_size"] for case in plan} == {replay.TOKENS}
    assert [case["name"] for case in plan] == list(replay.CASES)


def test_a_model_of_another_size_than_by_hand_is_reported() -> None:
    by_hand = json.loads(replay.BY_HAND.read_text())
    found = replay.record(RESULTS)
    assert replay.other_model(found, by_hand) == ""
    printed = replay.other_model(found | {"parameters": 46_137_384}, by_hand)
    assert "46,137,384 parameters" in printed
    assert "--vocab-size 32768" in printed


def test_lines_of_one_run_have_a_factor_and_the_others_none() -> None:
    by_hand = json.loads(replay.BY_HAND.read_text())
    found = replay.record(RESULTS)
    assert found["hardware"] == "tower: a CPU, 4 threads; laptop: a CPU, 4 threads"
    assert replay.record(RESULTS, "two towers")["hardware"] == "two towers"
    head, _, two, one, ddp, exact, fast = cells(replay.table(by_hand, found))
    assert two[1:5] == ["72", "57", "", ""]
    assert one[1:5] == ["", "60", "", ""]
    assert two[5] == by_hand["hardware"]
    assert ddp[1:5] == ["12.00", "341", "", "503"]
    assert exact[1:5] == ["8.00", "512", "1.50x", "179"]
    assert fast[1:5] == ["6.00", "683", "2.00x", "90"]
    assert head[5] == "hardware"
    assert {line[5] for line in (ddp, exact, fast)} == {found["hardware"]}


def test_the_page_has_a_table_once_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "REPLAY", tmp_path / "replay.json")
    before = docs_figures.replay_block()
    assert "57 tokens/s, 72 s a step" in before
    assert not cells(before), "no empty table"
    write(replay.REPLAY, replay.record(RESULTS))
    block = docs_figures.replay_block()
    assert len(cells(block)) == 7
    assert re.search(r"`make replay`, recorded on \d{4}-\d\d-\d\d \(commit `\w+`\)", block)


def test_missing_cases_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "cases"
    cases.mkdir()
    (cases / "ddp-4096.json").write_text(json.dumps(RESULTS["ddp-4096"]))
    assert replay.main(["--report", "--out", str(tmp_path)]) == 1
    assert "Not measured: exact-4096, fast-4096. Fix: make replay" in capsys.readouterr().err
    for name, figures in RESULTS.items():
        (cases / f"{name}.json").write_text(json.dumps(figures))
    assert replay.main(["--report", "--out", str(tmp_path)]) == 0
    assert "| nanofleet, `exact`, float32 " in capsys.readouterr().out
