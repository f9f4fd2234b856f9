"""The measured figures of the pages are those of docs/recorded/bench.json."""

import json
from pathlib import Path

import pytest

from benchmarks import record
from scripts import docs_figures


def test_a_phrase_gets_its_figures_across_a_line_break() -> None:
    shown = {"a": 8.627, "b": "e9fffc0"}
    page = "It takes 7.0 s\na step (commit `x1`); 7.0 others."
    filled = docs_figures.filled(page, "takes {a:.1f} s a step (commit `{b}`)", shown)
    assert filled == "It takes 8.6 s\na step (commit `e9fffc0`); 7.0 others."


@pytest.mark.parametrize("page", ["no such phrase", "takes 1 s, takes 2 s"])
def test_a_phrase_that_does_not_occur_once_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="expects it once"):
        docs_figures.filled(page, "takes {a} s", {"a": 3})


def test_other_figures_change_the_pages() -> None:
    record = json.loads(docs_figures.RECORD.read_text())
    shown = docs_figures.values(record)
    assert f"{shown['exact'].hours:.1f}" == f"{shown['exact'].step_seconds * 5000 / 3600:.1f}"
    assert "| `exact`, float32 | 4,096 |" in docs_figures.case_table(record["two_hosts"])


def test_the_table_of_compressions_has_a_line_per_case() -> None:
    record = json.loads(docs_figures.COMPRESSIONS.read_text())
    lines = docs_figures.compression_table(record).splitlines()
    assert len(lines) == 4 + len(record["cases"])
    for line, case in zip(lines[4:], record["cases"], strict=True):
        assert line.startswith(f"| {case['ranks']} | `")
        assert f"| {case['val_loss']:.3f} |" in line
        assert line.endswith(f"| {case['bytes_per_step']:,} |")


def test_a_complete_benchmark_is_recorded_as_the_file_stands(tmp_path: Path) -> None:
    """From results as `make bench` has them to the very lines that the pages are filled from."""
    stored = json.loads(docs_figures.RECORD.read_text())
    rows = {}
    for (group, case), figures in zip(record.SHOWN, stored["two_hosts"], strict=True):
        rows[f"{group}/{case}"] = {
            "sync": figures["sync"], "format": figures["dtype"], "tokens": figures["tokens"], "ranks": 2,
            "step_seconds": figures["step_seconds"], "predicted_seconds": figures["predicted_seconds"],
            "ratio": figures["factor"], "payload": figures["payload_mb"] * 1e6,
            "tok_per_s": figures["factor"] * figures["baseline_tokens"] / figures["baseline_seconds"],
        }  # fmt: skip
    host = {
        f"host-{one['dtype']}": {
            **one, "ranks": [{"compute_dtype": one["dtype"], "peak_rss": one["peak_gb"] * 1e9}]
        }
        for one in stored["one_process"]
    }  # fmt: skip
    made = record.record(host, rows, {"1gbit": 1000.0, "100mbit": 100.0}, stored["machine"])
    again = made | {"date": stored["date"], "commit": stored["commit"]}
    record.write(tmp_path / "bench.json", again)
    assert (tmp_path / "bench.json").read_text() == docs_figures.RECORD.read_text()
    del rows["100mbit/local-8192-float32"]
    with pytest.raises(KeyError, match="100mbit/local-8192-float32"):
        record.record(host, rows, {"1gbit": 1000.0, "100mbit": 100.0}, stored["machine"])
