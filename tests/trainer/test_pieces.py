"""Collectives that are sent in pieces, in turns to each other's owner rank, have the same results."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import free_port

pytestmark = pytest.mark.processes

RANK = """
import sys
import torch
import torch.distributed as dist
from trainer.distributed import process_group
from trainer.distributed.process_group import Collectives, Peer
from trainer.host.rank_env import RankEnv

process_group.PIECE_BYTES = 28  # seven values
rank, ranks, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
peers = [Peer(each, f"host-{each}", "127.0.0.1") for each in range(ranks)]
group = Collectives(RankEnv(rank, ranks, 0, 1, f"host-{rank}", "127.0.0.1", port), peers)
group.connect(store)


def values(of, size, to=0):
    return torch.rand(size, generator=torch.Generator().manual_seed(100 * of + to))


# Rank r sends SIZES[r][t] values to rank t.
SIZES = [[0, 30, 4, 0], [9, 0, 0, 7], [0, 21, 0, 1], [2, 0, 0, 0]]
sizes = [line[:ranks] for line in SIZES[:ranks]]
sends, receives = sizes[rank], [line[rank] for line in sizes]
sent = torch.cat([values(rank, size, to) for to, size in enumerate(sends)])
wanted = torch.cat([values(of, size, rank) for of, size in enumerate(receives)])
for largest in (0, max(map(max, sizes)), 100):
    before = group.bytes_sent
    received, pending = group.start_exchange(sent, sends, receives, largest)
    group.wait([pending])
    assert torch.equal(received, wanted), largest
    assert group.bytes_sent - before == 4 * sum(sends)

lengths = {0: 20, ranks - 1: 33}
for dtype in (None, torch.bfloat16):
    parts = {owner: values(rank, size, owner) for owner, size in lengths.items()}
    group.wait([group.start_reduces(parts, dtype)])
    if rank in parts:
        total = values(rank, lengths[rank], rank)
        for other in range(ranks):
            if other != rank:
                total += values(other, lengths[rank], rank).to(dtype or torch.float32)
        assert torch.equal(parts[rank], total), "added in rank order"

parts = {owner: values(rank, size, owner) for owner, size in lengths.items()}
group.wait(group.start_broadcasts(parts).values())
assert all(torch.equal(part, values(owner, len(part), owner)) for owner, part in parts.items())

table, pending = group.start_all_gather(values(rank, 17))
group.wait([pending])
assert torch.equal(table, torch.stack([values(each, 17) for each in range(ranks)]))
group.close()
print("same")
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_give_the_results_of_whole_tensors(ranks: int) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(ranks), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert ["same" in each for each in printed] == [True] * ranks, printed
