"""Made-up states of a run, for the modules and filters of the roles on runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import run_plan as launch
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_dir import read_run

from trainer.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
ROLE = ROOT / "roles" / "launch"


HOSTS = ["tower", "laptop"]


def state(**changes: Any) -> dict[str, Any]:
    unit = {"name": "nanofleet-a.service", "active_state": "inactive", "result": "success"}
    none = read_run("/runs/a", {**unit, "sub_state": "dead", "restarts": 0, "since": None}, 100.0, 20)
    return {
        **none, "run_id": "a", "run_dir": "/runs/a", "ended": True, "unit": unit,
        "time": 100.0, "runs": [], "active_units": [], "listeners": [], **changes,
    }  # fmt: skip


def stored(**settings: Any) -> dict[str, Any]:
    config = RunConfig.from_strings({"depth": 2, "num_iterations": 20, **settings}).to_dict()
    return {"found": True, "run_file": {"run_id": "a", "config": config, "hosts": HOSTS}}


def beat(**changes: Any) -> dict[str, Any]:
    return {"rank": 0, "phase": "forward", "step": 3, "num_iterations": 20, "loss": 5.0, "tok_per_s": 1234.6,
            "step_seconds": 1.5, "eta_seconds": 154.0, "age": 1.0, **changes}  # fmt: skip


def plan(given: dict[str, Any], *states: dict[str, Any], run_id: str = "a") -> dict[str, Any]:
    result: dict[str, Any] = launch.plan_run(given, run_id, list(states) or [state(), state()], HOSTS, "m")
    return result
