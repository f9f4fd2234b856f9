"""Ranks that are frozen, killed, slow, cut off or fail: what the others report, and how they end.

The watchdog's minute is 3 seconds here. Nothing else would end a wait before the collectives' time-out of ten
minutes, so that each of these ends proves its cause. The exact times are tested in test_watchdog.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Rank, Start, losses

from trainer.__main__ import main
from trainer.checkpoint import storage

STALL_SECONDS = 3.0
IMPATIENT = {"NANOFLEET_STALL_SECONDS": str(STALL_SECONDS)}
FOREVER = {"num_iterations": 100_000, "env": [IMPATIENT] * 2}
NONE = "none 0 0"
SOON = 90.0  # far below the time-out of the collectives, far above what a busy machine needs


def beat(rank: Rank, number: int = 0) -> dict[str, Any]:
    return dict(json.loads((rank.run_dir / f"heartbeat-{number}.json").read_text()))


def wait_for_diagnosis(rank: Rank, pattern: str, seconds: float = SOON) -> None:
    """Wait until the heartbeat of rank 0 has a diagnosis of that pattern."""
    began, sentences = time.monotonic(), []
    while not re.match(pattern, sentence := str(beat(rank)["diagnosis"])):
        sentences.append(sentence)
        assert time.monotonic() - began < seconds, set(sentences)
        time.sleep(0.05)


def last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def test_a_frozen_rank_is_named_then_given_up_and_the_run_goes_on_to_the_same_end(start: Start) -> None:
    settings = {"num_iterations": 150, "save_every": 20, "save_minutes": 0, "env": [IMPATIENT] * 2}
    ranks = start(2, **settings)
    ranks[0].reach_step(30)
    ranks[1].process.send_signal(signal.SIGSTOP)
    wait_for_diagnosis(
        ranks[0],
        r"rank 1 \(host-2\) is frozen \(its host takes the connection, the process does not answer\), "
        # The signal may arrive while a checkpoint is due.
        r"last seen in \w+( (of|after) step \d+)? \d+ s ago; "
        r"rank 0 \(host-1\) waits in (sync of|checkpoint after) step \d+",
    )
    code, printed = ranks[0].wait(SOON)
    assert code == 75, printed
    assert "Lost rank 1 (host-2): it is frozen" in last_line(printed)
    assert "is at process_group.py" in printed

    ranks[1].process.send_signal(signal.SIGCONT)
    code, printed = ranks[1].wait(SOON)
    assert code == 75, printed
    assert re.search(r"This process stood still for \d+ s", printed)

    again, undisturbed = start(2, **settings), start(2, name="undisturbed", **settings)
    for rank in [*again, *undisturbed]:
        code, printed = rank.wait()
        assert code == 0, printed
    assert losses(again[0].run_dir) == losses(undisturbed[0].run_dir)
    assert len(losses(again[0].run_dir)) == 150


def test_a_killed_rank_is_gone_and_another_attempt_makes_sense(start: Start) -> None:
    ranks = start(2, **FOREVER)
    ranks[0].reach_step(5)
    ranks[1].process.kill()
    code, printed = ranks[0].wait(SOON)
    assert code == 75, printed
    assert re.match(
        r"\[rank 0\] retryable: In sync of step \d+: Lost rank 1 \(host-2\): it is gone \(its host answers, "
        r"the process does not exist any more\)",
        last_line(printed),
    )
    ranks[1].wait()
    for rank in ranks:
        assert main(["again", "--run-dir", str(rank.run_dir)]) == 0


# On a busy machine a rank that computes gets less than the half of a core that is called slow.
@pytest.mark.parametrize(
    ("fault", "effort"),
    [
        ("burn", r"(?:it computes slowly: )?its thread uses \d+ %"),
        ("sleep", r"it does not compute: its thread uses \d+ %"),
    ],
)
def test_a_slow_rank_is_named_and_waited_for(start: Start, fault: str, effort: str) -> None:
    """Computing, or waiting for something; its stack is on rank 0's disk, and the run continues."""
    ranks = start(2, num_iterations=12, env=[IMPATIENT] * 2, faults=[NONE, f"{fault} 8 9"])
    ranks[0].reach_step(7)
    wait_for_diagnosis(
        ranks[0],
        r"rank 1 \(host-2\) has been in backward of step 8 for \d+ s "
        rf"\({effort} of a core\); rank 0 \(host-1\) waits in sync of step 8$",
    )
    stacks = (ranks[0].run_dir / "stacks-1.txt").read_text()
    assert "accumulate" in stacks
    assert "run status:" in stacks
    for rank in ranks:
        code, printed = rank.wait(60)
        assert code == 0, printed
        assert "Rank 1 (host-2) has been in backward of step 8" in printed  # each rank that lives reports it
        assert "rank 1 (host-2) is at faulty.py" in printed
    assert beat(ranks[0])["diagnosis"] is None


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_fault_of_one_rank_ends_all_with_its_cause(start: Start, culprit: int) -> None:
    """Rank 0 owns the store here: it stays until the others have heard."""
    faults = ["fail 5 0" if rank == culprit else NONE for rank in range(3)]
    ranks = start(3, num_iterations=100_000, faults=faults)
    ranks[0].reach_step(4)
    for number, rank in enumerate(ranks):
        code, printed = rank.wait(SOON)
        assert code == 1, printed
        outcome = rank.outcome()
        assert outcome["outcome"] == "final"
        assert "Unexpected KeyError" in outcome["reason"]
        assert outcome["reason"] in last_line(printed)
        named = f"rank {culprit} (host-{culprit + 1}): "
        assert outcome["reason"].startswith("Unexpected" if number == culprit else named)
        assert ("Traceback" in printed) == (number == culprit)
        assert main(["again", "--run-dir", str(rank.run_dir)]) == 1


