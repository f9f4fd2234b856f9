"""The module end_run over made-up readings: when a run is over, and whose outcome is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.modules import end_run
from run_states import beat, state

RUN = {"found": True, "run_dir": "/runs/a", "heartbeats": [beat()], "between": False}
ASKED = {
    "state_dir": "/s", "user": "u", "run_id": "a", "ports": [29500], "outcome": "stopped", "reason": "Why.",
    "log_lines": 20, "grace": -1, "request": False, "wait_seconds": 0,
}  # fmt: skip


class Host:
    """Answers what the module reads and does, and keeps it."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any], changed: bool = True) -> None:
        self.states, self.changed = [before, after, after], changed
        self.awaited = after
        self.stopped: list[dict[str, Any]] = []
        self.made: list[dict[str, Any]] = []

    def stop(self, options: dict[str, Any], _unit: Any, _check: bool) -> dict[str, Any]:
        self.stopped.append(options)
        return {"changed": self.changed, "ended": [{"pid": 41}]}

    def end(self, check: bool = False, **given: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(end_run, "read_state", lambda _params: self.states.pop(0))
            patch.setattr(end_run, "await_state", lambda _params: self.awaited)
            patch.setattr(end_run, "read_unit", lambda name, *_: {"name": name})
            patch.setattr(end_run, "stop", self.stop)
            patch.setattr(end_run, "make", lambda params, _check: self.made.append(params))
            return end_run.end({**ASKED, **given}, check)

    def written(self) -> list[tuple[dict[str, Any], bool]]:
        files = [each for each in self.made if "outcome.json" in each["files"]]
        return [(json.loads(each["files"]["outcome.json"]), each["replace"]) for each in files]

    def requested(self) -> bool:
        return any("stop" in each["files"] for each in self.made)


def test_whoever_ends_a_unit_writes_down_why() -> None:
    host = Host(state(**RUN, ended=False), state(**RUN))
    done = host.end()
    assert (done["changed"], done["done"], done["ended"], done["run_id"]) == (True, True, [{"pid": 41}], "a")
    [(outcome, replace)] = host.written()
    assert (outcome["outcome"], outcome["reason"], outcome["settled"]) == ("stopped", "Why.", True)
    assert (outcome["step"], replace) == (3, True)
    assert not host.requested()


@pytest.mark.parametrize(("settled", "replaced"), [(True, False), (False, True)])
def test_the_outcome_of_a_rank_is_kept_unless_systemd_ended_it(settled: bool, replaced: bool) -> None:
    ended = state(**RUN, outcome={"outcome": "stopped", "settled": settled})
    host = Host(state(**RUN, ended=False), ended)
    host.end()
    assert [replace for _outcome, replace in host.written()] == [replaced]
    retried = Host(state(**RUN, ended=False), ended)
    retried.end(outcome="retryable")
    assert [(outcome["settled"], replace) for outcome, replace in retried.written()] == [(False, False)]


def test_a_checkpoint_that_was_being_written_at_the_end_is_deleted(tmp_path: Path) -> None:
    whole, unfinished = (tmp_path / "checkpoints" / name for name in ("step_000010", ".step_000020.tmp"))
    for folder in (whole, unfinished):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"0")
    run = {**RUN, "run_dir": str(tmp_path)}
    Host(state(**run, ended=False), state(**run)).end(check=True)
    assert unfinished.exists()
    Host(state(**run, ended=False), state(**run)).end()
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step_000010"]


def test_a_run_that_still_saves_is_left_alone() -> None:
    saving = Host(state(**RUN, ended=False), state(**RUN, ended=False))
    done = saving.end(request=True, wait_seconds=15)
    assert (done["done"], done["changed"]) == (False, True)
    assert saving.requested()
    assert saving.stopped == []
    saved = Host(state(**RUN, ended=False), state(**RUN))
    assert saved.end(request=True, wait_seconds=15)["done"]
    assert saved.requested()
    [options] = saved.stopped
    assert (options["ports"], options["state"]) == ([29500], "absent")


def test_nothing_is_written_of_what_was_not_ended() -> None:
    over = state(**RUN)
    assert not Host(over, over, changed=False).end()["changed"]
    idle = Host(over, over)
    ended = idle.end(run_id="")
    assert (ended["changed"], ended["done"], ended["ended"], ended["state"]) == (False, True, [], over)
    dry = Host(state(**RUN, ended=False), over)
    assert dry.end(check=True, request=True, wait_seconds=15)["changed"]
    assert idle.made == dry.made == []
