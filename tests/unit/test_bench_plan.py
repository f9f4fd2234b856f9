"""bench.yml's stages, and what the report makes of measurements: ratios, bounds, and what is missing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils import bench_plan as filters

from benchmarks import lab, targets
from benchmarks.cases import GROUPS, Group
from trainer.bench import SCHEMA, report
from trainer.config import SYNC_MODES

ROOT = Path(__file__).resolve().parents[2]


def plan(asked: str = "", hosts: tuple[str, ...] = ("a", "b"), **config: Any) -> list[dict[str, Any]]:
    return list(filters.bench_plan(asked, list(hosts), [], config, 4096, 5))


# -- stages


def test_a_fleet_is_measured_alone_together_and_in_every_mode() -> None:
    stages = {stage["name"]: stage for stage in plan()}
    modes = {f"{mode}-{8192 if mode == 'local' else 4096}" for mode in SYNC_MODES}
    assert set(stages) == {
        "solo-4096-on-a",
        "solo-4096-on-b",
        "solo-2048-on-a",
        "ranks2-4096-on-a",
        "ddp-4096",
        *modes,
    }
    assert stages["exact-4096"]["hosts"] == ["a", "b"]
    assert stages["exact-4096"]["config"]["sync"] == "exact"
    assert stages["solo-4096-on-b"]["hosts"] == ["b"]
    assert (stages["ranks2-4096-on-a"]["nproc"], stages["ranks2-4096-on-a"]["hosts"]) == (2, ["a"])
    assert {name for name, stage in stages.items() if stage["arguments"]} == {"ddp-4096"}
    assert (stages["ddp-4096"]["arguments"], stages["ddp-4096"]["hosts"]) == (["--ddp"], ["a", "b"])
    assert all(stage["config"]["num_iterations"] == 7 for stage in stages.values())


def test_one_host_has_no_sync_modes_and_a_gpu_is_measured_too() -> None:
    names = [stage["name"] for stage in filters.bench_plan("", ["a"], ["a"], {}, 4096, 5)]
    assert names == ["solo-4096-on-a", "gpu-4096-on-a", "ranks2-4096-on-a"]


@pytest.mark.parametrize(
    ("threads", "memory_gb", "tokens", "config", "has_four"),
    [
        (4, 0.0, 4096, {}, True),
        (8, 64.0, 4096, {}, True),
        (3, 64.0, 4096, {}, False),
        (0, 64.0, 4096, {}, False),
        (8, 8.0, 4096, {"depth": "8"}, False),
        (8, 8.0, 4096, {"depth": "2"}, True),
        (8, 64.0, 2048, {}, False),
        (8, 64.0, 2048, {"sequence_len": "512"}, True),
    ],
)
def test_four_processes_are_measured_where_a_host_has_room_for_them(
    threads: int, memory_gb: float, tokens: int, config: dict[str, Any], has_four: bool
) -> None:
    stages = filters.bench_plan("", ["a"], [], config, tokens, 5, threads, memory_gb)
    assert [stage["nproc"] for stage in stages] == ([1, 2, 4] if has_four else [1, 2])
    named = filters.bench_plan(f"ranks4-{4 * tokens}", ["a"], [], config, tokens, 5, threads, memory_gb)
    assert named[0]["nproc"] == 4, "a case that is named is measured in any case"


def test_the_kind_ranks_takes_a_number_of_processes_and_two_without_it() -> None:
    names = "ranks-4096", "ranks2-4096", "ranks4-4096-float32-on-b", "ranks16-16384"
    stages = plan(",".join(names))
    assert [stage["nproc"] for stage in stages] == [2, 2, 4, 16]
    assert [stage["hosts"] for stage in stages] == [["a"], ["a"], ["b"], ["a"]]
    assert all(stage["config"]["sync"] == "exact" for stage in stages)


def test_plain_ddp_is_a_kind_of_the_benchmark_and_no_sync_mode() -> None:
    (stage,) = plan("ddp-4096-float32-3.1")
    assert (stage["arguments"], stage["shares"], stage["config"]["dtype"]) == (["--ddp"], "3,1", "float32")
    assert stage["config"]["sync"] in SYNC_MODES, "the run file of a case is one of a run"


def test_only_what_was_measured_of_the_same_model_counts_as_measured(tmp_path: Path) -> None:
    (stage,) = plan("solo-4096", depth="4")
    told = {
        "schema": SCHEMA,
        "hosts": ["a"],
        "depth": 4,
        "sequence_len": 1024,
        "device_batch_size": 2,
        "steps": 5,
    }
    file = tmp_path / "solo-4096.json"

    def measured(**other: Any) -> list[str]:
        file.write_text(json.dumps({**told, **other}))
        return list(filters.measured([stage], [file]))

    assert measured() == ["solo-4096"]
    assert measured(steps=6) == ["solo-4096"]
    others: list[dict[str, Any]] = [{"schema": 0}, {"hosts": ["tower"]}, {"steps": 4}]
    for other in (*others, {"depth": 2}, {"sequence_len": 512}, {"device_batch_size": 1}):
        assert measured(**other) == []
    file.write_text('{"schema":')
    assert filters.measured([stage], [file]) == []
    assert filters.measured([stage], []) == []


def test_a_stage_is_read_from_its_name() -> None:
    (stage,) = plan("exact-16384-float32-12.4", depth="4")
    assert stage["config"]["dtype"] == "float32"
    assert stage["config"]["total_batch_size"] == 16384
    assert stage["config"]["depth"] == "4"
    assert stage["shares"] == "12,4"
    (stage,) = plan("solo-4096-bfloat16-on-b")
    assert (stage["hosts"], stage["config"]["dtype"], stage["shares"]) == (["b"], "bfloat16", "equal")
    assert plan("exact-4096-auto")[0]["shares"] == "auto"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("exakt-4096", "its kind is solo or"),
        ("exact", "KIND-TOKENS"),
        ("solo-4096-on-c", "there is no host c"),
        ("exact-5000", "multiple of sequence_len"),
        ("exact-4096-on-a", "on all hosts"),
        ("ddp-4096-on-a", "ddp is measured on all hosts"),
        ("ddp-4096-auto", "plain DDP measures no speeds"),
        ("exact4-4096", "only ranks takes a number of processes"),
        ("ranks1-4096", "2 or more"),
        ("ranks8-4096", "8 ranks need a sequence each, 8192 tokens or more"),
        ("exact-1024", "2 ranks need a sequence each, 2048 tokens or more"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(asked: str, says: str) -> None:
    with pytest.raises(AnsibleFilterError, match=says) as error:
        plan(f"{asked},nonsense")
    assert "nonsense" in str(error.value)  # all findings at once


# -- the report


def measured(tokens: int, seconds: float, ranks: int = 1, sync: str = "", **more: Any) -> dict[str, Any]:
    names = ("a", "b")[:ranks]
    shares = more.pop("shares", [tokens // 1024 // ranks] * ranks)
    rates = {"gemm": 1e11, "copy": 1e10}
    of_rank = {
        "compute_dtype": "float32",
        "device": "cpu",
        "cpu": "a CPU",
        "processor": "x",
        "threads": 1,
        "peak_rss": 3e9,
        "cpu_share": 1.0,
        "rates": rates,
        "rates_all": [rates, rates],
        "counted": 180e6,
        "counted_mean": 180e6,
        "sent": 190e6,
        "sent_mean": 190e6,
        "reduce_goodput": 100e6 if ranks > 1 else None,
        "link_mbit": None,
    } | more.pop("of_rank", {})
    return {
        "schema": SCHEMA,
        "depth": 8,
        "sequence_len": 1024,
        "tokens": tokens,
        "shares": shares,
        "world_size": ranks,
        "hosts": list(names),
        "sync": sync,
        "steps": 3,
        "step_seconds": seconds,
        "step_seconds_mean": more.get("mean", seconds),
        "split": dict.fromkeys(("data", "forward", "backward", "sync", "optimizer"), 0.1),
        "share_of_limit": 0.9,
        "torch": "2",
        "ranks": [
            {**of_rank, "rank": rank, "host": host, "rows": shares[rank]} for rank, host in enumerate(names)
        ],
    }


def test_ratio_and_bound_of_a_pair() -> None:
    results = {
        "solo-2048": measured(2048, 7.0),
        "solo-4096": measured(4096, 12.0),
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
    slow = {"reduce_goodput": 11e6}
    results = {
        "solo-2048": measured(2048, 7.0),
        "solo-4096": measured(4096, 12.0),
        "exact-4096": measured(4096, 18.0, ranks=2, sync="exact", of_rank=slow),
    }
    row = {one["case"]: one for one in report.compare(results)}["exact-4096"]
    assert row["bound_by"] == "the link"
    assert row["bound"] == pytest.approx(12 / (180 / 11))
    assert row["link_seconds"] is None


def test_local_is_held_against_a_ranks_own_step_by_its_mean() -> None:
    results = {
        "solo-4096": measured(4096, 12.0),
        "local-8192": measured(8192, 11.0, ranks=2, sync="local", mean=12.5),
    }
    row = {one["case"]: one for one in report.compare(results)}["local-8192"]
    assert row["step_seconds"] == 12.5
    assert row["ratio"] == pytest.approx(2 * 12 / 12.5)


def test_uneven_shares_that_were_not_measured_alone_are_scaled() -> None:
    results = {
        "solo-4096": measured(4096, 12.0),
        "solo-16384": measured(16384, 48.0),
        "exact-16384": measured(16384, 40.0, ranks=2, sync="exact", shares=[12, 4]),
    }
    row = {one["case"]: one for one in report.compare(results)}["exact-16384"]
    assert row["bound"] == pytest.approx(48 / 36)


def test_without_a_solo_there_is_no_ratio_and_formats_do_not_mix() -> None:
    results = {
        "solo-4096": measured(4096, 6.0, of_rank={"compute_dtype": "bfloat16"}),
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
        "solo-4096": measured(4096, 16.0),
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
    reduces = {"reduce_measured": 2.5, "reduce_computed": 1.9, "reduce_goodput": 100e6}
    four = measured(4096, 9.0, ranks=2, sync="exact") | {"hosts": ["a"] * 4, "world_size": 4}
    results = {
        "gpu-4096-on-a": measured(4096, 0.5, of_rank={"device": "cuda"}),
        "exact-4096": measured(4096, 8.0, ranks=2, sync="exact", of_rank=reduces),
        "ddp-4096": measured(4096, 12.0, ranks=2, sync="ddp", of_rank=reduces),
        "ranks4-4096": four,
        "ranks2-4096": measured(4096, 8.5, ranks=2, sync="exact") | {"hosts": ["a", "a"]},
        "solo-4096": measured(4096, 16.0),
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
    stages = tmp_path / "stages"
    stages.mkdir()
    assert report.main([str(stages), "--out", str(tmp_path)]) == 2
    for name, result in {
        "solo-4096": measured(4096, 12.0),
        "solo-2048": measured(2048, 7.0),
        "exact-4096": measured(4096, 8.0, ranks=2, sync="exact"),
    }.items():
        (stages / f"{name}.json").write_text(json.dumps(result))
    assert report.main([str(stages), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "bench.md").read_text()
    assert "a CPU" in text
    assert "| exact-4096 |" in text
    assert "1.50x" in text
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 3
    assert "1.50x" in capsys.readouterr().out


def test_figures_of_another_version_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "solo-4096.json").write_text(json.dumps(measured(4096, 12.0)))
    (tmp_path / "solo-2048.json").write_text(json.dumps(measured(2048, 7.0) | {"schema": SCHEMA - 1}))
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "another version of nanofleet measured it: solo-2048." in out
    assert "bench_again=true" in out
    assert "| solo-4096 |" in out
    assert "| solo-2048 |" not in out


# -- the bars


def test_bars_say_by_how_much_they_are_missed() -> None:
    row = {"ratio": 1.65, "share_of_bound": 0.9, "payload": 180e6, "baseline_share_of_limit": 0.88}
    lines = targets.targets_table({"1gbit/exact-4096-float32": row}).splitlines()
    assert "missed by 0.05x" in lines[2]
    assert "met" in lines[3]
    assert "met" in lines[4]
    assert "not measured" in lines[5]


def test_a_ratio_to_a_slow_solo_does_not_count() -> None:
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


def at(gemm: float, result: dict[str, Any]) -> dict[str, Any]:
    """The result, with another rate of products on rank 0, at its best."""
    first, *others = result["ranks"]
    rates = [{"gemm": one * gemm, "copy": 1e10} for one in (0.5, 1.0, 0.6)]
    return result | {"ranks": [first | {"rates_all": rates}, *others]}


def test_a_stage_is_held_against_the_machine_of_its_solo() -> None:
    solos = [measured(2048, 7.0), measured(4096, 12.0)]
    pair = measured(4096, 8.0, ranks=2, sync="exact")
    assert targets.relative_gemm_rate(at(0.7e11, pair), solos) == pytest.approx(0.7)
    assert targets.relative_gemm_rate(pair, [at(2e11, solos[1])]) == pytest.approx(0.5)
    assert targets.relative_gemm_rate(at(2e11, pair), solos) == 1.0, "by the slower rank"
    assert targets.relative_gemm_rate(at(2e11, pair), solos, slow_second=True) == 2.0
    assert targets.relative_gemm_rate(measured(8192, 9.0, ranks=2, sync="local"), [at(2e11, solos[1])]) == 0.5
    assert targets.relative_gemm_rate(pair, solos[:1]) is None
    assert targets.relative_gemm_rate(solos[1], solos) is None


def test_stages_of_an_unsteady_machine_are_measured_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is slow beside `exact` twice, and beside `dense` always."""
    asked: list[tuple[str, ...]] = []
    rates = {"exact-4096-float32": iter([0.7e11, 0.8e11, 1e11]), "dense-4096-float32": iter([0.5e11] * 9)}

    def measure(job: lab.Job, group: Group, stages: list[str], data: Path) -> None:
        asked.append(tuple(stages))
        for stage in stages:
            file = job.file(group.name, stage)
            file.parent.mkdir(parents=True, exist_ok=True)
            result = measured(4096, 12.0)
            if stage in rates:
                result = at(next(rates[stage]), measured(4096, 8.0, ranks=2, sync="exact"))
            file.write_text(json.dumps(result))

    for name in ("playbook", "set_up", "check_shaped", "limit_second"):
        monkeypatch.setattr(lab, name, lambda *_, **__: 0)
    monkeypatch.setattr(lab, "measure_cases", measure)
    job = lab.Job(argparse.Namespace(again=False, lab="bench"), tmp_path)
    stages = ["solo-4096-float32", *rates]
    lab.measure_group(job, GROUPS[0], stages, tmp_path)
    assert asked == [tuple(stages), tuple(rates), tuple(rates)]
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
            knobs = dict(part[2:].split("=", 1) for part in command[2:])
            folder = Path(knobs["bench_out"]).name
            self.did.append(f"{folder}: {knobs['bench_stages']} x {knobs['bench_steps']}")
            return 0
        text = " ".join(command)
        if "is-active" in text:
            return 0 if self.active else 3
        verb = "begin" if "systemd-run" in text else "end"
        dtype = f" {command[command.index('--dtype') + 1]}" if verb == "begin" else ""
        self.did.append(f"{verb} neighbour{dtype}")
        return 0


