"""Runs that an earlier release tracked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow_stand_in import StandIn
from tracked_run import Track

from trainer.config import RunConfig, RunFile
from trainer.tracking.files import Facts

EARLIER = Path(__file__).resolve().parents[1] / "fixtures" / "tracking" / "earlier"


@pytest.fixture
def earlier(server: StandIn, tmp_path: Path) -> list[list[Any]]:
    """The recorded run in tmp_path, and on the server what that release sent; returns these points."""
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    kept = json.loads((EARLIER / "server.json").read_text())
    cursor = json.loads((tmp_path / "tracker.json").read_text())
    (tmp_path / "tracker.json").write_text(json.dumps({**cursor, "uri": server.uri}))
    facts = Facts.load(tmp_path)
    tags = {"nanofleet.run_id": facts.run_id, "nanofleet.digest": facts.digest}
    run = {"id": kept["id"], "status": "FINISHED", "experiment": kept["experiments"]["nanofleet"]}
    run |= {"tags": tags, "params": dict(facts.params), "artifacts": [], "points": set()}
    run["points"] = {tuple(point) for point in kept["points"]}
    server.experiments, server.runs = kept["experiments"], {kept["id"]: run}
    return list(kept["points"])


def test_an_earlier_run_keeps_its_points_and_gets_all_under_the_new_names(
    server: StandIn, earlier: list[list[Any]], tmp_path: Path, track: Track
) -> None:
    status, text = track(server.uri)
    assert status == 0, text
    assert server.experiments == {"nanofleet": "1"}, "it stays in the experiment in which it began"
    points = server.run["points"]
    assert {tuple(point) for point in earlier} <= points
    for figure, metric in (("loss", "train/step_loss"), ("val_bpb", "val/bpb"), ("step_seconds", "train/dt")):
        assert server.history(metric) == server.history(figure) != []
    system = [point for point in earlier if point[0].startswith("system/")]
    assert system
    assert sum(point[0].startswith("system/") for point in points) == len(system), "they kept their names"
    assert "0 figures were missing" in track(server.uri)[1]


def test_an_earlier_run_that_the_tracker_lacks_is_sent_to_its_experiment(
    server: StandIn, tmp_path: Path, track: Track
) -> None:
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    status, text = track(server.uri)
    assert status == 0, text
    assert list(server.experiments) == ["nanofleet"]
    assert [step for step, _ in server.history("train/step_loss")] == [1, 2, 3, 4, 5, 6]


def test_an_earlier_run_that_resumes_stays_in_its_experiment() -> None:
    saved = RunFile.load(EARLIER / "run.json").config
    assert saved.experiment == "nanofleet"
    assert RunConfig.resumed(json.loads((EARLIER / "run.json").read_text())["config"], {}) == saved
