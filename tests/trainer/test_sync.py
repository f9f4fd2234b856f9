"""Gradients between ranks: the curve does not depend on how many there are, and all hold the same bytes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import OLD_CPU, RATES, TINY, Start, free_port, losses, train_here
from counted_bytes import predicted_bytes
from torch import nn

from trainer.config import RunConfig
from trainer.data.dataset import Dataset
from trainer.data.loader import active_rows, batch_rows
from trainer.distributed.consistency import Record, check_consistency, compare, explain
from trainer.distributed.digest import ParameterCheck
from trainer.distributed.process_group import (
    PIECE_BYTES,
    Collectives,
    Peer,
    PeerLost,
    Pending,
    broadcast_sends,
)
from trainer.distributed.rendezvous import join_store
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import build_optimizer
from trainer.outcome import Final, Retryable
from trainer.sync.buckets import assign_owners
from trainer.sync.exact import LAYERS_BEHIND
from trainer.sync.modes import make_sync


@pytest.mark.parametrize("sync", ["dense", "exact"])
def test_float64_curve_is_that_of_one_rank(sync: str, start: Start, data_dir: Path, tmp_path: Path) -> None:
    """1, 2 and 3 ranks, 5 rows a step: 5, 1+4 and 2+2+1. Digests are compared after every step."""
    settings = {"dtype": "float64", "num_iterations": 20, "sync": sync}
    runs = [start(2, name="of2", shares="1,4", **settings), start(3, name="of3", **settings)]
    train_here(data_dir, tmp_path / "alone", **settings | {"sync": "dense"})
    alone = losses(tmp_path / "alone")
    assert len(alone) == 20
    assert alone[-1] < alone[0] - 0.5
    for ranks in runs:
        for rank in ranks:
            code, printed = rank.wait()
            assert code == 0, printed
        assert losses(ranks[0].run_dir) == pytest.approx(alone, rel=1e-10)
        shares = [1, 4] if len(ranks) == 2 else [2, 2, 1]
        check_predicted(sync, ranks[0].run_dir, data_dir, shares, size=8)
        bpb = json.loads((tmp_path / "alone" / "outcome.json").read_text())["val_bpb"]
        assert ranks[0].outcome()["val_bpb"] == pytest.approx(bpb, rel=1e-9)


@pytest.mark.parametrize("sync", ["dense", "exact"])
def test_float32_curve_with_an_old_cpu_among_the_ranks(
    sync: str, start: Start, data_dir: Path, tmp_path: Path
) -> None:
    """Ranks stay bitwise equal though one computes with AVX2, and near to one alone; so do three, unequal."""
    usual = {"num_iterations": 20, "unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02}
    usual |= {"sync": sync}
    pair = start(2, env=[{}, OLD_CPU], **usual)
    three = start(3, name="three", shares="1,3,1", **usual)
    train_here(data_dir, tmp_path / "alone", **usual)
    alone = losses(tmp_path / "alone")
    for ranks in (pair, three):
        for rank in ranks:
            code, printed = rank.wait()
            assert code == 0, printed
        assert losses(ranks[0].run_dir)[:5] == pytest.approx(alone[:5], rel=1e-6)
        assert losses(ranks[0].run_dir) == pytest.approx(alone, rel=1e-3)
    step = json.loads((pair[0].run_dir / "metrics.jsonl").read_text().splitlines()[1])
    model = GPT(GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16))
    gradient_bytes = 4 * model.param_counts()["total"]
    least, most = {"dense": (1.0, 1.3), "exact": (0.6, 0.9)}[sync]
    assert least * gradient_bytes < step["bytes_sent"] < most * gradient_bytes


def test_fast_ranks_stay_bitwise_equal_and_near_the_curve(
    start: Start, data_dir: Path, tmp_path: Path
) -> None:
    """Rounded on the wire, an old CPU and uneven shares among the ranks; digests after every step."""
    usual = {"num_iterations": 20, "unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02}
    pair = start(2, env=[{}, OLD_CPU], sync="fast", **usual)
    three = start(3, name="three", shares="1,3,1", sync="fast", **usual)
    train_here(data_dir, tmp_path / "alone", **usual)
    alone = losses(tmp_path / "alone")
    for ranks in (pair, three):
        for rank in ranks:
            code, printed = rank.wait()
            assert code == 0, printed
        assert losses(ranks[0].run_dir) == pytest.approx(alone, rel=1e-2)
        shares = [3, 2] if len(ranks) == 2 else [1, 3, 1]
        check_predicted("fast", ranks[0].run_dir, data_dir, shares)
        assert losses(ranks[0].run_dir) != pytest.approx(alone, rel=1e-7)
    step = json.loads((pair[0].run_dir / "metrics.jsonl").read_text().splitlines()[1])
    model = GPT(GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16))
    gradient_bytes = 4 * model.param_counts()["total"]
    assert step["bytes_sent"] < 0.65 * gradient_bytes


def check_predicted(mode: str, run_dir: Path, data_dir: Path, shares: Sequence[int], size: int = 4) -> None:
    """Each step of a run, of numbers of `size` bytes, sent what was predicted, and the words beside it."""
    world_size = len(shares)
    data = Dataset.open(data_dir, TINY["sequence_len"])
    model = GPTConfig.from_depth(2, data.info.vocab_size, 32, aspect_ratio=16, head_dim=16)
    with torch.device("meta"):
        built = GPT(model)
        words = 8 * len(list(built.parameters())) * (world_size - 1)  # digests
    if mode != "dense":  # before a digest, the rows of each owner rank are sent to all
        tables = [module.weight for module in built.modules() if isinstance(module, nn.Embedding)]
        for owner in range(world_size):
            owned = 64 * len(range(owner, len(tables[0]) // 64, world_size))
            copies = broadcast_sends(-owner % world_size, world_size)
            words += copies * owned * sum(table.size(1) for table in tables) * size
    # Seven words for all, each rank's seconds, rows and next batch: see StepSync.
    words += round(2 * (world_size - 1) / world_size * 8 * (7 + 3 * world_size))
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            rows = batch_rows(RunConfig().seed, line["step"] - 1, 5, len(data.train))
            by_rank = [torch.from_numpy(ids) for ids in active_rows(data.train[rows], shares)]
            predicted = predicted_bytes(mode, model, world_size, by_rank=by_rank)
            if mode != "fast":
                predicted *= size // 4
            assert line["bytes_sent"] - words == pytest.approx(predicted, abs=16)


@pytest.mark.parametrize("mode", ["dense", "exact", "fast"])
def test_one_rank_steps_as_the_optimizer_alone_does(mode: str) -> None:
    """Flat buffers and views change no bit."""
    torch.manual_seed(1)
    config = GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16)
    plain, synced = GPT(config), GPT(config)
    plain.init_weights()
    synced.load_state_dict(plain.state_dict())
    optimizer, other = build_optimizer(plain, **RATES), build_optimizer(synced, **RATES)
    sync = make_sync(mode, Collectives(RankEnv(), []), synced, other)
    idx = torch.randint(300, (2, 33))
    for _ in range(3):
        plain.zero_grad()
        plain(idx[:, :-1], idx[:, 1:], loss_reduction="sum").backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= 64
        optimizer.step()
        sync.begin_step(idx.unique())
        with sync.last_backward(64):
            synced(idx[:, :-1], idx[:, 1:], loss_reduction="sum").backward()
        sync.reduce_gradients(64)
        sync.step()
        sync.broadcast()
    for (name, one), two in zip(plain.named_parameters(), synced.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_layers_are_stepped_while_backward_continues(mode: str) -> None:
    """All but the last ones of backward: the sums of these have not arrived yet."""
    model = GPT(GPTConfig.from_depth(6, 300, sequence_len=32))
    model.init_weights()
    sync = make_sync(mode, Collectives(RankEnv(), []), model, build_optimizer(model, **RATES))
    steps: list[int] = []

    def optimizing() -> AbstractContextManager[None]:
        steps.append(1)
        return nullcontext()

    sync.optimizing = optimizing
    idx = torch.randint(300, (2, 33))
    sync.begin_step(idx.unique())
    first, last = (model.transformer.h[i].mlp.c_fc.weight for i in (0, 5))
    before = first.detach().clone(), last.detach().clone()
    with sync.last_backward(64):
        model(idx[:, :-1], idx[:, 1:], loss_reduction="sum").backward()
    assert len(steps) == 1 + 6 - LAYERS_BEHIND
    assert torch.equal(first, before[0])
    sync.reduce_gradients(64)
    sync.step()
    sync.broadcast()
    assert not torch.equal(first, before[0])
    assert not torch.equal(last, before[1])


def test_work_is_shared_out_by_cost() -> None:
    assert assign_owners([1.0, 8.0, 4.0, 4.0], 2) == [0, 0, 1, 1]
    assert assign_owners([1.0] * 5, 1) == [0] * 5
    assert set(assign_owners([3.0, 2.0], 3)) == {0, 1}


def test_broadcast_sends_one_copy_to_everyone() -> None:
    for world_size in range(1, 9):
        assert sum(broadcast_sends(rank, world_size) for rank in range(world_size)) == world_size - 1
    assert [broadcast_sends(rank, 4) for rank in range(4)] == [2, 1, 0, 0]


class LaunchGroup(Collectives):
    """Rank 0 of two, which records the bytes of each tensor that it would send; nothing is sent."""

    def __init__(self) -> None:
        super().__init__(RankEnv(rank=0, world_size=2), [])
        self.launched: list[int] = []

    def _launch(self, start: Callable[[torch.Tensor], Any], parts: Iterable[torch.Tensor]) -> Pending:
        self.launched += [part.numel() * part.element_size() for part in parts]
        return lambda: None


def test_large_tensors_are_sent_in_pieces_so_that_both_directions_are_in_use() -> None:
    """Gloo would send whole tensors of two ranks one after the other."""
    parts = {0: torch.zeros(2 * PIECE_BYTES // 4), 1: torch.zeros(3 * PIECE_BYTES // 4)}
    group = LaunchGroup()
    group.start_reduces(parts)
    assert group.launched == [PIECE_BYTES] * 3, "pieces to and from the other rank in one all-to-all"
    group = LaunchGroup()
    group.start_broadcasts(parts)
    assert group.launched == [PIECE_BYTES] * 5
    size = 3 * PIECE_BYTES // 4
    for largest, expected in ((size, [PIECE_BYTES] * 3), (0, [3 * PIECE_BYTES])):
        group = LaunchGroup()
        group.start_exchange(parts[1], [0, size], [0, size], largest)
        assert group.launched == expected


class OddGroup(Collectives):
    """Ranks of another number in `groups` hold other bytes, in the parameters from `first` on."""

    def __init__(self, groups: list[int], first: int) -> None:
        n = len(groups)
        super().__init__(RankEnv(world_size=n), [Peer(rank, f"host-{rank + 1}", "") for rank in range(n)])
        self.groups, self.first = groups, first

    def gather_int64(self, values: torch.Tensor) -> torch.Tensor:
        table = values.repeat(len(self.groups), 1)
        table[:, self.first :] += torch.tensor(self.groups)[:, None]
        return table


def what_differs(groups: list[int], model: GPT, run_dir: Path) -> str:
    """What the ranks say when those of each group hold the same."""
    with pytest.raises(Final) as caught:
        ParameterCheck(OddGroup(groups, 3), model, run_dir)(50)
    return str(caught.value)


def test_a_rank_that_differs_from_most_is_named_with_the_parameter(tmp_path: Path) -> None:
    model = GPT(GPTConfig.from_depth(1, 300, 32, aspect_ratio=32, head_dim=32))
    model.init_weights()
    names = [name for name, _ in model.named_parameters()]
    assert ParameterCheck(OddGroup([0, 1, 0], len(names)), model, tmp_path)(50) == ""
    printed = what_differs([0, 1, 0], model, tmp_path)
    parameters = f"{names[3]} and {len(names) - 4} more"
    assert f"Rank 1 (host-2) differs from most ranks in the parameter {parameters}." in printed
    assert "remove the host from the inventory" in printed
    assert "ank 0" not in printed


@pytest.mark.parametrize(
    ("groups", "who"),
    [
        ([0, 1], "rank 0 (host-1) and rank 1 (host-2) differ"),
        ([1, 0], "rank 0 (host-1) and rank 1 (host-2) differ"),
        ([0, 1, 2], "rank 0 (host-1) and rank 1 (host-2) and rank 2 (host-3) differ"),
        ([0, 1, 0, 1], "rank 0 (host-1), rank 2 (host-3) and rank 1 (host-2), rank 3 (host-4) differ"),
        ([0, 0, 1, 2], "rank 0 (host-1), rank 1 (host-2) and rank 2 (host-3) and rank 3 (host-4) differ"),
    ],
)
def test_without_a_majority_all_are_named_and_nobody_is_accused(
    groups: list[int], who: str, tmp_path: Path
) -> None:
    model = GPT(GPTConfig.from_depth(1, 300, 32, aspect_ratio=32, head_dim=32))
    printed = what_differs(groups, model, tmp_path)
    assert f"no majority shows which is right: {who}." in printed
    assert "remove the host" not in printed
    assert "start the run again on all of them: it resumes from its last checkpoint" in printed


def test_a_lost_peer_is_named_by_its_address() -> None:
    peers = [Peer(0, "a", "10.0.0.1"), Peer(1, "b", "10.0.0.2"), Peer(2, "c", "10.0.0.3")]
    group = Collectives(RankEnv(world_size=3), peers)
    printed = group._name_peer(
        "[/pytorch/gloo/pair.cc:537] Connection closed by peer [10.0.0.3]:20011. This may be"
    )
    assert printed.startswith("Lost rank 2 (c): its process or its host is gone (Connection closed by peer")
    assert "This may" not in printed
    printed = group._name_peer("Timed out waiting 100ms for recv")
    assert printed.startswith("rank 1 (b) or rank 2 (c) did not answer in time")


def test_what_nccl_shows_becomes_a_lost_peer_too() -> None:
    """Messages as NCCL and torch word them; no GPU was there to say them."""
    group = Collectives(RankEnv(world_size=2), [Peer(0, "a", "10.0.0.1"), Peer(1, "b", "10.0.0.2")])
    late = (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for"
    )
    gone = (
        "NCCL error in: NCCLUtils.cpp:93, remote process exited or there was a network error\nncclRemoteError"
    )
    for message, start in (
        (late, "rank 1 (b) did not answer in time"),
        (gone, "Lost rank 1 (b): its process or its host is gone (NCCL error in"),
    ):
        with pytest.raises(PeerLost) as caught, group._peer_errors():
            raise dist.DistBackendError(message)
        assert str(caught.value).startswith(start)
    for full in (
        torch.OutOfMemoryError("a GPU is full"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(type(full)), group._peer_errors():
            raise full


def test_contract_names_the_odd_host_and_field() -> None:
    records = [
        Record(rank, host, "", {"config.seed": seed, "torch": "2.13.0"}, {})
        for rank, (host, seed) in enumerate([("tower", "42"), ("laptop", "43"), ("attic", "42")])
    ]
    assert compare([records[0], records[2]]) == {}
    printed, table = explain(compare(records), records)
    assert "config.seed is 42, but rank 1 (laptop) has 43" in printed
    assert "torch" not in printed
    assert table.splitlines()[-1].split() == ["config.seed", "42", "43", "42"]
    assert check_consistency(None, records[0], 1) == [records[0]]


def test_what_is_wrong_on_one_host_is_reported_on_all() -> None:
    env = RankEnv(world_size=2, master_addr="127.0.0.1", master_port=free_port(), agent_store=True)
    server = dist.TCPStore("127.0.0.1", env.master_port, is_master=True, timeout=timedelta(seconds=5))
    records = [
        Record(0, "tower", "", {}, {}),
        Record(1, "laptop", "", {}, {}, "There is no data here."),
    ]
    stores = [join_store(replace(env, rank=rank), "run") for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        meetings = [
            pool.submit(check_consistency, store, mine, 2)
            for store, mine in zip(stores, records, strict=True)
        ]
    for meeting in meetings:
        assert str(meeting.exception()) == "rank 1 (laptop): There is no data here."
    del server


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        env = RankEnv(world_size=2, master_addr="127.0.0.1", master_port=held.getsockname()[1])
        with pytest.raises(Retryable, match=f"another program has port {env.master_port}"):
            join_store(env, "run", seconds=1)


def test_a_store_of_the_past_and_an_absent_rank_are_distinguished() -> None:
    env = RankEnv(rank=0, world_size=2, master_addr="127.0.0.1", master_port=free_port(), agent_store=True)
    with pytest.raises(Retryable, match="did not answer within 1 s"):
        join_store(env, "run", seconds=1)
    server = dist.TCPStore("127.0.0.1", env.master_port, is_master=True, timeout=timedelta(seconds=5))
    store = join_store(env, "run")
    with pytest.raises(Retryable, match="an earlier attempt that is still ending"):
        join_store(env, "run")
    began = time.monotonic()
    with pytest.raises(Retryable, match=r"Rank 1 did not become ready within 1 s, while rank 0 "):
        check_consistency(store, Record(0, "tower", "", {}, {}), 2, arrival_seconds=1)
    assert time.monotonic() - began < 60
    del server


def test_a_step_that_is_computed_again_with_the_same_values_names_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that differed has left the run in the meantime."""
    model = GPT(GPTConfig.from_depth(1, 300, 32, aspect_ratio=32, head_dim=32))
    model.init_weights()
    what_differs([0, 1], model, tmp_path)
    group = OddGroup([0, 0], 0)
    monkeypatch.setattr(group, "gather_bytes", lambda raw: [raw, raw])
    assert ParameterCheck(group, model, tmp_path)(50).endswith("The one that differed is gone.")