def test_solo_is_measured_while_the_other_host_trains_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Lab(monkeypatch)
    job = lab.Job(argparse.Namespace(lab="bench"), tmp_path)
    stages = ["idle/solo-4096-float32", "solo-2048-float32", "solo-4096-float32", "exact-4096-float32"]
    stages += ["dense-4096-float32", "solo-4096-bfloat16", "solo-4096-float32-on-bench-2"]
    lab.measure_cases(job, GROUPS[0], stages, tmp_path)
    assert commands.did == [
        "idle: solo-4096-float32 x 5",
        "begin neighbour float32",
        "1gbit: solo-2048-float32,solo-4096-float32 x 5",
        "end neighbour",
        "1gbit: exact-4096-float32,dense-4096-float32 x 5",
        "begin neighbour bfloat16",
        "1gbit: solo-4096-bfloat16 x 5",
        "end neighbour",
        "1gbit: solo-4096-float32-on-bench-2 x 2",
    ]
    assert job.file("1gbit", stages[0]) == tmp_path / "1gbit/idle/stages/solo-4096-float32.json"


def test_a_neighbour_that_ended_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Lab(monkeypatch, active=False)
    job = lab.Job(argparse.Namespace(lab="bench"), tmp_path)
    figures = [job.file("1gbit", f"solo-{tokens}-float32") for tokens in (2048, 4096)]
    for file in figures:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    with pytest.raises(SystemExit, match=r"the training on bench-2 ended too early.*journalctl"):
        lab.measure_cases(job, GROUPS[0], ["solo-2048-float32", "solo-4096-float32"], tmp_path)
    assert commands.did[-1] == "end neighbour"
    assert not any(file.exists() for file in figures), "they are not what their names say"


