"""What is said of ranks that do not go on, how they are asked, and what a host tells of itself."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.blame import UNKNOWN, Sighting, blame, lost
from trainer.contract import Record, check_layout
from trainer.host import heat
from trainer.host.heartbeat import Heartbeat
from trainer.host.listener import ANSWERS, FROZEN, GONE, UNREACHABLE, Listener, Told, ask
from trainer.host.place import Place
from trainer.host.voice import Voice
from trainer.host.watchdog import Blaming, Watchdog, stall_seconds
from trainer.host.wire import Wire, interface_of
from trainer.outcome import Attempt, Final
from trainer.sync.group import Peer

TOWER, LAPTOP, ATTIC = (
    Peer(0, "tower", "10.0.0.1"),
    Peer(1, "laptop", "10.0.0.2"),
    Peer(2, "attic", "10.0.0.3"),
)


def words(phase: str, seconds: float = 94, **others: Any) -> dict[str, Any]:
    return {"phase": phase, "step": 811, "stage": "step", "phase_seconds": seconds, "cpu": 0.98, **others}


WAITS = Sighting(TOWER, ANSWERS, words("sync", waits=True, interface="eno1", up=True, received=12_300))


@pytest.mark.parametrize(
    ("laptop", "sentence"),
    [
        (
            Sighting(LAPTOP, ANSWERS, words("backward")),
            "rank 1 (laptop) has been in backward of step 812 for 94 s (slow: 98 % of a core)",
        ),
        (
            Sighting(LAPTOP, ANSWERS, words("backward", cpu=0.9, throttled=True, temperature=97.0)),
            "rank 1 (laptop) has been in backward of step 812 for 94 s "
            "(slow: 90 % of a core, throttled, 97 °C)",
        ),
        (
            Sighting(LAPTOP, ANSWERS, words("data", cpu=0.0)),
            "rank 1 (laptop) has been in data of step 812 for 94 s (idle: 0 % of a core)",
        ),
        (
            Sighting(LAPTOP, ANSWERS, {**words("evaluate", 200, cpu=None), "stage": "evaluate"}),
            "rank 1 (laptop) has been in evaluate after step 811 for 200 s",
        ),
        (
            Sighting(LAPTOP, FROZEN, words("optimizer"), 94),
            "rank 1 (laptop) is frozen (its host takes the connection, the process does not answer), last "
            "seen in optimizer of step 812 94 s ago",
        ),
        (
            Sighting(LAPTOP, UNREACHABLE, words("forward"), 94),
            "rank 1 (laptop) cannot be reached (its host does not answer at 10.0.0.2: down, asleep or cut "
            "off), last seen in forward of step 812 94 s ago",
        ),
        (
            Sighting(LAPTOP, GONE),
            "rank 1 (laptop) is gone (its host answers, the process does not exist any more)",
        ),
        (Sighting(LAPTOP, UNKNOWN), "rank 1 (laptop) has not arrived"),
    ],
)
def test_who_is_waited_for_comes_first(laptop: Sighting, sentence: str) -> None:
    assert blame([WAITS, laptop]) == f"{sentence}; rank 0 (tower) waits in sync of step 812"


def test_ranks_that_all_wait_blame_the_network() -> None:
    down = Sighting(LAPTOP, ANSWERS, words("sync", 90, waits=True, interface="wlan0", up=False, received=0.0))
    assert blame([WAITS, down]) == (
        "all ranks have waited in sync of step 812 for 90 s: the network between them is slow, or was cut, "
        "and they go on within two minutes of its mending: 12 kB/s arrive at eno1 of rank 0 (tower), "
        "0 kB/s arrive at wlan0 of rank 1 (laptop) (its interface wlan0 is down)"
    )


def test_ranks_that_wait_in_different_steps_blame_the_network_too() -> None:
    """As after a cut: one has had the other's last packets, the other not its."""
    ahead = Sighting(LAPTOP, ANSWERS, {**words("sync", 95, waits=True), "step": 812})
    assert blame([WAITS, ahead]).startswith(
        "all ranks have waited in sync of step 812 and sync of step 813 for 94 s: the network"
    )


def test_what_was_lost_comes_with_where_to_look() -> None:
    assert lost([WAITS], "Timed out.") == "Timed out."
    gone, asleep = Sighting(LAPTOP, GONE), Sighting(ATTIC, UNREACHABLE)
    assert lost([WAITS, gone], "").endswith("none there: it was killed, by hand or for want of memory.")
    assert lost([WAITS, asleep], "").startswith("Lost rank 2 (attic): it cannot be reached")
    slept = lost([WAITS, gone], "", stood_still=177.2)
    assert slept.startswith("This process itself had stood still for 177 s; meanwhile: Lost rank 1 (laptop)")
    both = lost([gone, asleep], "")
    assert "rank 1 (laptop): it is gone" in both
    assert both.endswith("Look whether laptop, attic is stopped, suspended or starved of memory.")


