"""Sends the results of an evaluation to the run of the checkpoint on MLflow.

facts.json in the run directory of the checkpoint identifies the run. If there is no facts.json, as for an
imported checkpoint, nothing is sent. Metrics have the step of the checkpoint; eval.json and core.csv are
sent as artifacts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.tracking.files import Cursor, Facts
from trainer.tracking.mlflow_run import (
    FiguresRejectedError,
    MlflowRun,
    RunLostError,
    describe_failure,
    is_server,
    shown_uri,
)
from trainer.tracking.names import clean_key

PATIENCE_SECONDS = 30.0
FOLDER = "eval"  # of the artifacts
SENT = ("eval.json", "core.csv")


def figures(parts: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation by their names on the server: {metric: value}.

    parts: {part: its result} as in eval.json. The parts are bpb, core and chat, as far as they were
    evaluated. Metrics: eval/bpb, core_metric, chatcore_metric and chatcore/TASK.
    """
    found = {}
    if bpb := parts.get("bpb"):
        found["eval/bpb"] = float(bpb["val_bpb"])
    if core := parts.get("core"):
        found["core_metric"] = float(core["core_metric"])
    if chat := parts.get("chat"):
        found["chatcore_metric"] = float(chat["chatcore_metric"])
        found |= {f"chatcore/{name}": float(task["accuracy"]) for name, task in chat["tasks"].items()}
    return {clean_key(name): value for name, value in found.items()}


def send(checkpoint: Path, step: int, out: Path, parts: Mapping[str, Any], uri: str) -> str:
    """Send figures and files of an evaluation to the run of the checkpoint; returns a line for the log.

    checkpoint, step: directory and step of the checkpoint. out: the folder that has eval.json. parts: as for
    `figures`. uri: address of the MLflow server. If the results cannot be sent, the line has the reason.
    """
    run_dir = checkpoint.absolute().parent.parent
    if not is_server(uri):
        return (
            f"{shown_uri(uri)!r} is not the address of a tracker, so the results were not sent. Set "
            "MLFLOW_TRACKING_URI to an address such as http://HOST:5000."
        )
    try:
        facts = Facts.load(run_dir)
    except (OSError, ValueError):
        return f"The results were not sent to the tracker: {run_dir} is not the directory of a run."
    try:
        run = MlflowRun(uri, facts, Cursor.load(run_dir, shown_uri(uri), facts).mlflow_run, PATIENCE_SECONDS)
        try:
            run.open(running=False)
        except RunLostError:
            run.id = ""
            run.open(running=False)
        run.log([(name, value, time.time(), step) for name, value in figures(parts).items()])
        for name in SENT:
            if (out / name).exists():
                run.put(out / name, f"{FOLDER}/step_{step:06d}")
    except FiguresRejectedError as error:
        return f"The tracker at {shown_uri(uri)} refuses the results: {error}. They are in {out}."
    except Exception as error:  # any failure of the server; the results are kept in files
        return f"The tracker at {shown_uri(uri)} {describe_failure(error)}. The results are in {out}."
    return f"Tracked at {run.page}"
