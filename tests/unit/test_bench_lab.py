"""The benchmark on a lab of its own, and its targets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from measured_cases import measured

from benchmarks import lab, targets
from benchmarks.cases import GROUPS, Group
from trainer.bench import SCHEMA


def test_targets_show_by_how_much_they_are_missed() -> None:
    row = {"ratio": 1.65, "share_of_bound": 0.9, "over_ddp": 1.7, "payload": 180e6}
    row["baseline_share_of_limit"] = 0.88
    lines = targets.targets_table({"1gbit/exact-4096-float32": row}).splitlines()
    assert "missed by 0.05x" in lines[2]
    assert " met " in lines[3]
    assert "missed by 0.10x" in lines[4]
    assert " met " in lines[5]
    assert "not measured" in lines[6]


def test_a_ratio_to_a_slow_single_does_not_count() -> None:
    row = {"ratio": 1.75, "share_of_bound": 0.9, "payload": 180e6, "baseline_share_of_limit": 0.80}
    lines = targets.targets_table({"1gbit/exact-4096-float32": row}).splitlines()
    assert "| reached; counts if the baseline reaches 83 % of its limit |" in lines[2]
    assert " met " in lines[3], "a share of the bound is no ratio"
    row["baseline_share_of_limit"] = 0.84
    assert " met " in targets.targets_table({"1gbit/exact-4096-float32": row}).splitlines()[2]


def test_the_table_of_one_host_counts_its_threads() -> None:
    one, two = measured(4096, 9.0), measured(4096, 5.0)
    for result, threads in ((one, 1), (two, 2)):
        result["tok_per_s"] = 500.0
        result["ranks"][0] |= {"limit_seconds": 4.0, "threads": threads}
    text = targets.host_table({"host-4096": one, "host-8192": two})
    assert "| 4096, 1 thread " in text
    assert "| 8192, 2 threads " in text


def test_nine_of_ten_predicted_steps_are_near_the_measured_ones() -> None:
    rows = [{"step_seconds": 10.0, "predicted_seconds": 10.0 + error} for error in (-0.5, 0.2, 0.9)]
    rows += [{"step_seconds": 10.0, "predicted_seconds": 10.1} for _ in range(6)]
    assert targets.prediction_line([*rows, {"step_seconds": 10.0, "predicted_seconds": 13.0}]) == (
        "Predicted steps of 10 cases: -5.0% to +30.0% of the measured ones; 90 % of them within 9.0% "
        "(at most 10%: met)."
    )
    missed = [*rows[:2], *2 * [{"step_seconds": 10.0, "predicted_seconds": 13.0}]]
    assert targets.prediction_line(missed).endswith("within 30.0% (at most 10%: missed).")
    assert targets.prediction_line([{"step_seconds": 10.0, "predicted_seconds": None}]) == ""


def at(gemm: float, result: dict[str, Any]) -> dict[str, Any]:
    """The result, with another rate of products on rank 0, at its best."""
    first, *others = result["ranks"]
    rates = [{"gemm": one * gemm, "copy": 1e10} for one in (0.5, 1.0, 0.6)]
    return result | {"ranks": [first | {"rates_all": rates}, *others]}


def test_a_case_is_compared_with_the_machine_of_its_single() -> None:
    singles = [measured(2048, 7.0), measured(4096, 12.0)]
    pair = measured(4096, 8.0, ranks=2, sync="exact")
    assert targets.relative_gemm_rate(at(0.7e11, pair), singles) == pytest.approx(0.7)
    assert targets.relative_gemm_rate(pair, [at(2e11, singles[1])]) == pytest.approx(0.5)
    assert targets.relative_gemm_rate(at(2e11, pair), singles) == 1.0, "by the slower rank"
    assert targets.relative_gemm_rate(at(2e11, pair), singles, slow_second=True) == 2.0
    assert (
        targets.relative_gemm_rate(measured(8192, 9.0, ranks=2, sync="local"), [at(2e11, singles[1])]) == 0.5
    )
    assert targets.relative_gemm_rate(pair, singles[:1]) is None
    assert targets.relative_gemm_rate(singles[1], singles) is None


def test_cases_of_an_unsteady_machine_are_measured_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is slow beside `exact` twice, and beside `dense` always."""
    asked: list[tuple[str, ...]] = []
    rates = {"exact-4096-float32": iter([0.7e11, 0.8e11, 1e11]), "dense-4096-float32": iter([0.5e11] * 9)}

    def measure(job: lab.Job, group: Group, cases: list[str], data: Path) -> None:
        asked.append(tuple(cases))
        for case in cases:
            file = job.file(group.name, case)
            file.parent.mkdir(parents=True, exist_ok=True)
            result = measured(4096, 12.0)
            if case in rates:
                result = at(next(rates[case]), measured(4096, 8.0, ranks=2, sync="exact"))
            file.write_text(json.dumps(result))

    for name in ("playbook", "set_up", "check_shaped", "limit_second"):
        monkeypatch.setattr(lab, name, lambda *_, **__: 0)
    monkeypatch.setattr(lab, "measure_cases", measure)
    job = lab.Job(argparse.Namespace(again=False, lab="bench"), tmp_path)
    cases = ["single-4096-float32", *rates]
    lab.measure_group(job, GROUPS[0], cases, tmp_path)
    assert asked == [tuple(cases), tuple(rates), tuple(rates)]
    out = capsys.readouterr().out
    assert "exact-4096-float32: its GEMM rate is 70 % of the baseline's; measured again" in out


