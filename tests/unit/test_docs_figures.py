"""The measured figures of the pages are those of docs/recorded/bench.json."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import elastic, memory, predictions, record, scaling
from scripts import docs_figures
from trainer.placement.microbenchmark import Speed


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
            "step_seconds": figures["step_seconds"],
            "ratio": figures["factor"], "over_ddp": figures["over_ddp"],
            "payload": figures["payload_mb"] * 1e6,
            "tok_per_s": figures["factor"] * figures["baseline_tokens"] / figures["baseline_seconds"],
        }  # fmt: skip
    host = {
        f"host-{one['dtype']}": {
            **one, "ranks": [{"compute_dtype": one["dtype"], "peak_rss": one["peak_gb"] * 1e9}]
        }
        for one in stored["one_process"]
    }  # fmt: skip
    made = record.record(host, rows, stored["machine"])
    again = made | {"date": stored["date"], "commit": stored["commit"]}
    record.write(tmp_path / "bench.json", again)
    assert (tmp_path / "bench.json").read_text() == docs_figures.RECORD.read_text()
    del rows["100mbit/local-8192-float32"]
    with pytest.raises(KeyError, match="100mbit/local-8192-float32"):
        record.record(host, rows, stored["machine"])


def test_the_tables_of_more_ranks_have_a_line_for_each_number_of_ranks() -> None:
    case = {
        "ranks": 2, "megabytes": {"exact": 49.3, "fast": 25.5, "local": 1.04},
        "step_seconds": {"exact": 1.24, "fast": 1.22, "local": 1.35},
        "factor": {"exact": 1.96, "fast": 2.0, "local": 1.8},
    }  # fmt: skip
    seen = {"megabytes": 49.1, "step_seconds": 1.5, "predicted_seconds": 1.4, "peak_gb": 1.2}
    computed, measured = scaling.tables({"cases": [{**case, "measured": seen}, {**case, "ranks": 32}]})
    assert [line.split("|")[1].strip() for line in computed.splitlines()[2:]] == ["2", "32"]
    assert "| 49.3" in computed
    assert "2.0x" in computed
    [line] = measured.splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "2",
        "49.1",
        "49.3",
        "1.50",
        "1.40",
        "1.20",
    ]


def test_the_cost_of_more_ranks_is_that_of_the_cost_model() -> None:
    rows = np.random.default_rng(1).integers(0, 512, (8, 65)).astype(np.uint16)
    two, many = (scaling.case(2, ranks, Speed(0.2, 0.1, 0.1), rows, None) for ranks in (2, 32))
    assert many["megabytes"]["exact"] == pytest.approx(two["megabytes"]["exact"] * 31 / 16, rel=0.01)
    assert many["megabytes"]["local"] == pytest.approx(two["megabytes"]["local"] * 31, rel=0.2)
    assert many["factor"]["fast"] > 8 * two["factor"]["fast"]
    assert "measured" not in two


def test_the_cost_of_a_leave_follows_from_the_times_of_the_steps() -> None:
    """Two steps are trained again after a loss at 13 s; the next step is at 19 s."""
    steps = [(10.0, 1), (11.0, 2), (12.0, 3), (19.0, 2), (20.0, 3), (21.0, 4)]
    assert elastic.longest_gap(steps, 12.5) == (12.0, 7.0)
    assert elastic.around(steps, 13.0) == (19.0, 7.0, 2)
    assert elastic.around(steps, 20.0) == (21.0, 1.0, 0)


def test_the_table_of_leaves_and_joins_has_a_line_per_event() -> None:
    event = {"event": "freeze", "next_step": 9.94, "pause": 8.0, "repeated": 3.0, "return": 45.2}
    event |= {"join_pause": 3.5, "megabytes": 88.2}
    row = "| freeze | 9.9 | 8.0 | 3 | 45 | 3.5 | 88 |"
    assert elastic.table({"elastic": [event]}).splitlines()[2:] == [row]
    beside = {"event": "freeze", "next_step": 60.0, "repeated": 30.0}
    assert elastic.table({"elastic": [event], "restart": [beside]}).splitlines()[2:] == [f"{row} 60 | 30 |"]


def test_a_part_that_is_not_measured_again_keeps_its_figures_and_commit() -> None:
    before = json.loads(elastic.RECORD.read_text(encoding="utf-8"))
    new = {**before, "commit": "abc", "date": "2030-01-01"}
    new = {name: value for name, value in new.items() if name not in ("elastic", "restart")}
    restarts = elastic.recorded(new, 0, 5)
    assert restarts["elastic"] == before["elastic"]
    assert (restarts["commit"], restarts["restart_commit"]) == (before["commit"], "abc")
    assert "(commit `abc`, 2030-01-01)" in elastic.block(restarts)
    runs = elastic.recorded(new, 5, 0)
    assert runs["restart"] == before["restart"]
    assert runs["restart_commit"] == before.get("restart_commit", before["commit"])
    assert runs["commit"] == "abc"
    with pytest.raises(SystemExit, match=r"elastic.json was measured with other hosts: leave out"):
        elastic.recorded({**new, "hosts": 3}, 0, 5)
    assert elastic.recorded({**new, "hosts": 3}, 5, 5)["hosts"] == 3
    both = elastic.recorded(new, 5, 5)
    assert both["commit"] == both["restart_commit"] == "abc"
    assert "restart" not in both


def test_predicted_steps_are_beside_the_measured_ones() -> None:
    case = {
        "sync": "exact", "dtype": "float32", "depth": 8, "tokens": 4096, "link_mbit": 100,
        "slow_second": True, "predicted_seconds": 4.5, "step_seconds": 5.0,
    }  # fmt: skip
    shown = predictions.table(
        {"cases": [case, {**case, "link_mbit": 1000, "slow_second": False}]}
    ).splitlines()
    assert shown[2] == (
        "| `exact`, float32, 100 Mbit/s, the second host with a third of a core | 8 | 4,096 | 4.50 | 5.00 "
        "| -10 % |"
    )
    assert shown[3] == "| `exact`, float32 | 8 | 4,096 | 4.50 | 5.00 | -10 % |"
    assert len({(group.name, case) for group in predictions.GROUPS for case in group.cases}) == 20


def test_estimated_memory_is_beside_the_measured_one() -> None:
    case = {"depth": 8, "ranks": 2, "recompute": "layers", "first": 3.0, "first_estimated": 3.3}
    pair = case | {"other": 2.0, "other_estimated": 1.9}
    shown = memory.table({"cases": [pair, case | {"other": 0.0, "other_estimated": 1.9}]}).splitlines()
    assert shown[2] == "| 8 | 2 | layers | 3.00 | 3.30 (+10 %) | 2.00 | 1.90 (-5 %) |"
    assert shown[3] == "| 8 | 2 | layers | 3.00 | 3.30 (+10 %) |  |  |"
    first, other = (memory.estimated(memory.Case(8, 2), coordinates) for coordinates in (True, False))
    assert first > other > 2


def test_estimates_are_within_a_tenth_of_the_recorded_peaks() -> None:
    """Fails if the estimate changes, and the peaks were measured before that: measure them again then."""
    content = json.loads((record.RECORDED / "memory.json").read_text(encoding="utf-8"))
    for row in content["cases"]:
        case = memory.Case(row["depth"], row["ranks"], row["recompute"])
        assert memory.estimated(case, True) == pytest.approx(row["first"], rel=0.1), row
        if row["other"]:
            assert memory.estimated(case, False) == pytest.approx(row["other"], rel=0.1), row
