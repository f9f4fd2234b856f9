"""A playbook's events folded into a stage, and the words of its failures."""

from pathlib import Path

import pytest
from console import event

from fleet import progress
from fleet.playbooks import Failure, Stage, environment, message
from fleet.text import curve, number


class TestText:
    def test_numbers(self) -> None:
        assert (number(None), number(4096), number(5.12345, 2)) == ("-", "4,096", "5.12")

    def test_curve_falls_from_the_upper_left_to_the_lower_right(self) -> None:
        lines = curve([(1, 9.0), (50, 5.0), (100, 3.0)], width=20, height=4)
        assert len(lines) == 6
        assert lines[0].startswith("9.00 ┤")
        assert lines[3].startswith("3.00 ┤")
        assert lines[0][6] != " "
        assert lines[3][6] == " "
        assert lines[0][-1] == " "
        assert lines[3][-1] != " "
        assert lines[5].endswith("step 100")
        assert curve([(1, 9.0)]) == []

    def test_curve_of_a_constant_is_drawn(self) -> None:
        assert len(curve([(1, 2.0), (2, 2.0)], width=10, height=2)) == 4


class TestStage:
    def test_follows_play_task_and_hosts(self) -> None:
        stage = Stage("setup")
        stage.fold(event("playbook_on_play_start", name="Prepare hosts"))
        stage.fold(event("playbook_on_task_start", name="Install wheels"))
        stage.fold(event("runner_on_start", host="b"))
        stage.fold(event("runner_on_start", host="a"))
        stage.fold(event("runner_retry", host="b", res={"attempts": 3, "retries": 21}))
        stage.fold(event("runner_on_ok", host="a", res={"changed": True}))
        assert stage.pid == 7
        assert stage.changed == 1
        line = progress.stage_line(stage, 75).plain
        assert "Prepare hosts · Install wheels  [b (3/20)]  1m15s" in line

    def test_keeps_what_debug_tasks_show_once(self) -> None:
        stage = Stage("train")
        for host in "ab":
            printed = {"msg": ["Run d4 takes", "2 minutes"]}
            stage.fold(event("runner_on_ok", host=host, task_action="ansible.builtin.debug", res=printed))
        assert stage.notes == ["Run d4 takes\n2 minutes"]

    def test_a_rescued_failure_is_none(self) -> None:
        stage = Stage("train")
        stage.fold(event("runner_on_failed", host="a", task="Try", res={"msg": "no"}))
        stage.fold(event("runner_on_failed", host="b", task="Try", res={"msg": "never"}))
        stage.fold(event("runner_on_failed", host="b", task="Ask", res={"msg": "x"}, ignore_errors=True))
        stage.fold(event("runner_on_unreachable", host="c", task="Ping", res={"msg": "timed out"}))
        stage.fold(event("playbook_on_stats", failures={"b": 1}, dark={"c": 1}))
        assert stage.failures == [
            Failure("b", "Try", "never"),
            Failure("c", "Ping", "timed out", unreachable=True),
        ]

    def test_a_task_that_gave_up_waiting_yields_to_the_rescue_that_shows_why(self) -> None:
        stage = Stage("train")
        stage.fold(event("runner_on_failed", host="a", task="Wait", res={"attempts": 90}))
        stage.fold(event("runner_on_failed", host="a", task="Show why", res={"msg": "The disk is full."}))
        stage.fold(event("playbook_on_stats", failures={"a": 1}))
        assert [failure.message for failure in stage.failures] == ["The disk is full."]

    def test_notes_of_a_loop_are_its_items(self) -> None:
        stage = Stage("lab")
        printed = {"msg": "All items completed", "results": [{"msg": "one"}, {"msg": "two"}]}
        stage.fold(event("runner_on_ok", host="a", task_action="ansible.builtin.debug", res=printed))
        assert stage.notes == ["one", "two"]

    def test_a_failure_is_shown_in_full_and_once_for_all_its_hosts(self) -> None:
        failures = [Failure(host, "Check disk", "3 GB are needed.\nMake room.") for host in "ab"]
        text = progress.failure_lines("setup", failures, [], "/x/setup.log").plain
        assert "a, b failed at: Check disk\n  3 GB are needed.\n  Make room." in text
        assert text.endswith("/x/setup.log")

    def test_without_a_failed_task_the_logs_end_is_shown(self) -> None:
        assert (
            "ERROR! no such file" in progress.failure_lines("setup", [], ["ERROR! no such file"], "l").plain
        )

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            (
                {"msg": "non-zero return code", "stderr": "no disk", "stdout": ""},
                "non-zero return code\nno disk",
            ),
            ({"msg": ["one", "two"]}, "one\ntwo"),
            (
                {"msg": "All", "results": [{"item": "x", "failed": True, "msg": "bad"}, {"item": "y"}]},
                "x: bad",
            ),
            ({"censored": "hidden by no_log", "msg": "secret"}, "hidden by no_log"),
            ({}, "The task returned no message; its output is in the log."),
        ],
    )
    def test_message(self, result: dict[str, object], text: str) -> None:
        assert message(result) == text


def test_an_inventory_of_the_environment_is_found_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss curve of a run that was joined is fetched by a module, which runs in another folder."""
    (tmp_path / "hosts.yml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANSIBLE_INVENTORY", "hosts.yml,a-host")
    assert environment()["ANSIBLE_INVENTORY"] == f"{tmp_path}/hosts.yml,a-host"
    monkeypatch.delenv("ANSIBLE_INVENTORY")
    assert "ANSIBLE_INVENTORY" not in environment()
