"""The console: events folded into state, what a person reads, and the sentences for what cannot work."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from fleet import ROOT, FleetError, corpus, demo, inventory, playbooks, progress, stages, watch
from fleet.__main__ import main, parser
from fleet.closing import places
from fleet.playbooks import Failure, Job, Stage, message
from fleet.runview import RunView, is_report
from fleet.text import curve, duration, number, size, spark


def drawn(part: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def event(kind: str, **data: object) -> dict[str, object]:
    return {"event": kind, "pid": 7, "event_data": data}


def state(rank: int, step: int | None = 12, **more: object) -> dict[str, object]:
    """A report as the run_state module gives it."""
    beat = {
        "run_id": "d4-1a2b3c4d",
        "rank": rank,
        "phase": "backward",
        "step": step,
        "num_iterations": 100,
        "loss": 5.5,
        "val_bpb": None,
        "tok_per_s": 2345.6,
        "step_seconds": 1.75,
        "eta_seconds": 154.0,
        "age": 0.4,
    }
    base: dict[str, object] = {
        "found": True,
        "run_id": "d4-1a2b3c4d",
        "run_dir": "/var/lib/nanofleet/runs/d4-1a2b3c4d",
        "ended": False,
        "between": False,
        "failed_unit": False,
        "rebooted": None,
        "unit": {"active_state": "active", "sub_state": "running"},
        "time": 1000.0,
        "runs": [],
        "active_units": [],
        "past_attempts": [],
        "checkpoint_time": None,
        "heartbeats": [beat] if step is not None else [],
        "metrics": None,
        "evaluation": None,
        "outcome": None,
        "error": [],
        "run_file": {
            "hosts": ["a", "b"],
            "config": {"depth": 4, "total_batch_size": 4096, "sequence_len": 256},
        },
        "checkpoint": None,
        "stop_requested": False,
    }
    return base | more


OUTCOME = {
    "outcome": "finished",
    "reason": "All 100 steps were taken.",
    "step": 100,
    "num_iterations": 100,
    "loss": 4.25,
    "val_bpb": 2.125,
    "checkpoint": "checkpoints/step_000100",
    "sample": "def [main](self):",
}


class TestText:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (None, "-"),
            (float("nan"), "-"),
            (float("inf"), "-"),
            (0.4, "0 s"),
            (59.4, "59 s"),
            (59.6, "1m00s"),
            (154, "2m34s"),
            (3599.7, "1h00m"),
            (11100, "3h05m"),
        ],
    )
    def test_duration(self, seconds: float | None, text: str) -> None:
        assert duration(seconds) == text

    def test_numbers_and_sizes(self) -> None:
        assert (number(None), number(4096), number(5.12345, 2)) == ("-", "4,096", "5.12")
        assert (size(900), size(16e6), size(1.44e9)) == ("900 bytes", "16.0 MB", "1.4 GB")

    def test_spark_shows_every_value_up_to_its_width(self) -> None:
        assert spark([1, 2, 3], 10) == "▁▅█"
        assert spark([3] * 100, 5) == "▁▁▁▁▁"
        assert len(spark(range(1000), 60)) == 60
        assert spark([], 10) == ""

    def test_curve_falls_from_the_upper_left_to_the_lower_right(self) -> None:
        lines = curve([(1, 9.0), (50, 5.0), (100, 3.0)], width=20, height=4)
        assert len(lines) == 6
        assert lines[0].startswith("9.00 ┤")
        assert lines[3].startswith("3.00 ┤")
        assert lines[0][6] != " "
        assert lines[0].rstrip()[-1] != lines[3].rstrip()[-1] or lines[3].rstrip().endswith(lines[3][-1])
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

    def test_keeps_what_debug_tasks_say_once(self) -> None:
        stage = Stage("train")
        for host in "ab":
            said = {"msg": ["Run d4 takes", "2 minutes"]}
            stage.fold(event("runner_on_ok", host=host, task_action="ansible.builtin.debug", res=said))
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

    def test_a_task_that_gave_up_waiting_yields_to_the_rescue_that_says_why(self) -> None:
        stage = Stage("train")
        stage.fold(event("runner_on_failed", host="a", task="Wait", res={"attempts": 90}))
        stage.fold(event("runner_on_failed", host="a", task="Show why", res={"msg": "The disk is full."}))
        stage.fold(event("playbook_on_stats", failures={"a": 1}))
        assert [failure.message for failure in stage.failures] == ["The disk is full."]

    def test_notes_of_a_loop_are_its_items(self) -> None:
        stage = Stage("lab")
        said = {"msg": "All items completed", "results": [{"msg": "one"}, {"msg": "two"}]}
        stage.fold(event("runner_on_ok", host="a", task_action="ansible.builtin.debug", res=said))
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
            ({}, "it gave no reason; the log has more"),
        ],
    )
    def test_message(self, result: dict[str, object], text: str) -> None:
        assert message(result) == text


class TestRunView:
    def test_both_hosts_and_the_coordinators_figures(self) -> None:
        view = RunView()
        view.fold("b", state(1, step=11))
        view.fold("a", state(0, step=12))
        assert [(rank.host, rank.step) for rank in view.ranks] == [("a", 12), ("b", 11)]
        assert (view.coordinator, view.step, view.loss, view.ended, view.outcome) == ("a", 12, 5.5, False, "")
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

    def test_no_pace_is_told_of_a_run_that_does_not_train(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        view.fold("b", state(1, between=True))
        assert "step 12/100  loss 5.5000  a" in progress.run_plain(view)

    def test_without_a_terminal_what_is_odd_is_told_once(self) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        follower = watch.Follower(screen, None, [])
        ended = {"time": 1000, "outcome": "retryable", "step": 9, "reason": "Lost rank 1 (b)."}
        for seconds in (64, 70):
            blamed = state(0, past_attempts=[ended])
            blamed["heartbeats"][0]["blame"] = f"rank 1 (b) has waited for {seconds} s"  # type: ignore[index]
            follower.view.fold("a", blamed)
            follower.view.fold("b", state(1))
            follower._tick()
        said = screen.console.file.getvalue()  # type: ignore[attr-defined]
        assert said.count("Blame:       rank 1 (b) has waited for 64 s") == 1
        assert "70 s" not in said
        assert said.count("retryable at step 9: Lost rank 1 (b).") == 1

    def test_before_the_first_heartbeat_the_hosts_are_there(self) -> None:
        view = RunView()
        view.fold("b", state(1, step=None))
        assert [(rank.host, rank.rank) for rank in view.ranks] == [("b", 1)]
        assert "waiting for the first step" in progress.run_plain(view)
        assert "step 0/?" in drawn(progress.run_panel(view))

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
            "Frozen:      rank 0 on a has not beaten for 34 s", "step 10, 1m00s ago", "b did not answer",
        ):  # fmt: skip
            assert piece in panel
        assert "unreachable" in panel

    def test_a_rebooted_host_and_what_puts_it_back(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        view.fold(
            "b", state(1, ended=True, rebooted=1000.0, outcome={"outcome": "stopped", "settled": False})
        )
        assert view.rebooted == {"b": 1000.0}
        assert "Put it back: ansible-playbook train.yml -e run_id=d4-1a2b3c4d" in drawn(
            progress.run_panel(view), 200
        )
        view.fold("a", state(0, ended=True, outcome={"outcome": "stopped", "settled": True}))
        assert not view.rebooted, "somebody has stopped it"

    def test_ends_when_every_host_has(self) -> None:
        view = RunView()
        view.fold("a", state(0, step=100, ended=True, outcome=OUTCOME))
        view.fold("b", state(1, step=100))
        assert not view.ended
        view.fold("b", state(1, step=100, ended=True, outcome={"outcome": "finished"}))
        assert (view.outcome, view.reason) == ("finished", "All 100 steps were taken.")
        assert (view.loss, view.val_bpb, view.checkpoint) == (4.25, 2.125, "checkpoints/step_000100")

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

    def test_the_other_host_tells_why_when_the_coordinator_cannot(self) -> None:
        view = RunView()
        view.fold("a", state(0, ended=True))
        view.fold("b", state(1, ended=True, outcome={"outcome": "final", "reason": "The disk is full."}))
        assert (view.outcome, view.reason) == ("final", "The disk is full. (b)")

    def test_history_fills_the_curve_and_skips_a_torn_line(self) -> None:
        view = RunView()
        view.fold("a", state(0))
        view.history(['{"step": 1, "loss": 9.0}', '{"step": 10, "val_bpb": 3.5}', '{"step": 2, "lo'])
        assert view.curve == [(1, 9.0), (12, 5.5)]
        assert (view.first_loss, view.val_bpb) == (9.0, 3.5)

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

    def test_report_says_everything(self) -> None:
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

    def test_a_view_that_stands_still_is_said_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = progress.Screen(Console(file=io.StringIO()))
        now = [100.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        for index in range(65):
            screen.plain(lambda: "setup  Install", float(index))
            now[0] += 1
        lines = screen.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert lines == ["setup  Install  0 s", "setup  Install  30 s", "setup  Install  1m00s"]

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


class TestInventory:
    LISTING: ClassVar[dict[str, Any]] = {
        "_meta": {
            "hostvars": {
                "a": {"ansible_host": "10.1.0.2", "ansible_user": "ops"},
                "b": {"fleet_address": "x"},
            }
        },
        "coordinator": {"hosts": ["a"]},
        "workers": {"children": ["more"], "hosts": ["b"]},
        "more": {"hosts": ["c"]},
    }

    def test_rank_order_and_addresses(self) -> None:
        fleet = inventory.from_listing(self.LISTING, None)
        assert fleet.hosts == ["a", "b", "c"]
        assert fleet.addresses == {"a": "10.1.0.2", "b": "x", "c": "c"}

    def test_no_coordinator_and_two_get_a_sentence(self) -> None:
        with pytest.raises(FleetError, match="no host in the group 'coordinator'"):
            inventory.from_listing({}, "my.yml")
        with pytest.raises(FleetError, match="2 coordinators"):
            inventory.from_listing({"coordinator": {"hosts": ["a", "b"]}}, "my.yml")

    def test_a_tracker_out_of_reach_comes_with_its_tunnel(self) -> None:
        fleet = inventory.Fleet(["a"], {"a": "127.0.0.1"}, {"a": "ops"})
        said = inventory.tracker(fleet, port=9)
        assert "ssh -N -L 9:localhost:9 ops@127.0.0.1" in said


class TestCorpus:
    def test_machine_sources(self, tmp_path: Path) -> None:
        lib, share = tmp_path / "lib", tmp_path / "share"
        for folder in (
            "lib/json",
            "lib/test",
            "lib/site-packages",
            "share/doc",
            "share/man/man1",
            "share/man/de",
        ):
            (tmp_path / folder).mkdir(parents=True)
        (lib / "abc.py").write_text("x")
        (lib / "libx.so").write_text("x")
        found = [str(path.relative_to(tmp_path)) for path in corpus.machine_sources(share, lib)]
        assert found == ["lib/abc.py", "lib/json", "share/doc", "share/man/man1"]

    def test_this_machine_has_ten_megabytes(self) -> None:
        total = 0
        for source in corpus.machine_sources():
            for path in [source] if source.is_file() else source.rglob("*"):
                total += (
                    path.lstat().st_size if path.suffix in (".py", ".gz") and not path.is_symlink() else 0
                )
        assert total > 10_000_000

    def test_own_corpus_needs_text(self, tmp_path: Path) -> None:
        with pytest.raises(FleetError, match="There is no corpus at"):
            corpus.own_sources(str(tmp_path / "none"))
        (tmp_path / ".hidden").write_text("text")
        (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
        (tmp_path / "blank.txt").write_text("\n\n")
        with pytest.raises(FleetError, match="has no text in it"):
            corpus.own_sources(str(tmp_path))
        (tmp_path / "story.md").write_text("Once")
        assert corpus.own_sources(str(tmp_path)) == [tmp_path.resolve()]


class TestDemo:
    def test_needs_linux_podman_and_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(FleetError, match="needs a Linux machine"):
            demo.check_machine("Darwin")
        monkeypatch.setattr(demo.shutil, "which", lambda name: None)
        with pytest.raises(FleetError, match=r"podman is missing.*make lab-tools"):
            demo.check_machine("Linux")
        monkeypatch.setattr(demo.shutil, "which", lambda name: f"/usr/bin/{name}")
        with pytest.raises(FleetError, match=r"1\.0 GB are free at .* need 8 GB"):
            demo.check_machine("Linux", 1_000_000_000)
        demo.check_machine("Linux", 100_000_000_000)

    def test_without_root_and_sudo_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo.os, "geteuid", lambda: 1000)
        monkeypatch.setattr(demo.shutil, "which", lambda name: None)
        with pytest.raises(FleetError, match="there is no sudo"):
            demo.become_password()

    def test_an_empty_corpus_is_refused_before_anything_is_built(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(demo, "check_machine", lambda: None)
        monkeypatch.setattr(demo, "run_command", lambda *args: pytest.fail("something was built"))
        assert main(["demo", "--corpus", str(tmp_path)]) == 2
        assert "has no text in it" in capsys.readouterr().err

    def test_a_lab_of_another_name_has_its_own_places(self) -> None:
        other = demo.Demo(lab="mine")
        assert other.inventory.endswith(".lab/mine/inventory")
        assert other.down == "make lab-down LAB=mine"
        assert demo.Demo().inventory.endswith("inventory/lab")

    def test_bad_numbers_get_a_sentence(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            parser().parse_args(["demo", "--depth", "deep"])
        assert stop.value.code == 2
        assert "'deep' is not a whole number above 0" in capsys.readouterr().err


FAKE_RUN_STATE = """
import os, time
from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule({"rank": {"type": "int"}, "folder": {"type": "path"}}, supports_check_mode=True)
mark = os.path.join(module.params["folder"], "calls-%d" % module.params["rank"])
with open(mark, "a") as file:
    file.write("x")
