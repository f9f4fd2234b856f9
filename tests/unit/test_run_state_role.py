"""Which reading of a host counts in the role run_state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROLE = Path(__file__).resolve().parents[2] / "roles" / "run_state"
SKIPPED = {"changed": False, "skipped": True}


def state(run_id: str, newest: float = 0.0) -> dict[str, Any]:
    return {
        "run_id": run_id, "unit": {}, "found": True, "active_units": [], "ended": True, "run_file": None,
        "stepped": False, "heartbeats": [], "runs": [{"run_id": run_id, "time": newest}], "error": [],
    }  # fmt: skip


def by_host(**readings: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """run_state_by_host; readings: host -> results of the first and of the second task."""
    loader = DataLoader()
    variables: dict[str, Any] = {}
    for folder in ("defaults", "vars"):
        path = str(ROLE / folder / "main.yml")
        variables |= loader.load_from_file(path, trusted_as_template=True)
    hostvars = {
        host: {"__run_state_found": first, "__run_state_read": second}
        for host, (first, second) in readings.items()
    }
    given = {"run_state_hosts": list(readings), "hostvars": hostvars}
    return Templar(loader=loader, variables={**variables, **given}).template(variables["run_state_by_host"])


def test_hosts_that_agree_are_read_once() -> None:
    found = by_host(tower=(state("new"), SKIPPED), laptop=(state("new"), SKIPPED))
    assert [each["run_id"] for each in found.values()] == ["new", "new"]


def test_a_host_with_another_newest_run_is_read_again() -> None:
    found = by_host(tower=(state("new", 2.0), SKIPPED), laptop=(state("old", 1.0), state("new", 2.0)))
    assert [each["run_id"] for each in found.values()] == ["new", "new"]


def test_a_host_that_does_not_answer_the_second_time_is_not_shown_with_another_run() -> None:
    gone = {"unreachable": True, "msg": "timed out"}
    found = by_host(tower=(state("new", 2.0), SKIPPED), laptop=(state("old", 1.0), gone))
    assert found["laptop"]["unreachable"]
