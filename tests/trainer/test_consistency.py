"""What ranks must agree on: fields compared, fields only shown, and what is reported of a difference."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from trainer.config import RunConfig, RunFile
from trainer.distributed.consistency import Record, compare, explain, make_record
from trainer.host.rank_env import RankEnv

RUN = RunFile("a", RunConfig(depth=2), ("tower", "laptop"), "code", "manifest", (3, 5))
TOWER = RankEnv(rank=0, world_size=2, host="tower")
LAPTOP = RankEnv(rank=1, world_size=2, host="laptop")


def differing(other: RunFile, **endpoint: Any) -> list[str]:
    return list(compare([make_record(TOWER, RUN), make_record(LAPTOP, other, **endpoint)]))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run_id": "b"}, "run_id"),
        ({"config": RunConfig(depth=3)}, "config.depth"),
        ({"config": RunConfig(depth=2, sync="exact")}, "config.sync"),
        ({"hosts": ("tower", "attic")}, "hosts"),
        ({"shares": (4, 4)}, "shares"),
        ({"manifest_sha256": "another"}, "run file"),
        ({"trainer_digest": "another"}, "run file"),
    ],
)
def test_every_field_of_the_run_file_is_compared(change: dict[str, Any], field: str) -> None:
    assert differing(replace(RUN, **change)) == [field]


def test_data_and_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(RUN, hashes={"tokenizer": "t", "manifest": "m"}) == ["tokenizer", "manifest"]
    records = [make_record(TOWER, RUN)]
    for name in ("torch", "numpy", "python", "trainer code", "world_size"):
        assert name in records[0].compared
    monkeypatch.setattr(
        "trainer.distributed.consistency.importlib.metadata.version", lambda name: "2.13.0+cu130"
    )
    monkeypatch.setattr("trainer.distributed.consistency.code_digest", lambda: "f" * 64)
    records.append(make_record(LAPTOP, RUN))
    sentence, table = explain(compare(records), records)
    assert (
        f"trainer code is {records[0].compared['trainer code']}, but rank 1 (laptop) has ffffffffffff"
        in sentence
    )
    assert "numpy" in table
    assert "+cu130" not in table, "a build is no version"


def test_what_may_differ_by_host_is_shown_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = make_record(TOWER, RUN)
    monkeypatch.setattr(RankEnv, "address", lambda _place: "10.0.0.2")
    laptop = replace(make_record(LAPTOP, RUN), shown={"interface": "wlan0", "cpu": "bfloat16, 4 threads"})
    assert {"interface", "local rank"} <= set(tower.shown)
    assert not set(tower.shown) & set(tower.compared)
    assert compare([tower, laptop]) == {}


def test_a_record_survives_the_store() -> None:
    record = make_record(LAPTOP, RUN, problem="no rows")
    stored = json.loads(json.dumps(record.__dict__))
    assert Record.load(stored) == record
    assert Record.load({**stored, "of another release": 1}) == record