step = os.path.getsize(mark)
folder, rank = module.params["folder"], module.params["rank"]
there = os.listdir(folder)
waits = "reboots" in there and "trained" not in there
# Another console has ended the units of this run and starts them anew.
between = "another" in there and 3 <= step < 6
rebooted = 1000.0 if waits and rank == 1 and step >= 2 else None
ended = bool(rebooted) if waits else step >= 3
beat = {"rank": rank, "phase": "done" if ended else "forward", "step": step,
        "num_iterations": 3, "loss": 9.0 - step, "tok_per_s": 100.0, "eta_seconds": 1.0, "age": 0.1}
outcome = {"outcome": "finished", "reason": "All 3 steps were taken.", "step": 3, "loss": 6.0,
           "settled": True}
with open(os.path.join(folder, "metrics.jsonl"), "w") as file:
    file.write('{"step": 1, "loss": 8.5}\\n')
module.exit_json(changed=False, found=True, run_id="t", run_dir=folder, ended=ended, between=False,
                 error=[], unit={"active_state": "active"}, heartbeats=[beat], failed_unit=False,
                 rebooted=rebooted, time=time.time(), runs=[], active_units=[], past_attempts=[],
                 checkpoint=None, checkpoint_time=None, evaluation=None, stop_requested=False,
                 run_file=None, outcome=outcome if ended and not rebooted and not between else None)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own: two local hosts, a run of three looks, and a long playbook."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "run_state.py").write_text("#!/usr/bin/python\n" + FAKE_RUN_STATE)
    (tmp_path / "ansible.cfg").write_text("[defaults]\nlibrary = library\n")
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {name: host | {"rank": rank} for rank, name in enumerate(("a", "b"))}
    groups = {"coordinator": {"hosts": {"a": hosts["a"]}}, "workers": {"hosts": {"b": hosts["b"]}}}
    (tmp_path / "hosts.yml").write_text(json.dumps({"fleet": {"children": groups}}))
    watch_play = {
        "name": "Watch",
        "hosts": "fleet",
        "gather_facts": False,
        "tasks": [
            {
                "name": "Watch the run",
                "run_state": {"rank": "{{ rank }}", "folder": str(tmp_path)},
                "register": "x",
                "until": "x.ended",
                "retries": 20,
                "delay": 0,
            }
        ],
    }
    (tmp_path / "watch.yml").write_text(json.dumps([watch_play]))
    long = {"name": "Wait", "hosts": "fleet", "gather_facts": False}
    long["tasks"] = [{"name": "Sleep", "ansible.builtin.command": "sleep 60"}]  # type: ignore[assignment]
    (tmp_path / "long.yml").write_text(json.dumps([long]))
    for module in (playbooks, inventory):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (playbooks, stages):
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(watch, "WATCH", "watch.yml")
    return tmp_path