def test_a_rank_that_was_asked_to_end_is_worth_a_retry_for_the_others(start: Start) -> None:
    """A reboot of its host, say; by itself it would not come back."""
    ranks = start(2, **FOREVER)
    ranks[0].reach_step(5)
    ranks[1].process.terminate()
    code, printed = ranks[0].wait(SOON)
    assert code == 75, printed
    assert "rank 1 (host-2): Asked to end by SIGTERM" in last_line(printed)
    assert ranks[1].wait(SOON)[0] == 128 + signal.SIGTERM
    assert main(["again", "--run-dir", str(ranks[1].run_dir)]) == 1


def test_a_loss_that_is_no_number_ends_all_ranks_with_step_and_remedy(start: Start) -> None:
    ranks = start(2, num_iterations=100_000, faults=[NONE, "diverge 4 0"])
    ranks[0].reach_step(3)
    for rank in ranks:
        code, printed = rank.wait(SOON)
        assert code == 1, printed
        assert "The loss of step 4 is nan: the run has diverged. The learning rates" in last_line(printed)
        assert "Start a new run with lower ones (matrix_lr is 0.8, embedding_lr is 10)" in last_line(printed)
        assert rank.outcome()["outcome"] == "final"


# -- a full disk -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """A disk of 4 MB as run-0, in a mount namespace; the command that enters it, its path from outside."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mount namespaces cannot be made here: that takes root")
    (tmp_path / "run-0").mkdir()
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}/run-0 && echo ready && exec sleep 600"
    holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    yield (
        ["nsenter", "--target", str(holder.pid), "--mount", "--"],
        Path(f"/proc/{holder.pid}/root{tmp_path}/run-0"),
    )
    holder.kill()
    holder.communicate()


def test_a_full_disk_is_reported_and_the_run_goes_on(
    start: Start, small_disk: tuple[list[str], Path]
) -> None:
    """An older checkpoint makes room; then there is none, and then there is again: nothing is lost."""
    enter, run_dir = small_disk
    settings = {"num_iterations": 100_000, "save_every": 20, "save_minutes": 0, "keep_checkpoints": 2}
    (rank,) = start(1, within=[enter], **settings)
    outside = Rank(rank.process, run_dir)

    def checkpoints() -> list[str]:
        return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))

    def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert rank.process.poll() is None, rank.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    until(lambda: len(checkpoints()) == 2)
    (run_dir / "ballast").write_bytes(bytes(shutil.disk_usage(run_dir).free))
    until(lambda: len(checkpoints()) == 1)
    newest = checkpoints()
    (run_dir / "more").touch()
    with open(run_dir / "more", "wb", buffering=0) as more, contextlib.suppress(OSError):
        while more.write(bytes(4096)):
            pass
    until(lambda: bool(beat(outside)["warning"]))
    full_at = beat(outside)["step"]
    until(lambda: beat(outside)["step"] > full_at + 20)
    assert shutil.disk_usage(run_dir).free < 4096
    assert checkpoints()[-1] >= newest[-1]
    assert storage.load(run_dir / "checkpoints" / checkpoints()[-1]).step > 0
    (run_dir / "ballast").unlink()
    (run_dir / "more").unlink()
    until(lambda: len(checkpoints()) == 2)
    until(lambda: beat(outside)["warning"] is None)
    (run_dir / "stop").touch()
    code, printed = rank.wait()
    assert code == 0, printed
    assert re.search(r"warning: The checkpoint of step \d+ was not saved", printed), printed
    steps = outside.outcome()["step"]
    assert len(losses(run_dir)) == steps > full_at
    assert checkpoints()[-1] == f"step_{steps:06d}"


