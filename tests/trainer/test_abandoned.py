"""A process group that is given up while a collective waits for a rank that is alive."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import free_port

pytestmark = pytest.mark.processes

RANK = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from trainer.distributed.process_group import Collectives, Peer, PeerLost
from trainer.host.rank_env import RankEnv

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
peers = [Peer(each, f"host-{each}", "127.0.0.1") for each in range(2)]
group = Collectives.open(RankEnv(rank, 2, 0, 1, f"host-{rank}", "127.0.0.1", port), peers, store)
if rank:
    sys.stdin.read()  # alive, and it never sends
    sys.exit()


def threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


assert threads()
group.interruption = lambda: "The members change."
try:
    group.wait([group.start_broadcast(torch.ones(1000), 1)])
except PeerLost as error:
    assert "The members change." in str(error)
group.abandon()
began = time.monotonic()
while threads():
    time.sleep(0.05)
    assert time.monotonic() - began < 20, "threads of Gloo are left"
print("ended")
"""


def test_its_threads_end_although_the_other_rank_is_alive() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command, port = [sys.executable, "-c", RANK], str(free_port())
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[0].communicate(timeout=60)
        assert out == "ended\n", err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
