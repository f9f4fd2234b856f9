"""Process groups that are given up while a rank is alive and waits for nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import free_port

pytestmark = pytest.mark.processes

RANK = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from trainer.distributed.process_group import Collectives, Peer, PeerLost
from trainer.host.rank_env import RankEnv

rank, ranks, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
peers = [Peer(each, f"host-{each}", "127.0.0.1") for each in range(ranks)]
group = Collectives(RankEnv(rank, ranks, 0, 1, f"host-{rank}", "127.0.0.1", port), peers)
if rank and os.environ.get("ENDS") == "as it connects":  # one that is lost then, and one that never sends
    dist.all_reduce = lambda tensor: sys.exit(os.kill(os.getpid(), signal.SIGKILL)) if rank == 2 else None
try:
    group.connect(store)
except PeerLost:
    assert os.environ.get("ENDS") == "as it connects"
store.set(str(rank), "connected")
if rank == 2:
    sys.exit(os.kill(os.getpid(), signal.SIGKILL))
if rank:
    sys.stdin.read()  # alive, and it never sends
    sys.exit()


def threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def connections():
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    connected = {int(line[9]) for line in lines if line[3] == "01"}
    to_store = {int(line[9]) for line in lines if f":{port:04X}" in line[1] + line[2]}
    return (connected - to_store) & sockets


def wait_until(holds, what):
    began = time.monotonic()
    while not holds():
        time.sleep(0.05)
        assert time.monotonic() - began < 20, what


sockets = set(group._sockets)
"""

UNANSWERED = """
assert threads()
group.interruption = lambda: "The members change."
try:
    group.wait([group.start_broadcast(torch.ones(1000), 1)])
except PeerLost as error:
    assert "The members change." in str(error)
group.abandon()
wait_until(lambda: not threads(), "threads of Gloo are left")
print("ended")
"""

FAILED = """
pending = group.start_broadcast(torch.ones(1000), 2)  # which keeps the handle, as a traceback does
try:
    group.wait([pending])
except PeerLost:
    pass
assert connections(), "to the rank that is alive"
group.abandon()
wait_until(lambda: not connections(), "connections are left")
print("ended")
"""


INCOMPLETE = """
assert threads()
assert sockets, "they are known, so that abandon can shut them down"
group.abandon()
wait_until(lambda: not (threads() or connections()), "threads or connections are left")
print("ended")
"""


def check(script: str, count: int, ends: str = "") -> None:
    """Run the script on rank 0, beside ranks that connect and then wait; the third one dies."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ENDS": ends}
    command, port = [sys.executable, "-c", RANK + script], str(free_port())
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), port],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        out, err = ranks[0].communicate(timeout=60)
        assert out == "ended\n", err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_its_threads_end_although_the_other_rank_is_alive() -> None:
    check(UNANSWERED, 2)


def test_its_connections_end_although_something_refers_to_a_collective_that_has_failed() -> None:
    check(FAILED, 3)


def test_its_threads_end_although_it_was_not_connected_completely() -> None:
    check(INCOMPLETE, 3, ends="as it connects")