class Lab:
    """Stands for the lab's commands: what is typed there, and whether the neighbour still trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, active: bool = True) -> None:
        self.did: list[str] = []
        self.active = active
        monkeypatch.setattr(lab, "run", self.run)
        monkeypatch.setattr(lab, "environment", lambda _: {})

    def run(self, command: list[str], *_: Any, **__: Any) -> int:
        if command[0] == "ansible-playbook":
            settings = dict(part[2:].split("=", 1) for part in command[2:])
            folder = Path(settings["bench_out"]).name
            self.did.append(f"{folder}: {settings['bench_cases']} x {settings['bench_steps']}")
            return 0
        text = " ".join(command)
        if "is-active" in text:
            return 0 if self.active else 3
        action = "begin" if "systemd-run" in text else "end"
        dtype = f" {command[command.index('--dtype') + 1]}" if action == "begin" else ""
        self.did.append(f"{action} neighbour{dtype}")
        return 0


def test_single_is_measured_while_the_other_host_trains_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Lab(monkeypatch)
    job = lab.Job(argparse.Namespace(lab="bench"), tmp_path)
    cases = ["idle/single-4096-float32", "single-2048-float32", "single-4096-float32", "exact-4096-float32"]
    cases += ["dense-4096-float32", "single-4096-bfloat16", "single-4096-float32-on-bench-2"]
    lab.measure_cases(job, GROUPS[0], cases, tmp_path)
    assert commands.did == [
        "idle: single-4096-float32 x 5",
        "begin neighbour float32",
        "1gbit: single-2048-float32,single-4096-float32 x 5",
        "end neighbour",
        "1gbit: exact-4096-float32,dense-4096-float32 x 5",
        "begin neighbour bfloat16",
        "1gbit: single-4096-bfloat16 x 5",
        "end neighbour",
        "1gbit: single-4096-float32-on-bench-2 x 2",
    ]
    assert job.file("1gbit", cases[0]) == tmp_path / "1gbit/idle/cases/single-4096-float32.json"


def test_a_neighbour_that_ended_meanwhile_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Lab(monkeypatch, active=False)
    job = lab.Job(argparse.Namespace(lab="bench"), tmp_path)
    figures = [job.file("1gbit", f"single-{tokens}-float32") for tokens in (2048, 4096)]
    for file in figures:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    with pytest.raises(SystemExit, match=r"the training on bench-2 ended too early.*journalctl"):
        lab.measure_cases(job, GROUPS[0], ["single-2048-float32", "single-4096-float32"], tmp_path)
    assert commands.did[-1] == "end neighbour"
    assert not any(file.exists() for file in figures), "they are not what their names say"


def test_a_fleet_is_compared_with_a_single_beside_an_idle_host_too() -> None:
    results = {"single-4096": measured(4096, 13.0), "exact-4096": measured(4096, 8.0, ranks=2, sync="exact")}
    assert lab.ratios_idle(results, {"single-4096": measured(4096, 12.0)}) == {"exact-4096": 1.5}
    assert lab.ratios_idle(results, {}) == {}
    row = {"ratio": 1.6, "ratio_idle": 1.5, "baseline_share_of_limit": 0.9, "relative_gemm_rate": 0.9}
    line = targets.targets_table({"1gbit/exact-4096-float32": row}).splitlines()[2]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == ["1.60x", "at least 1.70x", "missed by 0.10x", "1.50x"]


def test_figures_of_another_version_are_measured_again_and_stay_until_then(tmp_path: Path) -> None:
    job = lab.Job(argparse.Namespace(again=False, quick=False, only=[], lab="bench"), tmp_path)
    cases = ["single-4096-float32", "single-2048-float32"]
    for case, schema in zip(cases, (SCHEMA, SCHEMA - 1), strict=True):
        job.file("1gbit", case).parent.mkdir(parents=True, exist_ok=True)
        job.file("1gbit", case).write_text(json.dumps({"schema": schema}))
    assert job.left("1gbit", cases) == ["single-2048-float32"]
    assert job.file("1gbit", "single-2048-float32").exists()


def test_a_case_that_there_is_not_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        lab.main(["--list", "--only", "exakt"])
    assert end.value.code == 2
    assert "no case begins with exakt: they are host-float32, " in capsys.readouterr().err


def test_every_target_is_measured_by_a_case() -> None:
    cases = {(group.name, case) for group in GROUPS for case in group.cases}
    assert all((target.group, target.case) in cases for target in targets.TARGETS)
    first = set(GROUPS[0].cases)
    assert all(case in first for group in GROUPS for case in group.takes)
