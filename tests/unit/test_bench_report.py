"""The tables of measured cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measured_cases import measured

from trainer.bench import SCHEMA, report


def test_ratio_and_bound_of_a_pair() -> None:
    results = {
        "single-2048": measured(2048, 7.0),
        "single-4096": measured(4096, 12.0),
        "exact-4096": measured(4096, 8.0, ranks=2, sync="exact"),
    }
    row = {one["case"]: one for one in report.compare(results, link_mbit=1000)}["exact-4096"]
    assert row["ratio"] == pytest.approx(1.5)
    assert row["bound"] == pytest.approx(12 / 7)  # the wire takes 1.8 s, a rank's share 7
    assert row["share_of_bound"] == pytest.approx(7 / 8)
    assert row["bound_by"] == "the processor"
    assert row["reduce_seconds"] == pytest.approx(1.8)
    assert row["link_seconds"] == pytest.approx(1.44)
    assert row["baseline_share_of_limit"] == 0.9


def test_a_slow_link_bounds() -> None:
    slow = {"reduce_bandwidth": 11e6}
    results = {
        "single-2048": measured(2048, 7.0),
        "single-4096": measured(4096, 12.0),
        "exact-4096": measured(4096, 18.0, ranks=2, sync="exact", of_rank=slow),
    }
    row = {one["case"]: one for one in report.compare(results)}["exact-4096"]
    assert row["bound_by"] == "the link"
    assert row["bound"] == pytest.approx(12 / (180 / 11))
    assert row["link_seconds"] is None


def test_local_is_compared_with_a_ranks_own_step_by_its_mean() -> None:
    results = {
        "single-4096": measured(4096, 12.0),
        "local-8192": measured(8192, 11.0, ranks=2, sync="local", mean=12.5),
    }
    row = {one["case"]: one for one in report.compare(results)}["local-8192"]
    assert row["step_seconds"] == 12.5
    assert row["ratio"] == pytest.approx(2 * 12 / 12.5)


def test_uneven_shares_that_were_not_measured_alone_are_scaled() -> None:
    results = {
        "single-4096": measured(4096, 12.0),
        "single-16384": measured(16384, 48.0),
        "exact-16384": measured(16384, 40.0, ranks=2, sync="exact", shares=[12, 4]),
    }
    row = {one["case"]: one for one in report.compare(results)}["exact-16384"]
    assert row["bound"] == pytest.approx(48 / 36)


def test_without_a_single_there_is_no_ratio_and_formats_do_not_mix() -> None:
    results = {
        "single-4096": measured(4096, 6.0, of_rank={"compute_dtype": "bfloat16"}),
        "exact-4096": measured(4096, 8.0, ranks=2, sync="exact"),
    }
    row = {one["case"]: one for one in report.compare(results)}["exact-4096"]
    assert "ratio" not in row


def test_ranks_of_one_host_meet_no_wire() -> None:
    result = measured(4096, 8.0, ranks=2, sync="exact")
    result["hosts"] = ["a", "a"]
    (row,) = report.compare({"ranks-4096": result}, link_mbit=1000)
    assert (row["payload_by_interface"], row["link_seconds"]) == (None, None)


def test_cases_are_compared_with_plain_ddp_of_the_same_work() -> None:
    """Of all hosts, at the same tokens and number format: neither one host nor another batch has a factor."""
    half = {"compute_dtype": "bfloat16"}
    results = {
        "ddp-4096-float32": measured(4096, 12.0, ranks=2, sync="ddp"),
        "exact-4096-float32": measured(4096, 8.0, ranks=2, sync="exact"),
        "dense-4096-float32": measured(4096, 15.0, ranks=2, sync="dense"),
        "fast-4096-bfloat16": measured(4096, 5.0, ranks=2, sync="fast", of_rank=half),
        "exact-16384-float32": measured(16384, 30.0, ranks=2, sync="exact"),
        "ranks2-4096": measured(4096, 8.0, ranks=2, sync="exact") | {"hosts": ["a", "a"]},
        "single-4096": measured(4096, 16.0),
    }
    factors = {row["case"]: row["over_ddp"] for row in report.compare(results) if "over_ddp" in row}
    assert factors == {"exact-4096-float32": 1.5, "dense-4096-float32": 0.8}
    with_half = results | {"ddp-4096-bfloat16": measured(4096, 6.0, ranks=2, sync="ddp", of_rank=half)}
    rows = {row["case"]: row for row in report.compare(with_half)}
    assert rows["fast-4096-bfloat16"]["over_ddp"] == pytest.approx(1.2)
    assert rows["ddp-4096-float32"]["ratio"] == pytest.approx(16 / 12)
    without = {name: result for name, result in results.items() if not name.startswith("ddp")}
    assert not any("over_ddp" in row for row in report.compare(without))


def test_the_first_table_goes_from_one_process_to_all_hosts_and_gpus() -> None:
    reduces = {"reduce_measured": 2.5, "reduce_computed": 1.9, "reduce_bandwidth": 100e6}
    four = measured(4096, 9.0, ranks=2, sync="exact") | {"hosts": ["a"] * 4, "world_size": 4}
    results = {
        "gpu-4096-on-a": measured(4096, 0.5, of_rank={"device": "cuda"}),
        "exact-4096": measured(4096, 8.0, ranks=2, sync="exact", of_rank=reduces),
        "ddp-4096": measured(4096, 12.0, ranks=2, sync="ddp", of_rank=reduces),
        "ranks4-4096": four,
        "ranks2-4096": measured(4096, 8.5, ranks=2, sync="exact") | {"hosts": ["a", "a"]},
        "single-4096": measured(4096, 16.0),
    }
    text = report.as_markdown(results, report.compare(results))
    lines = text.split("\n\n")[1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in table[2:]] == [
        "1 process on a",
        "2 processes on a",
        "4 processes on a",
        "exact on a, b",
        "plain DDP on a, b",
        "GPU of a",
    ]
    exact = dict(zip(table[0], table[5], strict=True))
    assert (exact["to baseline"], exact["over plain DDP"]) == ("2.00x", "1.50x")
    assert (exact["all-reduce measured, s"], exact["computed, s"]) == ("2.50", "1.90")
    alone = dict(zip(table[0], table[2], strict=True))
    assert (alone["over plain DDP"], alone["all-reduce measured, s"], alone["computed, s"]) == ("", "", "")
    before = dict(zip(table[0], table[4], strict=True))
    assert (before["all-reduce measured, s"], before["computed, s"]) == ("", "1.80"), "of an older result"


def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "cases"
    cases.mkdir()
    assert report.main([str(cases), "--out", str(tmp_path)]) == 2
    for name, result in {
        "single-4096": measured(4096, 12.0),
        "single-2048": measured(2048, 7.0),
        "exact-4096": measured(4096, 8.0, ranks=2, sync="exact"),
    }.items():
        (cases / f"{name}.json").write_text(json.dumps(result))
    assert report.main([str(cases), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "bench.md").read_text()
    assert "a CPU" in text
    assert "| exact-4096 |" in text
    assert "1.50x" in text
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 3
    assert "1.50x" in capsys.readouterr().out


def test_figures_of_another_version_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "single-4096.json").write_text(json.dumps(measured(4096, 12.0)))
    (tmp_path / "single-2048.json").write_text(json.dumps(measured(2048, 7.0) | {"schema": SCHEMA - 1}))
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "another version of nanofleet measured it: single-2048." in out
    assert "bench_again=true" in out
    assert "| single-4096 |" in out
    assert "| single-2048 |" not in out


def test_the_rows_of_a_slow_host_are_bounded_by_its_own_measurements() -> None:
    fast = {f"single-{n}": measured(n, n / 1000) for n in (4096, 16384)}
    slow = {f"single-{n}-on-b": measured(n, n / 100) | {"hosts": ["b"]} for n in (2048, 4096)}
    one = {"single-4096-on-b": slow["single-4096-on-b"]}
    pair = measured(16384, 50.0, ranks=2, sync="exact", shares=[13, 3])
    bounds = []
    for singles in (fast, fast | slow, fast | one):
        results = singles | {"exact-16384": pair}
        bounds.append({each["case"]: each for each in report.compare(results)}["exact-16384"]["bound"])
    assert bounds[0] == pytest.approx(16 / 13, rel=0.01)
    assert bounds[1] == pytest.approx(16.384 / 30.72, rel=0.01)
    assert bounds[2] == pytest.approx(bounds[1]), "by the line of the other host"


def test_files_that_are_no_case_are_named_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "single-2048.json").write_text(json.dumps(measured(2048, 7.0)))
    (tmp_path / "several.json").write_text("[]")
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / report.REPORT).write_text("{}")
    results, other = report.load(tmp_path)
    assert (list(results), other) == (["single-2048"], ["damaged", "several"])
