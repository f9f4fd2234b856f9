"""A run's reports folded into one view, and what a person sees of it."""

import io
from pathlib import Path

import pytest
from console import OUTCOME, drawn, state
from rich.console import Console

from fleet import progress, watch
from fleet.runview import RunView, is_report


class TestRunView:
    def test_both_hosts_and_the_coordinators_figures(self) -> None:
        view = RunView()
        view.fold("b", state(1, step=11))
        view.fold("a", state(0, step=12))
        assert [(rank.host, rank.step) for rank in view.ranks] == [("a", 12), ("b", 11)]
        assert (view.coordinator, view.figures["step"], view.loss, view.ended, view.outcome) == (
            "a",
            12,
            5.5,
            False,
            "",
        )
        panel = drawn(progress.run_panel(view))
        for piece in (
            "run d4-1a2b3c4d",
            "step 12/100",
            "12 %",
            "Speed:       2,346 tok/s",
            "Time left:   2m34s",
            "depth 4",
            "backward",
        ):
            assert piece in panel
        assert (
            "step 12/100  loss 5.5000  2,346 tok/s  eta 2m34s  a backward, b backward"
            in progress.run_plain(view)
        )

    def test_no_pace_is_reported_of_a_run_that_does_not_train(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        view.fold("b", state(1, between=True))
        assert "step 12/100  loss 5.5000  a" in progress.run_plain(view)

    def test_without_a_terminal_what_is_odd_is_reported_once(self) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        follower = watch.RunFollower(screen, None, [])
        ended = {"time": 1000, "outcome": "retryable", "step": 9, "reason": "Lost rank 1 (b)."}
        for seconds in (64, 70):
            delayed = state(0, past_attempts=[ended])
            delayed["heartbeats"][0]["diagnosis"] = f"rank 1 (b) has waited for {seconds} s"  # type: ignore[index]
            follower.view.fold("a", delayed)
            follower.view.fold("b", state(1))
            follower._tick()
        printed = screen.console.file.getvalue()  # type: ignore[attr-defined]
        assert printed.count("Diagnosis:   rank 1 (b) has waited for 64 s") == 1
        assert "70 s" not in printed
        assert printed.count("retryable at step 9: Lost rank 1 (b).") == 1

    def test_the_newest_report_of_rank_0_is_the_coordinators(self) -> None:
        """A coordinator that was lost still has its old run status until its host has joined again."""
        view, old, new = RunView(), state(0, step=12), state(0, step=20)
        old["heartbeats"][0]["time"], new["heartbeats"][0]["time"] = 900.0, 950.0  # type: ignore[index]
        for _ in range(2):
            view.fold("a", old)
            view.fold("b", new)
        view.fold("a", old)
        assert (view.coordinator, view.figures["step"]) == ("b", 20)

    def test_before_the_first_heartbeat_the_hosts_are_there(self) -> None:
        view = RunView()
        view.fold("b", state(1, step=None))
        assert [(rank.host, rank.rank) for rank in view.ranks] == [("b", 1)]
        assert "waiting for the first step" in progress.run_plain(view)
        assert "step 0/?" in drawn(progress.run_panel(view))

    def test_a_name_that_no_run_has_is_shown_with_the_nearest(self) -> None:
        view = RunView()
        there = {"found": False, "run_id": "frist", "heartbeats": [], "runs": [{"run_id": "first"}]}
        view.fold("a", state(0) | there)
        assert view.unknown == (
            "No host that answers has a run frist. Did you mean first? Known runs: first. "
            "Fix: repeat the command with one of them: -e run_id=NAME"
        )
        assert progress.run_plain(view) == "the run: no host has it"
        view.states["a"]["run_id"] = ""
        assert "To start one, type: python -m fleet train" in view.unknown

    def test_a_narrow_terminal_is_no_trouble(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        assert "step 12/100" in drawn(progress.run_panel(view, 40), 40)

    def test_the_screen_is_the_one_of_status(self) -> None:
        view = RunView()
        beat = {"entered": 1.0, "tok_per_s_average": 2000.0, "sync_share": 0.125, "temperature": 91.0}
        late = state(0, checkpoint="checkpoints/step_000010", checkpoint_time=940.0)
        late["heartbeats"][0].update(beat, age=34.0, throttled=True)  # type: ignore[index]
        view.fold("a", late)
        view.lost["b"] = "No route to host"
        panel = drawn(progress.run_panel(view), 140)
        for piece in (
            "12 %", "91 °C throttled",
            "Frozen:      rank 0 on a has published no run status for 34 s",
            "step 10, 1m00s ago", "b did not answer",
        ):  # fmt: skip
            assert piece in panel
        assert "unreachable" in panel

    def test_a_rebooted_host_and_what_puts_it_back(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        view.fold(
            "b", state(1, ended=True, rebooted=1000.0, outcome={"outcome": "stopped", "settled": False})
        )
        assert [line.startswith("Rebooted:    b at ") for line in view.reboots] == [True]
        assert "Restart it: ansible-playbook train.yml -e run_id=d4-1a2b3c4d" in drawn(
            progress.run_panel(view), 200
        )
        view.fold("a", state(0, ended=True, outcome={"outcome": "stopped", "settled": True}))
        assert not view.reboots, "somebody has stopped it"

    def test_ends_when_every_host_has(self) -> None:
        view = RunView()
        view.fold("a", state(0, step=100, ended=True, outcome=OUTCOME))
        view.fold("b", state(1, step=100))
        assert not view.ended
        view.fold("b", state(1, step=100, ended=True, outcome={"outcome": "finished"}))
        assert (view.outcome, view.reason) == ("finished", "All 100 steps were taken.")
        assert (view.loss, view.figures["val_bpb"], view.figures["checkpoint"]) == (
            4.25,
            2.125,
            "checkpoints/step_000100",
        )

    def test_an_outcome_between_two_attempts_is_no_end(self) -> None:
        view = RunView()
        view.fold("a", state(0, outcome=OUTCOME | {"outcome": "retryable"}))
        assert not view.ended

    def test_an_end_without_an_outcome_shows_the_hosts_own_errors(self) -> None:
        view = RunView()
        view.fold("a", state(0, ended=True))
        view.fold("b", state(1, ended=True, error=["MemoryError: 3 GB"]))
        assert view.outcome == "ended without an outcome"
        text = drawn(progress.report(view))
        assert "b:" in text
        assert "MemoryError: 3 GB" in text

    def test_the_other_host_shows_why_when_the_coordinator_cannot(self) -> None:
        view = RunView()
        view.fold("a", state(0, ended=True))
        view.fold("b", state(1, ended=True, outcome={"outcome": "final", "reason": "The disk is full."}))
        assert (view.outcome, view.reason) == ("final", "The disk is full. (b)")

    def test_history_fills_the_curve_and_skips_a_torn_line(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        view.history(['{"step": 1, "loss": 9.0}', '{"step": 10, "val_bpb": 3.5}', '{"step": 2, "lo'])
        assert view.curve == [(1, 9.0), (12, 5.5)]
        assert (view.first_loss, view.figures["val_bpb"], view.figures["step"]) == (9.0, 3.5, 12)

    def test_no_run(self) -> None:
        view = RunView()
        view.fold("a", {"found": False, "ended": True, "heartbeats": []})
        assert view.ended
        assert not view.found

    def test_only_run_state_reports_are_reports(self) -> None:
        assert is_report(state(0))
        assert not is_report({"changed": False, "msg": "All assertions passed"})
        assert not is_report(None)

    def test_a_lost_host_does_not_keep_the_others_end_back(self) -> None:
        view = RunView()
        view.fold("b", state(1))
        view.fold("a", state(0, step=100, ended=True, outcome=OUTCOME))
        assert not view.ended
        view.lost["b"] = "No route to host\nmore"
        assert view.outcome == "finished"
        assert "b cannot be reached: No route to host\n" in drawn(progress.report(view))
        view.fold("b", state(1))
        assert not view.lost

    def test_report_shows_everything(self) -> None:
        view = RunView()
        view.history(f'{{"step": {step}, "loss": {9 - step / 20}}}' for step in range(1, 100))
        view.fold("a", state(0, step=100, ended=True, outcome=OUTCOME))
        text = drawn(progress.report(view, [("MLflow", "http://10.0.0.2:5000"), ("stop", "make lab-down")]))
        for piece in (
            "finished",
            "step 100",
            "loss 8.950 at the first step, 4.250 at the last",
            "2.125 bits per byte",
        ):
            assert piece in text
        assert "def [main](self):" in text  # square brackets are text, not markup
        assert "MLflow  http://10.0.0.2:5000\nstop    make lab-down" in text


class TestScreen:
    def test_plain_output_is_thinned_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = progress.Screen(Console(file=io.StringIO()))
        now = [100.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        for index in range(100):
            now[0] += 0.1
            screen.plain(lambda index=index: f"step {index}")  # type: ignore[misc]
        lines = screen.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert 2 <= len(lines) <= 3

    def test_a_view_that_stands_still_is_reported_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = progress.Screen(Console(file=io.StringIO()))
        now = [100.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        for index in range(65):
            screen.plain(lambda: "setup  Install", float(index))
            now[0] += 1
        lines = screen.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert lines == ["setup  Install  0.0 s", "setup  Install  30 s", "setup  Install  1m00s"]

    def test_plain_output_does_not_repeat_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = progress.Screen(Console(file=io.StringIO()))
        monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
        for _ in range(3):
            screen.plain(lambda: "same")
        assert screen.console.file.getvalue() == "same\n"  # type: ignore[attr-defined]

    def test_record_writes_a_picture(self, tmp_path: Path) -> None:
        view = RunView()
        view.fold("a", state(0))
        target = tmp_path / "demo.svg"
        progress.record(str(target), "demo", [progress.run_panel(view)])
        picture = target.read_text(encoding="utf-8")
        assert picture.startswith("<svg")
        assert "12/100" in picture
