"""What status.yml, train.yml and stop.yml say of a run, from made-up states."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_report as report
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_status as status
from ansible_collections.nanofleet.fleet.plugins.module_utils import run_summary as summary
from ansible_collections.nanofleet.fleet.plugins.module_utils import systemd_unit as unit_facts
from run_states import HOSTS, beat, plan, state, stored


def test_status_of_a_live_run_with_a_lost_host() -> None:
    up = state(**stored(), ended=False, active_units=["nanofleet-a.service"], heartbeats=[beat()],
               unit={"active_state": "active"},
               checkpoint="checkpoints/step_000002", checkpoint_time=0.5)  # fmt: skip
    printed = status.status_screen(
        {"tower": up, "laptop": {"unreachable": True, "msg": "x"}}, "a", "http://tower:5000"
    )
    lines = printed.splitlines()
    assert lines[0] == "Run a: step 3 of 20 (15 %)"
    assert len({len(line.rstrip()) for line in lines[2:5]}) == 1, "the columns are aligned"
    for part in ("3/20", "5.0000", "1,235", "unreachable", "laptop did not answer", "2m34s", "http://tower:5000",
                 "step 2, 1m40s ago: /runs/a/checkpoints/step_000002 on tower"):  # fmt: skip
        assert part in printed


def test_status_of_eight_hosts_fits_one_screen() -> None:
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    ended = [{"outcome": "retryable", "step": 2, "time": 1.0, "reason": "Lost rank 1 (host-1)"}]
    states = {
        f"host-{rank}": state(**up, heartbeats=[beat(rank=rank, world_size=8)], past_attempts=ended)
        for rank in range(8)
    }
    lines = status.status_screen(states, "a", "http://host-0:5000").splitlines()
    assert sum("host-" in line and "3/20" in line for line in lines) == 8
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120


def test_status_shows_pace_diagnosis_attempts_and_who_is_frozen() -> None:
    now = {
        "tok_per_s_average": 1200.4,
        "sync_share": 0.124,
        "temperature": 91.3,
        "throttled": True,
        "entered": 99.0,
    }
    diagnosis = "rank 1 (laptop) has been in backward of step 4 for 94 s; rank 0 (tower) waits in sync"
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    ended = [{"outcome": "retryable", "step": 2, "time": 1.0, "reason": "Lost rank 1 (laptop)"}]
    tower = state(**up, heartbeats=[beat(**now, diagnosis=diagnosis)], past_attempts=ended)
    laptop = state(**up, heartbeats=[beat(**now, rank=1, age=34.0, diagnosis=diagnosis)])
    printed = status.status_screen({"tower": tower, "laptop": laptop}, "a")
    for part in ("12 %", "91 °C throttled", f"Diagnosis:   {diagnosis}",
                 "Frozen:      rank 1 on laptop has published no run status for 34 s", "1 ended",
                 "retryable at step 2: Lost rank 1 (laptop)"):  # fmt: skip
        assert part in printed
    assert printed.count(diagnosis) == 1
    assert "Frozen:      rank 0" not in printed
    assert "Time left" not in printed
    laptop = state(**up, heartbeats=[beat(**now, rank=1)])
    assert "1,235 tok/s, 1,200 on average" in status.status_screen({"tower": tower, "laptop": laptop}, "a")


@pytest.mark.parametrize(
    "laptop",
    [
        {"between": True, "heartbeats": [beat(rank=1)]},
        {"heartbeats": [beat(rank=1, over=True)]},
        {"heartbeats": [beat(rank=1, before=True)]},
        {"heartbeats": []},
        {"ended": True, "heartbeats": [beat(rank=1)]},
    ],
    ids=["waits", "was killed", "joins", "starts", "is over"],
)
def test_no_time_is_left_to_a_run_that_does_not_train(laptop: dict[str, Any]) -> None:
    up = {**stored(), "ended": False, "heartbeats": [beat()]}
    tower = state(**up)
    assert "Time left" in status.status_screen({"tower": tower, "laptop": tower}, "a")
    printed = status.status_screen({"tower": tower, "laptop": state(**{**up, **laptop})}, "a")
    assert "Time left" not in printed
    assert "tok/s" not in printed


@pytest.mark.parametrize(
    ("changes", "up"),
    [
        ({"over": True}, {}),
        ({"before": True}, {}),
        ({}, {"between": True}),
        ({}, {"ended": True}),
        ({"age": 40.0}, {}),
    ],
    ids=[
        "its rank has ended",
        "its rank joins anew",
        "its unit waits",
        "the run is over",
        "its rank is frozen",
    ],
)
def test_nobody_is_named_by_an_attempt_that_is_over(changes: dict[str, Any], up: dict[str, Any]) -> None:
    printed = beat(diagnosis="rank 1 (laptop) is frozen", warning="No room")
    tower = state(**{**stored(), "ended": False, **up}, heartbeats=[{**printed, **changes}])
    shown = status.status_screen({"tower": tower, "laptop": {"unreachable": True}}, "a")
    assert "Diagnosis" not in shown
    assert ("Warning" in shown) == ("age" in changes)
    living = state(**stored(), ended=False, heartbeats=[printed])
    assert "Diagnosis:   rank 1 (laptop) is frozen" in status.status_screen({"tower": living}, "a")


def test_the_cause_is_reported_once_and_last() -> None:
    outcome = {"outcome": "final", "rank": 0, "reason": "The loss of step 2 is nan."}
    end = "[rank 0] final: The loss of step 2 is nan."
    dead = state(**stored(), outcome=outcome, error=[end])
    printed = status.status_screen({"tower": dead, "laptop": dead}, "a").splitlines()
    assert printed[-1] == "Outcome:     final: The loss of step 2 is nan."
    assert not any("train.log reports" in line for line in printed), "it has nothing else to say"
    traced = {**dead, "error": ["Traceback", "ValueError: x"]}
    printed = status.status_screen({"tower": traced, "laptop": dead}, "a").splitlines()
    assert printed[-3:] == ["  ValueError: x", "", "Outcome:     final: The loss of step 2 is nan."]


def test_status_of_a_unit_between_two_attempts() -> None:
    waits = {"active_state": "activating", "sub_state": "auto-restart"}
    waiting = state(
        **stored(), ended=False, between=True, unit=waits, heartbeats=[beat(age=40.0, entered=1.0)]
    )
    printed = status.status_screen({"tower": waiting}, "a")
    assert "restarting     0  ended, restarting" in printed
    assert "Frozen" not in printed, "it is dead, and known to be"


def test_status_of_a_rank_that_has_given_up_a_frozen_one() -> None:
    """Rank 0 has ended, its torchrun not yet; rank 1 stands still in the attempt before."""
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    lost = {"outcome": "retryable", "rank": 0, "reason": "Lost rank 1 (laptop)"}
    silent = {"age": 40.0, "entered": 1.0}
    tower = state(**up, heartbeats=[beat(**silent, over=True)], outcome=lost)
    laptop = state(**up, heartbeats=[beat(**silent, rank=1)])
    printed = status.status_screen({"tower": tower, "laptop": laptop}, "a")
    assert "tower   active     0  ended, restarting" in printed
    assert "Frozen:      rank 1 on laptop" in printed
    assert "Frozen:      rank 0" not in printed
    stopped = {**tower, "outcome": {"outcome": "stopped", "rank": 0}}
    assert "ended, restarting" not in status.status_screen({"tower": stopped}, "a")


def test_status_shows_what_a_host_is_at_before_its_first_heartbeat() -> None:
    up = {**stored(), "ended": False, "time": 190.0,
          "unit": {"active_state": "active", "sub_state": "running", "since": 100.0}}  # fmt: skip
    joins, imports = state(**up), state(**up, began=145.0, heartbeats=[beat(before=True, entered=1.0)])
    lines = status.status_screen({"tower": joins, "laptop": imports}, "a").splitlines()
    at, later = (time.strftime("%H:%M:%S", time.localtime(moment)) for moment in (100, 145))
    assert f"Starting:    tower: torchrun loads and joins the other hosts, since {at} (1m30s)" in lines
    assert f"Starting:    laptop: its ranks are importing torch, since {later} (45 s)" in lines
    assert any(line.startswith("tower   active     -  joining  ") for line in lines)
    assert any(line.startswith("laptop  active     0  importing torch  ") for line in lines)
    old = state(**up, began=50.0)  # it was killed, and the next one has not got so far yet
    assert "joining" in status.status_screen({"tower": old}, "a")
    for there in ({"heartbeats": [beat(phase="load")]}, {"ended": True}, {"between": True}):
        assert "Starting" not in status.status_screen({"tower": state(**{**up, **there})}, "a")


def frozen(process: str, **changes: Any) -> str:
    """The line on rank 1, whose process does as the kernel says."""
    up = {**stored(), "ended": False, "unit": {"active_state": "active", "sub_state": "running"}}
    still = beat(rank=1, age=34.0, entered=1.0, process=process, **{"world_size": 2, **changes})
    states = {"tower": state(**up, heartbeats=[beat()]), "laptop": state(**up, heartbeats=[still])}
    states["laptop"]["unit"]["scope"] = changes.get("scope", "system")
    printed: str = status.status_screen(states, "a")
    (line,) = [line for line in printed.splitlines() if line.startswith("Frozen")]
    return line.partition("rank 1 on laptop has published no run status for 34 s")[2]


def test_the_fix_for_a_frozen_rank_is_reported_or_that_it_recovers_by_itself() -> None:
    resume = "on laptop: sudo systemctl kill -s CONT nanofleet-a"
    assert frozen("stopped") == f": it is stopped (SIGSTOP). Continue it, {resume}"
    assert "laptop: systemctl --user kill -s CONT nanofleet-a" in frozen("stopped", scope="user")
    assert "a debugger on laptop holds it" in frozen("tracing stop")
    assert "No command is needed: the other ranks restart without it, and it restarts" in frozen("disk sleep")
    assert "No command is needed: it continues" in frozen("disk sleep", world_size=1)
    assert f"If it was stopped (SIGSTOP), {resume}. Else the other ranks restart" in frozen("")


def test_a_stopped_process_is_distinguished_from_a_sleeping_one() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeper:
        assert unit_facts.process_state(sleeper.pid) in ("sleeping", "running", "disk sleep")
        assert not unit_facts.is_missing(sleeper.pid)
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        assert unit_facts.process_state(sleeper.pid) == "stopped"
        sleeper.kill()
    assert unit_facts.process_state(sleeper.pid) == ""
    assert unit_facts.is_missing(sleeper.pid)


def test_status_names_a_rebooted_host_and_what_puts_it_back() -> None:
    waits = {"active_state": "activating", "sub_state": "auto-restart"}
    tower = state(**stored(), ended=False, between=True, unit=waits, outcome={"outcome": "retryable"})
    laptop = state(**stored(), rebooted=1000.0)
    printed = status.status_screen({"tower": tower, "laptop": laptop}, "a")
    assert "laptop  rebooted" in printed
    assert "Rebooted:    laptop at " in printed
    assert "Restart it: ansible-playbook train.yml -e run_id=a" in printed
    itself = {**laptop, "at_boot": True, "time": 1060.0}
    printed = status.status_screen({"tower": tower, "laptop": itself}, "a")
    assert "The host restarts it by itself." in printed
    assert "train.yml" not in printed, "nothing has to be typed"
    late = {**itself, "time": 1600.0}
    assert "Restart it: ansible-playbook" in status.status_screen({"tower": tower, "laptop": late}, "a")
    both = {"tower": {**tower, "at_boot": True}, "laptop": itself}
    assert "At boot:     the run restarts by itself on tower" in status.status_screen(both, "a")
    tower["outcome"] = {"outcome": "stopped", "settled": True}
    assert "Restart it" not in status.status_screen({"tower": tower, "laptop": laptop}, "a")


@pytest.mark.parametrize(
    ("unit", "shown", "ended"),
    [
        ({"active_state": "active", "sub_state": "running"}, "active", False),
        ({"active_state": "activating", "sub_state": "auto-restart"}, "restarting", False),
        ({"active_state": "failed", "sub_state": "failed"}, "failed", True),
        ({"active_state": "inactive", "sub_state": "dead"}, "inactive", True),
    ],
)
def test_status_names_a_directory_that_is_gone_with_the_state_of_its_unit(
    unit: dict[str, Any], shown: str, ended: bool
) -> None:
    tower = state(**stored(), unit={"active_state": "active", "sub_state": "running"}, ended=False,
                  active_units=["nanofleet-a.service"], heartbeats=[beat()])  # fmt: skip
    laptop = state(unit=unit, ended=ended, between=unit["sub_state"] == "auto-restart")
    lines = status.status_screen({"tower": tower, "laptop": laptop}, "a").splitlines()
    (row,) = [line.split() for line in lines if line.startswith("laptop")]
    assert row[1:5] == [shown, "-", "no", "directory"]
    (printed,) = [line for line in lines if line.startswith("Missing:")]
    assert f"/runs/a on laptop, where the unit is {shown}." in printed
    assert "train.yml -e run_id=a" in printed
    alone = status.status_screen({"laptop": laptop}, "a")
    assert ("Missing:" in alone) is (shown != "inactive"), "a run that nobody knows and nothing runs of"


def test_what_a_log_shows_does_not_spoil_the_screen() -> None:
    noisy = state(**stored(), failed_unit=True, error=["\ta  ", "GLHF \U0001f3d6\ufe0f", "\x1b[31mFüße"])
    printed = status.status_screen({"tower": noisy}, "a")
    assert printed.splitlines()[-3:] == ["          a"[-9:], "  GLHF", "  [31mFüße"]


def test_hosts_that_a_run_was_not_left_to_are_not_needed() -> None:
    run_file = {**stored()["run_file"], "hosts": ["laptop"], "chosen_from": HOSTS}
    up = state(
        found=True, run_file=run_file, ended=False, heartbeats=[beat()], unit={"active_state": "active"}
    )
    shown = status.status_screen({"tower": state(), "laptop": up}, "a")
    assert re.search(r"^tower +not needed ", shown, re.MULTILINE), shown
    assert "Transferred: to laptop by sync=auto" in shown
    down = {**up, "ended": True, "outcome": {"outcome": "stopped", "reason": "as asked"}}
    stopped = report.stopped({"tower": state(), "laptop": down}, "a", {})
    assert re.search(r"^tower +inactive +not needed ", stopped, re.MULTILINE), stopped
    attempt = {"outcome": "final", "step": 0, "reason": "faster", "transfer": {"host": "laptop"}}
    again = status.status_screen({"tower": state(), "laptop": {**up, "past_attempts": [attempt]}}, "a")
    assert "transferred to one host at step 0: faster" in again
    begins = report.begins({"run_id": "a", "action": "start", "file": run_file}, [state()])
    assert begins == "Starting the run a on laptop only (chosen by sync=auto)."


def test_a_start_that_went_well_shows_what_was_predicted_and_how_to_end_this_run() -> None:
    up = state(**stored(), ended=False, heartbeats=[beat()], prediction="a table\nof two lines")
    printed = report.started({"tower": up, "laptop": state()}, "a").splitlines()
    assert printed[:2] == ["a table", "of two lines"]
    assert printed[2].startswith("The run a trains on tower, laptop: step 3 of 20")
    assert printed[-1] == "End it: ansible-playbook stop.yml -e run_id=a"


def test_a_stop_without_a_name_does_not_choose_among_runs() -> None:
    def up(run_id: str) -> dict[str, Any]:
        return state(active_units=[f"nanofleet-{run_id}.service"])

    assert summary.several_active({"tower": up("a"), "laptop": up("a")}) == ""
    printed = summary.several_active({"tower": up("b"), "laptop": up("a")})
    assert printed.startswith("The active runs are b on tower; a on laptop. No run was stopped.")
    hosts = {"tower": state(), "laptop": state(**stored())}
    stopped = report.stopped(hosts, "a", {}, {"tower": "b", "laptop": "a"})
    assert "Also ended:  run b on tower, at once; nothing was saved." in stopped


def test_status_when_nothing_ever_ran() -> None:
    assert "No run was started" in status.status_screen({"tower": state(run_id="")})
    assert "No host that answers has a run b. Known runs: a" in status.status_screen(
        {"tower": state(runs=[{"run_id": "a", "time": 1}])}, "b"
    )


def test_who_asks_for_a_run_that_is_not_there_gets_the_nearest_and_ends_none() -> None:
    runs = [{"run_id": "c", "time": 2, "active": True}, {"run_id": "evening", "time": 1, "active": False}]
    there = {"tower": state(runs=runs, active_units=["nanofleet-c.service"])}
    assert status.status_screen(there, "cc") == (
        "No host that answers has a run cc. Did you mean c? Known runs: c (active), evening. "
        "Fix: repeat the command with one of them: -e run_id=NAME"
    )
    none = (
        "No host that answers has a run cc, and no other run was started on these hosts. "
        "Fix: start one: ansible-playbook train.yml"
    )
    assert status.status_screen({"tower": state()}, "cc") == none
    assert "Did you mean evening?" in status.status_screen(there, "evning")
    assert "Did you mean" not in status.status_screen(there, "xyz")


def test_the_run_shown_is_the_active_one_else_the_newest() -> None:
    old = state(**stored(), runs=[{"run_id": "a", "time": 1}])
    new = state(**stored(), runs=[{"run_id": "b", "time": 2}]) | {"run_id": "b"}
    assert summary.run_shown({"tower": old, "laptop": new}) == "b"
    assert summary.run_shown({"tower": old | {"active_units": ["nanofleet-a.service"]}, "laptop": new}) == "a"
    assert summary.run_shown({"tower": old, "laptop": new}, "c") == "c"


def test_status_shows_what_a_rank_warns_of() -> None:
    short = "The checkpoint of step 30 was not saved: it takes 1.400 GB."
    beats = [beat(warning=short)]
    up = {"tower": state(**stored(), ended=False, heartbeats=beats), "laptop": state(**stored(), ended=False)}
    assert f"Warning:     tower: {short}" in status.status_screen(up, "a")
    over = {"tower": state(**stored(), heartbeats=beats)}
    assert short not in status.status_screen(over, "a")


def test_a_host_that_its_peers_do_not_reach_and_we_do_points_at_the_way_between() -> None:
    diagnosis = (
        "Rank 1 (laptop) cannot be reached (its host does not answer at 10.0.0.2: down, asleep or cut off)"
    )
    up = {"tower": state(**stored(), ended=False, heartbeats=[beat(diagnosis=diagnosis)])}
    here = {**up, "laptop": state(**stored(), ended=False, heartbeats=[beat(rank=1)])}
    line = "Network:     laptop answers the controller, but not the other hosts of the run"
    assert line in status.status_screen(here, "a")
    assert "Network:" not in status.status_screen({**up, "laptop": {"unreachable": True}}, "a")
    lost = {
        "outcome": "retryable",
        "reason": "Lost rank 1 (laptop): it cannot be reached (its host does not)",
    }
    again = {name: state(**stored(), outcome=lost, ended=False) for name in ("tower", "laptop")}
    assert line in status.status_screen(again, "a")
    over = {name: state(**stored(), outcome=lost) for name in ("tower", "laptop")}
    assert "Network:" not in status.status_screen(over, "a")
    # What it answered before it was lost tells nothing, nor does a host that has just been started.
    since = {name: state(**stored(), outcome={**lost, "time": 101.0}, ended=False) for name in again}
    assert "Network:" not in status.status_screen(since, "a")
    since["laptop"]["outcome"] = {**lost, "time": 50.0}  # of an attempt before
    assert "Network:" not in status.status_screen(since, "a")
    back = {**again, "laptop": {**again["laptop"], "rebooted": 90.0}}
    assert "Network:" not in status.status_screen(back, "a")


def test_what_is_over_before_its_end_shows_how_to_resume() -> None:
    line = "Resume:      ansible-playbook train.yml -e run_id=a"
    stopped = {"tower": state(**stored(), outcome={"outcome": "stopped", "reason": "Stopped."})}
    assert line in status.status_screen(stopped, "a")
    done = {"tower": state(**stored(), outcome={"outcome": "finished", "reason": "Done."})}
    assert line not in status.status_screen(done, "a")
    assert line not in status.status_screen({"tower": state(**stored(), ended=False)}, "a")


def test_a_phase_that_lasts_shows_for_how_long_and_no_pace() -> None:
    for seconds, step_seconds, lasts in ((25.0, 1.5, True), (8.0, 1.5, False), (25.0, 9.0, False)):
        beats = [beat(phase="sync", entered=100.0, time=99.0 + seconds, step_seconds=step_seconds)]
        printed = status.status_screen({"tower": state(**stored(), ended=False, heartbeats=beats)}, "a")
        assert ("sync for 25 s" in printed) is lasts, printed
        assert ("Speed:" in printed) is not lasts, printed
    left = beat(phase="sync", entered=100.0, time=124.0, age=9000.0)
    assert "sync for" not in status.status_screen({"tower": state(**stored(), heartbeats=[left])}, "a")


def test_a_failed_start_names_the_host_and_shows_its_error() -> None:
    dead = state(**stored(), failed_unit=True, error=["ValueError: no rows"])
    slow = state(**stored(), ended=False, heartbeats=[beat(phase="load", loss=None)])
    printed = report.failure({"tower": slow, "laptop": dead}, "a")
    for part in (
        "ended on laptop",
        "no step was made on tower (in phase load)",
        "ValueError: no rows",
        "train.yml -e run_id=a",
    ):
        assert part in printed


def test_a_start_at_which_the_ranks_did_not_meet_shows_how_to_find_out_why() -> None:
    unmet = state(**stored(), failed_unit=True, error=["torch.distributed.DistStoreError: Timed out"])
    other = state(**stored(), failed_unit=True, error=["ValueError: no rows"])
    assert "why the hosts do not connect: ansible-playbook doctor.yml" in report.failure({"a": unmet}, "r")
    assert "doctor.yml" not in report.failure({"a": other}, "r")
    assert summary.not_met({"a": other, "b": unmet})
    assert not summary.not_met({"a": other, "b": {"unreachable": True}})


def test_a_start_that_somebody_stops_reports_it() -> None:
    ended = state(**stored(), stop_requested=True)
    printed = report.failure({"tower": ended, "laptop": ended}, "a")
    cause = "stop.yml has requested its end; its unit ended on tower,"
    assert printed.startswith(f"The cause: {cause}")


def test_a_benchmark_case_that_fails_after_its_first_step_is_not_reported_as_one_without_a_step() -> None:
    lost = {"outcome": "retryable", "reason": "Lost rank 1 (laptop)", "rank": 0}
    over = state(**stored(), stepped=True, outcome=lost)
    lines = report.failure({"tower": over}, "bench-exact-4096", "bench").splitlines()
    assert lines[0] == "The cause: its units ended after the first step."
    assert lines[1] == "  tower: Lost rank 1 (laptop)"
    assert lines[-1] == "Correct the cause, then repeat the command"
    late = state(**stored(), stepped=True, ended=False)
    printed = report.failure({"tower": late}, "bench-exact-4096", "bench")
    assert printed.startswith("The cause: it has made steps and is still active on tower.")


def test_what_a_stop_takes_is_reported_before() -> None:
    up = state(
        **stored(), ended=False, stepped=True, heartbeats=[beat()], checkpoint="checkpoints/step_000002"
    )
    printed = report.stop_expected({"tower": up, "laptop": up}, "a")
    assert "is at step 3 of 20 and ends after one more step (1.5 s) and one save" in printed
    lost = report.stop_expected({"tower": up, "laptop": {"unreachable": True}}, "a")
    assert (
        "Without laptop, which did not answer, that may fail: then the last checkpoint is that of step 2"
        in lost
    )
    for waiting in ({**up, "between": True}, {**up, "stepped": False}):
        assert "ends without saving" in report.stop_expected({"tower": waiting, "laptop": up}, "a")


def test_what_is_resumed_is_reported_with_its_step() -> None:
    made = plan({"depth": 2, "num_iterations": 100})
    hosts = " on " + ", ".join(HOSTS)
    assert report.begins(made, [state()]) == f"Starting the run {made['run_id']}{hosts}."
    again = {**made, "action": "resume"}
    kept = state(checkpoint="checkpoints/step_001200", checkpoint_time=900.0, time=1020.0)
    assert report.begins(again, [kept, state()]).endswith(
        f"Resuming the run {made['run_id']}{hosts} from its checkpoint of step 1,200, 2m00s old."
    )
    assert "from step 0: no checkpoint was saved yet" in report.begins(again, [state(), state()])


def test_expected_time_is_measured_where_a_like_run_exists() -> None:
    made = plan({"depth": 2, "num_iterations": 100})
    assert "rough" in report.expected(made, [state()], [1, 1])
    like = {"run_id": "old", "tok_per_s": 4096.0, "hosts": HOSTS, "config": made["file"]["config"]}
    assert "1.0 s a step, 1m40s for 100 steps (measured in old)" in report.expected(
        made, [state(runs=[like])], [1]
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0456, "46 ms"),
        (0.4, "0.4 s"),
        (1.75, "1.8 s"),
        (45, "45 s"),
        (154, "2m34s"),
        (11100, "3h05m"),
        (187200, "2d04h"),
    ],
)
def test_durations_in_words(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text


def test_an_evaluation_that_has_not_finished_names_each_cause() -> None:
    lost = {"outcome": "retryable", "reason": "Lost rank 1 (laptop)", "rank": 0}
    tower, laptop = state(**stored(), outcome=lost), state(**stored(), failed_unit=True)
    printed = report.evaluation_failure({"tower": tower, "laptop": laptop})
    assert printed.splitlines() == [
        "laptop: its unit ended without an outcome (failed).",
        "Outcome:     retryable: Lost rank 1 (laptop)",
    ]
    done = {"outcome": "finished", "reason": "Evaluated.", "rank": 0}
    printed = report.evaluation_failure({"tower": state(outcome=done), "laptop": {"unreachable": True}})
    assert printed == "laptop did not answer."


def test_the_host_with_the_newest_checkpoint_is_found() -> None:
    saved = {host: state(checkpoint=f"checkpoints/step_{step}") for host, step in
             {"tower": "999999", "laptop": "1000000", "attic": "1000000"}.items()}  # fmt: skip
    assert summary.summary({**saved, "cellar": {"unreachable": True}})["saved_on"] == "laptop"
    assert summary.summary({"tower": state(checkpoint=None)})["saved_on"] == ""


def test_hosts_that_know_nothing_of_the_active_elastic_run_are_found() -> None:
    elastic = {"run_id": "a", "time": 2.0, "active": True, "config": {"elastic": "true"}}
    up = state(run_id="a", found=True, active_units=["nanofleet-a.service"], runs=[elastic])
    new, left = state(runs=[]), state(runs=[{**elastic, "active": False}])
    found = summary.new_hosts({"tower": up, "laptop": left, "attic": new, "cellar": {"unreachable": True}})
    assert found == {"run_id": "a", "hosts": ["attic"]}
    nothing = {"run_id": "", "hosts": []}
    assert summary.new_hosts({"tower": left, "attic": new}) == nothing
    plain = {**up, "runs": [{**elastic, "config": {"elastic": "false"}}]}
    assert summary.new_hosts({"tower": plain, "attic": new}) == nothing
    tuned = {**up, "runs": [{**elastic, "config": {"elastic": "true", "stage": "sft"}}]}
    assert summary.new_hosts({"tower": tuned, "attic": new}) == nothing
    chosen = {**up, "run_file": {"chosen_from": ["tower", "attic"]}}
    assert summary.new_hosts({"tower": chosen, "attic": new}) == nothing
    other = state(run_id="b", found=True, active_units=["nanofleet-b.service"], runs=[])
    assert summary.new_hosts({"tower": up, "laptop": other, "attic": new}) == nothing
