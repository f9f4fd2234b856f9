"""Which hosts may leave an elastic run (run_leave.py)."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_leave

RUN = {"hosts": ["tower", "laptop", "attic"], "config": {"elastic": "True"}}


def state(run_file: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    return {
        "unit": {"active_state": "active"},
        "run_id": "a",
        "run_file": run_file or RUN,
        "ended": False,
        **values,
    }


OVER, PLAIN = state(ended=True), state({**RUN, "config": {}})
FIXED = state({**RUN, "config": {"elastic": "True", "coordinator_failover": "false"}})
STATES = {"tower": state(), "laptop": state(), "attic": state()}


def test_workers_of_an_elastic_run_may_leave() -> None:
    assert run_leave.refusal(STATES, "a", ["laptop", "attic"]) == ""
    assert "laptop left the run a, which continues on tower, attic." in run_leave.report(
        STATES, "a", ["laptop"]
    )


def test_the_coordinator_of_three_hosts_may_leave() -> None:
    assert run_leave.refusal(STATES, "a", ["tower"]) == ""


@pytest.mark.parametrize(
    ("states", "leaving", "expected"),
    [
        (
            STATES,
            ["cellar"],
            "Not in the inventory: cellar. The hosts of the inventory are tower, laptop, attic.",
        ),
        (
            dict.fromkeys(STATES, FIXED),
            ["tower"],
            "tower is the coordinator, and the run a does not continue",
        ),
        ({**STATES, "attic": {"unreachable": True}}, ["attic"], "No answer from attic, so no host was "),
        (
            {**STATES, "attic": OVER},
            ["attic"],
            "attic does not take part in the run a. Those that do: tower,",
        ),
        (dict.fromkeys(STATES, OVER), ["attic"], "The run a is not active, so no host can leave."),
        (dict.fromkeys(STATES, PLAIN), ["attic"], "No host can leave the run a, because it is not elastic"),
    ],
)
def test_others_are_refused_with_the_reason(
    states: dict[str, Any], leaving: list[str], expected: str
) -> None:
    assert expected in run_leave.refusal(states, "a", leaving)
