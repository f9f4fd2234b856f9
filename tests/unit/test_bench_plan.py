"""Which cases bench.yml measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils import bench_plan as filters

from trainer.bench import SCHEMA
from trainer.config import SYNC_MODES


def plan(asked: str = "", hosts: tuple[str, ...] = ("a", "b"), **config: Any) -> list[dict[str, Any]]:
    return list(filters.bench_plan(asked, list(hosts), [], config, 4096, 5))


# -- cases


def test_a_fleet_is_measured_alone_together_and_in_every_mode() -> None:
    cases = {case["name"]: case for case in plan()}
    modes = {f"{mode}-{8192 if mode == 'local' else 4096}" for mode in SYNC_MODES}
    assert set(cases) == {
        "single-4096-on-a",
        "single-4096-on-b",
        "single-2048-on-a",
        "ranks2-4096-on-a",
        "ddp-4096",
        *modes,
    }
    assert cases["exact-4096"]["hosts"] == ["a", "b"]
    assert cases["exact-4096"]["config"]["sync"] == "exact"
    assert cases["single-4096-on-b"]["hosts"] == ["b"]
    assert (cases["ranks2-4096-on-a"]["nproc"], cases["ranks2-4096-on-a"]["hosts"]) == (2, ["a"])
    assert {name for name, case in cases.items() if case["arguments"]} == {"ddp-4096"}
    assert (cases["ddp-4096"]["arguments"], cases["ddp-4096"]["hosts"]) == (["--ddp"], ["a", "b"])
    assert all(case["config"]["num_iterations"] == 7 for case in cases.values())


def test_one_host_has_no_sync_modes_and_a_gpu_is_measured_too() -> None:
    names = [case["name"] for case in filters.bench_plan("", ["a"], ["a"], {}, 4096, 5)]
    assert names == ["single-4096-on-a", "gpu-4096-on-a", "ranks2-4096-on-a"]


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
    cases = filters.bench_plan("", ["a"], [], config, tokens, 5, threads, memory_gb)
    assert [case["nproc"] for case in cases] == ([1, 2, 4] if has_four else [1, 2])
    named = filters.bench_plan(f"ranks4-{4 * tokens}", ["a"], [], config, tokens, 5, threads, memory_gb)
    assert named[0]["nproc"] == 4, "a case that is named is measured in any case"


def test_the_kind_ranks_takes_a_number_of_processes_and_two_without_it() -> None:
    names = "ranks-4096", "ranks2-4096", "ranks4-4096-float32-on-b", "ranks16-16384"
    cases = plan(",".join(names))
    assert [case["nproc"] for case in cases] == [2, 2, 4, 16]
    assert [case["hosts"] for case in cases] == [["a"], ["a"], ["b"], ["a"]]
    assert all(case["config"]["sync"] == "exact" for case in cases)


def test_plain_ddp_is_a_kind_of_the_benchmark_and_no_sync_mode() -> None:
    (case,) = plan("ddp-4096-float32-3.1")
    assert (case["arguments"], case["shares"], case["config"]["dtype"]) == (["--ddp"], "3,1", "float32")
    assert case["config"]["sync"] in SYNC_MODES, "the run file of a case is one of a run"


def test_only_what_was_measured_of_the_same_model_counts_as_measured(tmp_path: Path) -> None:
    (case,) = plan("single-4096", depth="4")
    base = {
        "schema": SCHEMA,
        "hosts": ["a"],
        "depth": 4,
        "sequence_len": 1024,
        "device_batch_size": 2,
        "steps": 5,
    }
    file = tmp_path / "single-4096.json"

    def measured(**other: Any) -> list[str]:
        file.write_text(json.dumps({**base, **other}))
        return list(filters.measured([case], [file]))

    assert measured() == ["single-4096"]
    assert measured(steps=6) == ["single-4096"]
    others: list[dict[str, Any]] = [{"schema": 0}, {"hosts": ["tower"]}, {"steps": 4}]
    for other in (*others, {"depth": 2}, {"sequence_len": 512}, {"device_batch_size": 1}):
        assert measured(**other) == []
    file.write_text('{"schema":')
    assert filters.measured([case], [file]) == []
    assert filters.measured([case], []) == []


def test_a_case_is_read_from_its_name() -> None:
    (case,) = plan("exact-16384-float32-12.4", depth="4")
    assert case["config"]["dtype"] == "float32"
    assert case["config"]["total_batch_size"] == 16384
    assert case["config"]["depth"] == "4"
    assert case["shares"] == "12,4"
    (case,) = plan("single-4096-bfloat16-on-b")
    assert (case["hosts"], case["config"]["dtype"], case["shares"]) == (["b"], "bfloat16", "equal")
    assert plan("exact-4096-auto")[0]["shares"] == "auto"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("exakt-4096", "must be single or"),
        ("exact", "KIND-TOKENS"),
        ("single-4096-on-c", "there is no host c"),
        ("exact-5000", "multiple of sequence_len"),
        ("exact-4096-on-a", "on all hosts"),
        ("ddp-4096-on-a", "ddp is measured on all hosts"),
        ("ddp-4096-auto", "plain DDP measures no speeds"),
        ("exact4-4096", "only the kind ranks takes it"),
        ("ranks1-4096", "2 or more"),
        ("ranks8-4096", "8 ranks need a sequence each, 8192 tokens or more"),
        ("exact-1024", "2 ranks need a sequence each, 2048 tokens or more"),
    ],
)
def test_a_case_that_cannot_be_is_refused(asked: str, says: str) -> None:
    with pytest.raises(AnsibleFilterError, match=says) as error:
        plan(f"{asked},nonsense")
    assert "nonsense" in str(error.value)  # all findings at once