# -- two hosts with a network between them -----------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces of their own, joined by a pair of interfaces; the command that enters each."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("network namespaces cannot be made here: that takes root")
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in range(2)]
    enter = [["nsenter", "--target", str(holder.pid), "--net", "--"] for holder in holders]
    mine = Path("/proc/self/ns/net").readlink()
    for holder in holders:
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == mine:
            time.sleep(0.01)

    def ip(host: int, command: str) -> None:
        subprocess.run([*enter[host], "ip", *command.split()], check=True)

    ip(0, f"link add cable type veth peer name cable netns {holders[1].pid}")
    for host in (0, 1):
        ip(host, f"address add 10.77.0.{host + 1}/24 dev cable")
        ip(host, "link set lo up")
        ip(host, "link set cable up")
    yield enter
    for holder in holders:
        holder.kill()
        holder.wait()


def test_a_host_that_is_cut_off_is_named_and_given_up(start: Start, hosts: list[list[str]]) -> None:
    """Packets from host-2 are dropped: for a moment, which nobody notices, then for good."""
    env = [{**IMPATIENT, "GLOO_SOCKET_IFNAME": "cable"}] * 2
    ranks = start(2, num_iterations=100_000, env=env, within=hosts, address="10.77.0.1")
    ranks[0].reach_step(5)
    drop = [*hosts[1], "ip", "route", "add", "blackhole", "10.77.0.1/32"]
    subprocess.run(drop, check=True)
    time.sleep(1)
    subprocess.run([*drop[:-3], "del", *drop[-2:]], check=True)
    ranks[0].reach_step(int(beat(ranks[0])["step"]) + 5)

    subprocess.run(drop, check=True)
    code, printed = ranks[0].wait(SOON)
    assert code == 75, printed
    assert (
        "Lost rank 1 (host-2): it cannot be reached (its host does not answer at 10.77.0.2: down, asleep or "
        "cut off)" in last_line(printed)
    )
    assert "Check that host-2 is running, awake and connected to the network." in last_line(printed)
    code, printed = ranks[1].wait(SOON)
    assert code == 75, printed
    assert "Lost rank 0 (host-1): it cannot be reached" in last_line(printed)


@pytest.mark.skipif(not shutil.which("iptables"), reason="iptables is not installed")
def test_large_packets_that_are_dropped_are_impaired_traffic_and_no_death(
    start: Start, hosts: list[list[str]]
) -> None:
    """Those of host-2 above 700 bytes; small ones, which open connections and carry a status, arrive."""
    env = [{**IMPATIENT, "GLOO_SOCKET_IFNAME": "cable"}] * 2
    ranks = start(2, num_iterations=100_000, env=env, within=hosts, address="10.77.0.1")
    ranks[0].reach_step(5)
    rule = ["OUTPUT", "-d", "10.77.0.1", "-p", "tcp", "-m", "length", "--length", "701:65535", "-j", "DROP"]
    subprocess.run([*hosts[1], "iptables", "-A", *rule], check=True)
    codes, printed = zip(*(rank.wait(SOON) for rank in ranks), strict=True)
    assert 75 in codes
    for text, peer in zip(printed, ("rank 1 (host-2)", "rank 0 (host-1)"), strict=True):
        assert f"raffic with {peer} is impaired" in text
        assert "packets of full size do not arrive" in text
        assert "`ansible-playbook doctor.yml` finds the fault" in text
        assert "is frozen" not in text
        assert "cannot be reached (its host" not in text