def test_a_fleet_is_held_against_a_solo_beside_an_idle_host_too() -> None:
    results = {"solo-4096": measured(4096, 13.0), "exact-4096": measured(4096, 8.0, ranks=2, sync="exact")}
    assert lab.ratios_idle(results, {"solo-4096": measured(4096, 12.0)}) == {"exact-4096": 1.5}
    assert lab.ratios_idle(results, {}) == {}
    row = {"ratio": 1.6, "ratio_idle": 1.5, "baseline_share_of_limit": 0.9, "relative_gemm_rate": 0.9}
    line = targets.targets_table({"1gbit/exact-4096-float32": row}).splitlines()[2]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == ["1.60x", "at least 1.70x", "missed by 0.10x", "1.50x"]


def test_figures_of_another_version_are_measured_again_and_stay_until_then(tmp_path: Path) -> None:
    job = lab.Job(argparse.Namespace(again=False, quick=False, only=[], lab="bench"), tmp_path)
    stages = ["solo-4096-float32", "solo-2048-float32"]
    for stage, schema in zip(stages, (SCHEMA, SCHEMA - 1), strict=True):
        job.file("1gbit", stage).parent.mkdir(parents=True, exist_ok=True)
        job.file("1gbit", stage).write_text(json.dumps({"schema": schema}))
    assert job.left("1gbit", stages) == ["solo-2048-float32"]
    assert job.file("1gbit", "solo-2048-float32").exists()


def test_a_stage_that_there_is_not_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        lab.main(["--list", "--only", "exakt"])
    assert end.value.code == 2
    assert "no case begins with exakt: they are host-float32, " in capsys.readouterr().err


def test_every_bar_is_measured_by_a_stage() -> None:
    stages = {(group.name, stage) for group in GROUPS for stage in group.cases}
    assert all((target.group, target.case) in stages for target in targets.TARGETS)
    first = set(GROUPS[0].cases)
    assert all(stage in first for group in GROUPS for stage in group.takes)
