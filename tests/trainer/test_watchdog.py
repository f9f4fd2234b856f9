"""What is reported of ranks that make no progress, how they are asked, and what a host reports of itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.distributed.consistency import Record, check_layout
from trainer.distributed.process_group import Peer, PeerLost
from trainer.health import sensors
from trainer.health.attempt import Attempt
from trainer.health.delay import DelayReport, stall_seconds
from trainer.health.diagnosis import EndpointResult, Freshness, Verdict
from trainer.health.report import RankEvidence, describe_delay, describe_loss
from trainer.health.run_status import RunStatus
from trainer.health.status_record import RunStatusRecord
from trainer.health.watchdog import Watchdog
from trainer.host.logger import RunLogger
from trainer.host.network_interface import NetworkInterface, interface_of
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final

TOWER, LAPTOP, ATTIC = (
    Peer(0, "tower", "10.0.0.1"),
    Peer(1, "laptop", "10.0.0.2"),
    Peer(2, "attic", "10.0.0.3"),
)


def status(phase: str, seconds: float = 94, **others: Any) -> RunStatusRecord:
    return RunStatusRecord(
        phase=phase, phase_seconds=seconds, **{"step": 811, "stage": "step", "cpu": 0.98, **others}
    )


def answering(peer: Peer, state: RunStatusRecord) -> RankEvidence:
    return RankEvidence(peer, EndpointResult.ANSWERS, Freshness.FRESH, state)


WAITS = answering(TOWER, status("sync", waits=True, interface="eno1", up=True, received=12_300))


@pytest.mark.parametrize(
    ("laptop", "sentence"),
    [
        (
            answering(LAPTOP, status("backward")),
            "rank 1 (laptop) has been in backward of step 812 for 94 s "
            "(it computes slowly: its thread uses 98 % of a core)",
        ),
        (
            answering(LAPTOP, status("backward", cpu=0.9, throttled=True, temperature=97.0)),
            "rank 1 (laptop) has been in backward of step 812 for 94 s "
            "(it computes slowly: its thread uses 90 % of a core, throttled, 97 °C)",
        ),
        (
            answering(LAPTOP, status("data", cpu=0.0)),
            "rank 1 (laptop) has been in data of step 812 for 94 s "
            "(it does not compute: its thread uses 0 % of a core)",
        ),
        (
            answering(LAPTOP, status("evaluate", 200, cpu=None, stage="evaluate")),
            "rank 1 (laptop) has been in evaluate after step 811 for 200 s",
        ),
        (
            RankEvidence(LAPTOP, EndpointResult.SILENT, Freshness.STALE, status("optimizer"), 94),
            "rank 1 (laptop) is frozen (its host takes the connection, the process does not answer), last "
            "seen in optimizer of step 812 94 s ago",
        ),
        (
            RankEvidence(LAPTOP, EndpointResult.UNREACHABLE, Freshness.STALE, status("forward"), 94),
            "rank 1 (laptop) cannot be reached (its host does not answer at 10.0.0.2: down, asleep or cut "
            "off), last seen in forward of step 812 94 s ago",
        ),
        (
            RankEvidence(LAPTOP, EndpointResult.REFUSES),
            "rank 1 (laptop) is gone (its host answers, the process does not exist any more)",
        ),
        (
            RankEvidence(LAPTOP, EndpointResult.UNKNOWN),
            "rank 1 (laptop) has not connected to the rendezvous store (`ansible-playbook status.yml` shows "
            "whether it runs)",
        ),
    ],
)
def test_who_is_waited_for_comes_first(laptop: RankEvidence, sentence: str) -> None:
    assert describe_delay([WAITS, laptop]) == f"{sentence}; rank 0 (tower) waits in sync of step 812"


def test_ranks_that_all_wait_name_the_network() -> None:
    down = answering(LAPTOP, status("sync", 90, waits=True, interface="wlan0", up=False, received=0.0))
    assert describe_delay([WAITS, down]) == (
        "all ranks have waited in sync of step 812 for 90 s: the network between them is slow or "
        "interrupted; the run continues within two minutes after it is fixed "
        "(`ansible-playbook doctor.yml` finds the fault): "
        "12 kB/s arrive at eno1 of rank 0 (tower), "
        "0 kB/s arrive at wlan0 of rank 1 (laptop) (its interface wlan0 is down)"
    )


def test_ranks_that_wait_in_different_steps_name_the_network_too() -> None:
    """As after a cut: one has had the other's last packets, the other not its."""
    ahead = answering(LAPTOP, status("sync", 95, waits=True, step=812))
    assert describe_delay([WAITS, ahead]).startswith(
        "all ranks have waited in sync of step 812 and sync of step 813 for 94 s: the network"
    )


