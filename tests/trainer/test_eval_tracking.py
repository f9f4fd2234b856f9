"""The results of an evaluation reach the MLflow run of the checkpoint; a server that fails costs a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_stand_in import StandIn
from tracked_run import FACTS

from trainer.tracking.evaluations import figures, send

PARTS = {
    "bpb": {"val_bpb": 1.5, "val_loss": 2.0},
    "core": {"core_metric": 0.25, "tasks": {}},
    "chat": {"chatcore_metric": 0.5, "tasks": {"letters": {"accuracy": 0.75}}},
    "sample": "The end",
}


@pytest.fixture
def server() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """That of a run that was tracked, and the results of an evaluation in `out`."""
    FACTS.save(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "eval.json").write_text(json.dumps({"parts": PARTS}))
    (tmp_path / "out" / "core.csv").write_text("Task, Accuracy, Centered\n")
    return tmp_path / "checkpoints" / "step_000500"


def test_figures_have_the_names_of_nanochat() -> None:
    found = {"eval/bpb": 1.5, "core_metric": 0.25, "chatcore_metric": 0.5, "chatcore/letters": 0.75}
    assert figures(PARTS) == found
    assert figures({"sample": "The end"}) == {}


def test_figures_and_tables_reach_the_run(server: StandIn, checkpoint: Path, tmp_path: Path) -> None:
    printed = send(checkpoint, 500, tmp_path / "out", PARTS, server.uri)
    assert printed.startswith("Tracked at http://")
    assert server.history("core_metric") == [(500, 0.25)]
    assert server.history("eval/bpb") == [(500, 1.5)]
    assert [name for name, _ in server.run["artifacts"]] == [
        "eval/step_000500/eval.json",
        "eval/step_000500/core.csv",
    ]


def test_a_server_that_fails_costs_a_line(server: StandIn, checkpoint: Path, tmp_path: Path) -> None:
    server.illness = "fails"
    printed = send(checkpoint, 500, tmp_path / "out", PARTS, server.uri)
    assert printed.startswith(f"The tracker at {server.uri} does not answer")
    assert f"The results are in {tmp_path / 'out'}." in printed
    assert "is not the address of a tracker" in send(checkpoint, 500, tmp_path / "out", PARTS, "nowhere")
    (tmp_path / "facts.json").unlink()
    assert "is not the directory of a run" in send(checkpoint, 500, tmp_path / "out", PARTS, server.uri)