def test_frozen_gone_and_another_program_are_told_apart() -> None:
    """Loopback; a host that does not answer is asked in test_faults.py, across network namespaces."""
    listener = Listener("127.0.0.1", lambda stacks: {"phase": "sync", "stacks": "..." if stacks else ""})
    told = Told.parse(str(listener.told))
    assert told == listener.told
    assert ask(told) == (ANSWERS, {"phase": "sync", "stacks": ""})
    assert ask(told, stacks=True).said["stacks"] == "..."
    assert ask(told._replace(secret="0" * 16)).how == GONE
    with socket.create_connection(told[:2]) as nonsense:  # does not keep the next one from an answer
        nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n\n")
    assert ask(told).how == ANSWERS
    listener.close()
    assert ask(told).how == GONE

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        began = time.monotonic()
        assert ask(Told("127.0.0.1", silent.getsockname()[1], ""), seconds=0.3).how == FROZEN
        assert time.monotonic() - began < 2
    assert Told.parse("") is None


def test_a_rank_is_given_up_when_it_stays_dead() -> None:
    blaming = Blaming(stall=0.2)
    assert blaming.is_due
    assert blaming.wants_to_say({1: FROZEN}, 60)
    assert not blaming.is_due
    assert not blaming.is_over({1: FROZEN})
    assert not blaming.wants_to_say({1: FROZEN}, 70)
    assert blaming.wants_to_say({}, 80)  # it is back
    assert blaming.wants_to_say({1: FROZEN}, 90)
    assert not blaming.is_over({1: FROZEN})
    assert blaming.wants_to_say({1: FROZEN}, 180)  # twice as late
    time.sleep(0.25)
    assert blaming.is_over({1: FROZEN})


def test_late_is_a_minute_or_five_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOFLEET_STALL_SECONDS", raising=False)
    heartbeat = Heartbeat(tmp_path, Place(), "run")
    watchdog = Watchdog(heartbeat, Place(), tmp_path, Attempt(tmp_path, Place()), Voice(Place()))
    heartbeat.enter("forward")
    assert watchdog.limit() == 60
    heartbeat.state(step=5, step_seconds=30.0)
    assert watchdog.limit() == 150
    watchdog.evaluation_steps = 16
    heartbeat.enter("evaluate")
    assert watchdog.limit() == 480
    monkeypatch.setenv("NANOFLEET_STALL_SECONDS", "soon")
    with pytest.raises(ValueError, match="it takes seconds, above 0"):
        stall_seconds()


def test_a_rank_that_stood_still_says_so_until_it_has_come_further(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, Place(), "run")
    watchdog = Watchdog(heartbeat, Place(), tmp_path, Attempt(tmp_path, Place()), Voice(Place()))
    heartbeat.enter("backward")
    watchdog._stood_still = heartbeat.stage._replace(seconds=177.0)
    heartbeat.enter("sync")
    assert str(watchdog._lost([Sighting(LAPTOP, GONE)], "")).startswith("This process itself had stood still")
    heartbeat.state(step=1)
    assert str(watchdog._lost([Sighting(LAPTOP, GONE)], "")).startswith("Lost rank 1 (laptop)")


def test_a_stage_begins_with_its_step_and_the_file_beats_on(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, Place(), "run")
    heartbeat.enter("data")
    heartbeat.state(blame="rank 1 (laptop) ...")
    time.sleep(0.05)
    heartbeat.enter("forward")
    assert heartbeat.stage.name == "step"
    assert heartbeat.stage.seconds >= 0.05
    heartbeat.state(step=1)
    assert heartbeat.stage.seconds < 0.05
    path = tmp_path / "heartbeat-0.json"
    before = json.loads(path.read_text())
    assert before["blame"] is None  # it was the step's before
    heartbeat.start(every_seconds=0.02)
    time.sleep(0.2)
    heartbeat.stop()
    after = json.loads(path.read_text())
    assert after["time"] > before["time"]
    assert after["phase"] == "forward"


def test_heat_where_linux_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of files as under /sys: no test can heat a CPU."""
    monkeypatch.setattr(heat, "THERMAL", tmp_path / "thermal")
    monkeypatch.setattr(heat, "CPU", tmp_path / "cpu")
    assert heat.Heat().look() == {"temperature": None, "throttled": None}
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
    looks = heat.Heat()
    assert looks.look() == {"temperature": 71.0, "throttled": False}
    count.write_text("9\n")
    assert looks.look()["throttled"] is True
    assert looks.look()["throttled"] is False
    frequency = tmp_path / "cpu/cpu0/cpufreq"
    frequency.mkdir()
    (frequency / "cpuinfo_max_freq").write_text("4000000\n")
    (frequency / "scaling_max_freq").write_text("1200000\n")
    assert looks.look()["throttled"] is True


def test_the_wire_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert Wire("127.0.0.1").look()["up"] is True
    assert Wire("192.0.2.77").look() == {"interface": "", "up": None, "received": None}


def test_ranks_elsewhere_than_the_run_file_says_are_refused() -> None:
    def records(*hosts: str) -> list[Record]:
        return [Record(rank, host, "", {"hosts": "tower laptop"}, {}) for rank, host in enumerate(hosts)]

    check_layout(records("tower", "tower", "laptop"))
    with pytest.raises(
        Final, match=r"names tower, laptop, and there are rank 0 \(laptop\), rank 1 \(tower\)"
    ):
        check_layout(records("laptop", "tower"))
