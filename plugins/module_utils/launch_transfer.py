"""A run that its ranks leave to one host, whose GPU would by itself be faster than all of them on their CPUs.

They end without a step, and each one's outcome names the host; train.yml then starts the run there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch_left_to(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whom the ranks have left the run to, as they ended: {"host", "seconds", "together", "said"}; or {}.

    seconds: that a step takes there alone; together: on all ranks; said: their table of predictions.
    states: of the run's hosts, by name.
    """
    for state in states.values():
        outcome = state.get("outcome") or {}
        alone = outcome.get("alone") or {}
        if outcome.get("outcome") == "final" and alone.get("host") in states:
            return dict(alone)
    return {}


def launch_alone(plan: Mapping[str, Any], left_to: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a run that was left to one host: its run file, what to say, the units to end on all."""
    hosts, host, run_id = plan["file"]["hosts"], left_to["host"], plan["run_id"]
    free = ", ".join(each for each in hosts if each != host)
    goes = f"So the run {run_id} goes to {host} alone{f'; {free} is free' * bool(free)}."
    return {
        **plan,
        "file": {**plan["file"], "hosts": [host], "chosen_from": hosts},
        "message": f"{left_to['said']}\n{goes}",
        "ends": {each: [f"nanofleet-{run_id}.service"] for each in hosts},
        "step_seconds": left_to["seconds"],
    }