class TestThroughAnsibleRunner:
    def test_follows_a_run_to_its_end(self, fake: Path) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=100))
        follower = watch.Follower(screen, str(fake / "hosts.yml"), [])
        assert follower.follow() == watch.FINISHED
        view = follower.view
        assert [rank.host for rank in view.ranks] == ["a", "b"]
        assert (view.step, view.loss, view.outcome, view.coordinator) == (3, 6.0, "finished", "a")
        assert 2 in view.losses  # a retry on the way was heard
        assert (fake / "cache" / "logs" / "watch.log").exists()

    def test_a_rebooted_host_is_put_back(self, fake: Path) -> None:
        (fake / "reboots").touch()
        train = {"name": "Train", "hosts": "coordinator", "gather_facts": False}
        train["tasks"] = [{"name": "Start", "ansible.builtin.copy": {
            "dest": str(fake / "trained"), "content": "{{ run_id }} {{ depth }}", "mode": "0644"}}]  # type: ignore[assignment]  # fmt: skip
        (fake / "train.yml").write_text(json.dumps([train]))
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        follower = watch.Follower(screen, str(fake / "hosts.yml"), ["-e", "depth=4"])
        assert follower.follow() == watch.FINISHED
        assert (fake / "trained").read_text() == "t 4"
        said = screen.console.file.getvalue()  # type: ignore[attr-defined]
        assert said.count("Rebooted:    b at ") == 1
        typed = f"ansible-playbook -i {fake / 'hosts.yml'} train.yml -e run_id=t"
        assert f"Put it back: {typed} Doing that now:" in " ".join(said.split())

    def test_two_consoles_may_put_a_host_back(self, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "_RETRY_SECONDS", (0, 0))
        (fake / "another").touch()
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        follower = watch.Follower(screen, str(fake / "hosts.yml"), [])
        follower._put_back.add(("b", 1000.0))
        assert follower.follow() == watch.FINISHED
        assert "up nowhere" in screen.console.file.getvalue()  # type: ignore[attr-defined]

    def test_ctrl_c_ends_a_playbook_and_its_workers(self, fake: Path) -> None:
        job = Job("long", "long.yml", inventory=str(fake / "hosts.yml"))
        started = time.monotonic()

        def tick() -> None:
            if len(job.stage.waiting) == 2:
                raise KeyboardInterrupt

        with pytest.raises(playbooks.CancelledError):
            job.follow(tick)
        assert time.monotonic() - started < 30
        with pytest.raises(ProcessLookupError):
            os.kill(job.stage.pid, 0)

    def test_a_missing_playbook_shows_ansibles_own_words(self, fake: Path) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        assert not stages.run_playbook(screen, Job("none", "none.yml", inventory=str(fake / "hosts.yml")))
        assert "none.yml" in screen.console.file.getvalue()  # type: ignore[attr-defined]

    def test_a_command_that_fails_shows_what_it_said(self, fake: Path) -> None:
        screen = progress.Screen(Console(file=io.StringIO(), width=200))
        good, _ = stages.run_command(
            screen, "corpus", "reading", [sys.executable, "-c", "import sys; sys.exit('no disk')"]
        )
        assert not good
        assert "no disk" in screen.console.file.getvalue()  # type: ignore[attr-defined]


def test_leaving_a_run_says_it_goes_on(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(self: watch.Follower) -> int:
        raise playbooks.CancelledError

    monkeypatch.setattr(watch.Follower, "follow", leave)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["watch", "-i", str(fake / "hosts.yml")]) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert "it goes on" in said
    assert "python -m fleet watch -i" in said
    assert "stop.yml" in said


def test_places_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "read", lambda where: inventory.Fleet(["a"], {"a": "10.0.0.2"}, {"a": ""}))
    monkeypatch.setattr(inventory, "tracker", lambda fleet: "http://10.0.0.2:5000")
    view = RunView(coordinator="a", run_dir="/r", checkpoint="checkpoints/step_000100")
    assert places(view, None) == [
        ("checkpoint", "a:/r/checkpoints/step_000100"),
        ("log", "a:/r/train.log"),
        ("MLflow", "http://10.0.0.2:5000"),
    ]


def test_without_the_venv_there_is_a_sentence() -> None:
    """A Python that has neither rich nor Ansible."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "fleet", "watch"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "make venv" in done.stderr
    assert "Traceback" not in done.stderr
