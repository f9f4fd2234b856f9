"""The action end_run over made-up modules: whose outcome is written when a unit is ended from outside."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.action.end_run import ActionModule
from run_states import beat, state

RUN = {"found": True, "run_dir": "/runs/a", "heartbeats": [beat()]}
ASKED = {
    "state_dir": "/s", "user": "u", "run_id": "a", "ports": [29500], "outcome": "stopped", "reason": "Why.",
}  # fmt: skip


class Host:
    """Answers the modules that the action calls, and keeps their arguments."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any], changed: bool = True) -> None:
        self.states, self.changed = [before, after, after], changed
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def answer(self, name: str, args: dict[str, Any], task_vars: Any = None) -> dict[str, Any]:
        module = name.rsplit(".", 1)[1]
        self.calls.append((module, args))
        if module == "run_state":
            return self.states.pop(0)
        return {"changed": self.changed, "ended": [{"pid": 41}]}

    def end(self, check: bool = False, **given: Any) -> dict[str, Any]:
        action = ActionModule.__new__(ActionModule)
        action._task = SimpleNamespace(args={**ASKED, **given}, check_mode=check)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ActionModule, "_execute_module", lambda _self, *args, **more: self.answer(*args, **more)
            )
            patch.setattr("ansible.plugins.action.ActionBase.run", lambda *_args, **_more: {})
            return action.run(None, {})

    def written(self) -> list[tuple[dict[str, Any], bool]]:
        calls = [args for module, args in self.calls if module == "run_directory"]
        assert all(args["user"] == "u" for args in calls)
        return [(json.loads(args["files"]["outcome.json"]), args["replace"]) for args in calls]


def test_whoever_ends_a_unit_writes_down_why() -> None:
    host = Host(state(**RUN, ended=False), state(**RUN))
    done = host.end()
    assert (done["changed"], done["ended"], done["run_id"]) == (True, [{"pid": 41}], "a")
    [(outcome, replace)] = host.written()
    assert (outcome["outcome"], outcome["reason"], outcome["settled"]) == ("stopped", "Why.", True)
    assert (outcome["step"], replace) == (3, True)
    assert dict(host.calls)["transient_unit"]["name"] == "nanofleet-a"


@pytest.mark.parametrize(("settled", "replaced"), [(True, False), (False, True)])
def test_the_outcome_of_a_rank_is_kept_unless_systemd_ended_it(settled: bool, replaced: bool) -> None:
    ended = state(**RUN, outcome={"outcome": "stopped", "settled": settled})
    host = Host(state(**RUN, ended=False), ended)
    host.end()
    assert [replace for _outcome, replace in host.written()] == [replaced]
    retried = Host(state(**RUN, ended=False), ended)
    retried.end(outcome="retryable")
    assert [(outcome["settled"], replace) for outcome, replace in retried.written()] == [(False, False)]


def test_nothing_is_written_of_what_was_not_ended() -> None:
    over = state(**RUN)
    assert not Host(over, over, changed=False).end()["changed"]
    idle = Host(over, over)
    assert idle.end(run_id="") == {"changed": False, "ended": [], "state": over}
    dry = Host(state(**RUN, ended=False), over)
    assert dry.end(check=True)["changed"]
    assert idle.written() == dry.written() == []
    gone = {"unreachable": True, "msg": "timed out"}
    assert Host(gone, over).end() == gone