def test_what_was_lost_comes_with_where_to_look() -> None:
    assert describe_loss([WAITS], "Timed out.") == "Timed out."
    gone, asleep = (
        RankEvidence(LAPTOP, EndpointResult.REFUSES),
        RankEvidence(ATTIC, EndpointResult.UNREACHABLE),
    )
    assert describe_loss([WAITS, gone], "").endswith(
        "by the kernel because memory ran out (to check, on that host: sudo dmesg | grep -i oom)."
    )
    assert describe_loss([WAITS, asleep], "").startswith("Lost rank 2 (attic): it cannot be reached")
    slept = describe_loss([WAITS, gone], "", stood_still=177.2)
    assert slept.startswith("This process stood still for 177 s; meanwhile: Lost rank 1 (laptop)")
    both = describe_loss([gone, asleep], "")
    assert "rank 1 (laptop): it is gone" in both
    assert both.endswith("Check whether laptop, attic is stopped, suspended or out of memory.")


class Clock:
    """A monotonic clock that stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_rank_is_given_up_when_it_stays_dead() -> None:
    clock = Clock()
    delay = DelayReport(60.0, clock)
    frozen = {1: Verdict.FROZEN}
    assert delay.is_due
    assert delay.should_report(frozen, 60)
    assert not delay.is_due
    clock.now += 10
    assert delay.is_due
    assert not delay.should_report(frozen, 70)
    assert delay.should_report({}, 80)  # it is back
    assert delay.should_report(frozen, 90)
    assert delay.should_report(frozen, 180)  # twice as late
    clock.now += 59
    assert not delay.is_over
    clock.now += 1
    assert delay.is_over


@pytest.mark.parametrize(
    ("verdict", "seconds"), [(Verdict.GONE, 10), (Verdict.UNREACHABLE, 60), (Verdict.IMPAIRED, 300)]
)
def test_each_verdict_ends_a_run_in_its_time(verdict: Verdict, seconds: float) -> None:
    clock = Clock()
    delay = DelayReport(60.0, clock)
    delay.should_report({1: verdict}, 60)
    clock.now += seconds - 1
    delay.should_report({1: verdict}, 60)
    assert not delay.is_over
    clock.now += 1
    assert delay.is_over


def test_a_verdict_that_changes_begins_anew_but_not_for_ever() -> None:
    clock = Clock()
    delay = DelayReport(60.0, clock)
    for verdict in [Verdict.IMPAIRED, Verdict.FROZEN] * 3:
        delay.should_report({1: verdict}, 60)
        assert not delay.is_over
        clock.now += 50
    assert delay.is_over


def test_late_is_a_minute_or_five_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOFLEET_STALL_SECONDS", raising=False)
    run_status = RunStatus(tmp_path, RankEnv(), "run")
    watchdog = Watchdog(run_status, RankEnv(), tmp_path, Attempt(tmp_path, RankEnv()), RunLogger(RankEnv()))
    run_status.enter("forward")
    assert watchdog.limit() == 60
    run_status.update(step=5, step_seconds=30.0)
    assert watchdog.limit() == 150
    watchdog.evaluation_steps = 16
    run_status.enter("evaluate")
    assert watchdog.limit() == 480
    for text in ("soon", "nan", "inf", "0", "-1"):
        monkeypatch.setenv("NANOFLEET_STALL_SECONDS", text)
        with pytest.raises(ValueError, match="it takes seconds, above 0"):
            stall_seconds()


def test_a_rank_that_stood_still_reports_it_until_it_has_come_further(tmp_path: Path) -> None:
    run_status = RunStatus(tmp_path, RankEnv(), "run")
    watchdog = Watchdog(run_status, RankEnv(), tmp_path, Attempt(tmp_path, RankEnv()), RunLogger(RankEnv()))
    run_status.enter("backward")
    watchdog._stood_still = run_status.stage._replace(seconds=177.0)
    run_status.enter("sync")
    assert str(watchdog._end_by_loss([RankEvidence(LAPTOP, EndpointResult.REFUSES)], "")).startswith(
        "This process stood still"
    )
    run_status.update(step=1)
    assert str(watchdog._end_by_loss([RankEvidence(LAPTOP, EndpointResult.REFUSES)], "")).startswith(
        "Lost rank 1 (laptop)"
    )


def test_a_stage_begins_with_its_step_and_the_file_beats_on(tmp_path: Path) -> None:
    clock = Clock()
    run_status = RunStatus(tmp_path, RankEnv(), "run", clock)
    run_status.enter("data")
    run_status.update(diagnosis="rank 1 (laptop) ...")
    clock.now += 7
    run_status.enter("forward")
    assert run_status.stage == ("step", 0, 7.0)
    run_status.update(step=1)
    assert run_status.stage == ("step", 1, 0.0)
    path = tmp_path / "heartbeat-0.json"
    before = json.loads(path.read_text())
    assert before["diagnosis"] is None  # it was the step's before
    run_status.start(every_seconds=0.001)
    deadline = time.monotonic() + 60
    while (after := json.loads(path.read_text()))["time"] == before["time"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    run_status.stop()
    assert after["phase"] == "forward"


def test_optimizer_steps_and_waits_during_backward_are_not_time_of_backward(tmp_path: Path) -> None:
    clock = Clock()
    run_status = RunStatus(tmp_path, RankEnv(), "run", clock)
    run_status.enter("backward")
    clock.now += 1
    with run_status.during("optimizer"):
        clock.now += 10
        with run_status.waiting():
            clock.now += 100
        clock.now += 20
    clock.now += 2
    assert run_status.seconds_in("forward", "backward") == 3
    assert run_status.lap() == {"backward": 3, "optimizer": 30, "sync": 100}


def test_a_wait_between_computations_is_time_of_sync(tmp_path: Path) -> None:
    clock = Clock()
    run_status = RunStatus(tmp_path, RankEnv(), "run", clock)
    run_status.enter("optimizer")
    for computing, waiting in ((1, 10), (2, 20)):
        clock.now += computing
        with run_status.waiting():
            assert run_status.phase == "sync"
            clock.now += waiting
    clock.now += 4
    run_status.enter("sync")
    with run_status.waiting():
        clock.now += 100
    assert run_status.record().phase_seconds == 100
    run_status.enter("evaluate")
    with run_status.waiting():
        clock.now += 1000
    assert run_status.stage == ("evaluate", 0, 1000.0)
    assert run_status.lap() == {"optimizer": 7, "sync": 130, "evaluate": 1000}
    run_status.enter("optimizer")
    with pytest.raises(PeerLost), run_status.waiting():
        raise PeerLost("Lost rank 1 (laptop).")
    assert run_status.record().position == "sync of step 1"


def test_heat_where_linux_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of files as under /sys: no test can heat a CPU."""
    monkeypatch.setattr(sensors, "THERMAL", tmp_path / "thermal")
    monkeypatch.setattr(sensors, "CPU", tmp_path / "cpu")
    assert sensors.Sensors().read() == {"temperature": None, "throttled": None}
    for zone, kind, value in [
        (0, "x86_pkg_temp", "71000"),
        (1, "iwlwifi_1", "99000"),
        (2, "cpu-thermal", "?"),
    ]:
        folder = tmp_path / f"thermal/thermal_zone{zone}"
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "temp").write_text(f"{value}\n")
    count = tmp_path / "cpu/cpu0/thermal_throttle/core_throttle_count"
    count.parent.mkdir(parents=True)
    count.write_text("7\n")
    looks = sensors.Sensors()
    assert looks.read() == {"temperature": 71.0, "throttled": False}
    count.write_text("9\n")
    assert looks.read()["throttled"] is True
    assert looks.read()["throttled"] is False
    frequency = tmp_path / "cpu/cpu0/cpufreq"
    frequency.mkdir()
    (frequency / "cpuinfo_max_freq").write_text("4000000\n")
    (frequency / "scaling_max_freq").write_text("1200000\n")
    assert looks.read()["throttled"] is True


def test_the_wire_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert NetworkInterface("127.0.0.1").read()["up"] is True
    assert NetworkInterface("192.0.2.77").read() == {"interface": "", "up": None, "received": None}


def test_ranks_on_other_hosts_than_in_the_run_file_are_refused() -> None:
    def records(*hosts: str) -> list[Record]:
        return [Record(rank, host, "", {"hosts": "tower laptop"}, {}) for rank, host in enumerate(hosts)]

    check_layout(records("tower", "tower", "laptop"))
    with pytest.raises(Final, match=r"has tower, laptop; the ranks are rank 0 \(laptop\), rank 1 \(tower\)"):
        check_layout(records("laptop", "tower"))
