"""The state of a run on the ranks of its next members, from what those before had of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.exchange import flatten
from trainer.checkpoint.storage import State
from trainer.distributed.process_group import Channel, Collectives, Pending
from trainer.elastic import reshard
from trainer.elastic.reshard import Held
from trainer.elastic.snapshot import Copy, Snapshots, held_of, state_of
from trainer.host.rank_env import RankEnv
from trainer.model.config import GPTConfig
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW, ParameterState, build_optimizer
from trainer.sync.mode import SyncMode
from trainer.sync.modes import make_sync
from trainer.sync.row_shards import RowShards

CONFIG = GPTConfig.from_depth(2, 500, 32, aspect_ratio=16, head_dim=16)  # 8 blocks of rows
RATES = (0.1, 1.0, 0.1, 0.5, 0.1)
OLD = -7.0  # the values of rows that a rank does not own


class Network:
    """Connects the threads that stand for ranks. bytes: what each of them has received from others."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.board: dict[int, Any] = {}
        self.bytes = [0] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.board[rank] = value
        self.barrier.wait()
        found = [self.board[each] for each in range(self.barrier.parties)]
        self.barrier.wait()
        return found


class ThreadGroup(Collectives):
    """The collectives of one of these threads, as far as a change of the members needs them."""

    def __init__(self, rank: int, network: Network) -> None:
        super().__init__(RankEnv(rank=rank, world_size=network.barrier.parties), [])
        self.network = network

    def open_channel(self, name: str) -> Any:
        """The transfers of copies: those of the ranks, one after another."""
        channel = Channel(self, object())
        channel.exchange = self._exchange  # type: ignore[method-assign]
        return channel

    def _exchange(
        self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int], room: Tensor | None = None
    ) -> Tensor:
        pieces = self.network.exchange(self.rank, tensor.split(list(sends)))
        found = torch.cat([tensor[:0], *(piece[self.rank] for piece in pieces)])
        assert len(found) == sum(receives)
        return found

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        return self.network.exchange(self.rank, mine)

    def gather_int64(self, values: Tensor) -> Tensor:
        return torch.stack(self.network.exchange(self.rank, values))

    def start_exchange(
        self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int], largest: int = 0
    ) -> tuple[Tensor, Pending]:
        assert self.network.exchange(self.rank, largest) == [largest] * self.world_size
        assert max(sends) <= largest
        assert (sends[self.rank], receives[self.rank]) == (0, 0), "nothing is sent to itself"
        pieces = self.network.exchange(self.rank, tensor.split(list(sends)))
        found = torch.cat([piece[self.rank] for piece in pieces])
        assert [len(piece[self.rank]) for piece in pieces] == list(receives)
        self.network.bytes[self.rank] += found.numel() * found.element_size()
        return found, lambda: None


class Rank:
    """Model, optimizer and sync mode of a rank. launch_ranks: those of all ranks, if others are lost."""

    def __init__(self, rank: int, world_size: int, mode: str, launch_ranks: Sequence[int] = ()) -> None:
        self.model = GPT(CONFIG)
        self.optimizer = build_optimizer(self.model, *RATES)
        group = Collectives(RankEnv(rank=rank, world_size=world_size), [])
        if launch_ranks:
            group.launch_ranks, group.n_launch_ranks = launch_ranks, max(launch_ranks) + 1
        self.sync: SyncMode = make_sync(mode, group, self.model, self.optimizer)

    def part_of(self, rank: int, state: dict[str, ParameterState]) -> dict[str, ParameterState]:
        """What of the whole optimizer state belongs to `rank`."""
        part = {}
        for name, tensors in state.items():
            rows = self.sync.owned_rows(name, rank)
            if self.sync.owner_of(name) in (None, rank):
                part[name] = {
                    key: tensor if rows is None or tensor.dim() == 0 else tensor[rows]
                    for key, tensor in tensors.items()
                }
        return part

    def load(self, rank: int, parameters: dict[str, Tensor], state: dict[str, ParameterState]) -> None:
        """Take what `rank` has after a step: its part, and old values in rows of others."""
        self.model.load_state_dict(parameters)
        for name, tensor in self.model.state_dict().items():
            if not self.sync.is_current(name) and (rows := self.sync.owned_rows(name, rank)) is not None:
                old = torch.ones(len(tensor), dtype=torch.bool)
                old[rows] = False
                tensor[old] = OLD
        self.optimizer.load_state_dict(self.part_of(rank, state))

    def check(self, rank: int, parameters: dict[str, Tensor], state: dict[str, ParameterState]) -> None:
        """Raise AssertionError unless this is the state of `rank`, bit by bit."""
        for name, tensor in self.model.state_dict().items():
            rows = None if self.sync.is_current(name) else self.sync.owned_rows(name, rank)
            rows = slice(None) if rows is None else rows
            assert torch.equal(tensor[rows], parameters[name][rows]), name
        expected, found = self.part_of(rank, state), self.optimizer.state_dict()
        assert expected.keys() == found.keys()
        for name, tensors in expected.items():
            for key, tensor in tensors.items():
                assert torch.equal(tensor, found[name][key]), (rank, name, key)


@pytest.fixture(scope="module")
def truth() -> tuple[dict[str, Tensor], dict[str, ParameterState]]:
    """All parameters, and all optimizer state."""
    torch.manual_seed(3)
    model = GPT(CONFIG)
    model.init_weights()
    optimizer: MuonAdamW = build_optimizer(model, *RATES)
    state = {}
    for name, parameter in model.named_parameters():
        tensors = optimizer._fresh_state(parameter)
        state[name] = {
            key: torch.full_like(tensor, 9.0) if tensor.dim() == 0 else torch.randn_like(tensor)
            for key, tensor in tensors.items()
        }
    return dict(model.state_dict()), state


def each_rank(world_size: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in range(world_size)]]


def lacking(
    held: Held, mine: Rank, rank: int, truth: tuple[dict[str, Tensor], dict[str, ParameterState]]
) -> int:
    """The bytes of the state of `rank` that are not in `held`."""

    def rows(name: str, found: Tensor | None) -> set[int]:
        return set(range(len(truth[0][name])) if found is None else found.tolist())

    size = 0
    for name, tensor in truth[0].items():
        had = rows(name, held.rows.get(reshard.MODEL + name, reshard.NOTHING))
        wanted = rows(name, None if mine.sync.is_current(name) else mine.sync.owned_rows(name, rank))
        size += len(wanted - had) * tensor[0].nbytes
        if mine.sync.owner_of(name) in (None, rank):
            had = rows(name, held.rows.get(name, reshard.NOTHING))
            missing = len(rows(name, mine.sync.owned_rows(name, rank)) - had)
            for key, state in truth[1][name].items():
                if state.dim() and len(state) == len(tensor):
                    size += missing * state[0].nbytes
                else:
                    size += state.nbytes * (f"{name}/{key}" not in held.tensors)
    return size


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["dense", "exact", "fast"])
@pytest.mark.parametrize(
    ("before", "leaving", "new"),
    [(1, [], 1), (2, [], 1), (3, [], 2), (2, [1], 0), (4, [2], 0), (4, [1, 3], 0), (3, [2], 1), (9, [], 1)],
    ids=lambda value: str(value),
)
def test_each_rank_has_its_state_and_received_only_what_it_lacked(
    truth: tuple[dict[str, Tensor], dict[str, ParameterState]],
    mode: str,
    before: int,
    leaving: list[int],
    new: int,
) -> None:
    parameters, state = truth
    network = Network(before)

    def give(rank: int) -> Held:
        mine = Rank(rank, before, mode)
        mine.load(rank, parameters, state)
        held = reshard.hold(rank, 5, mine.model, mine.sync, mine.optimizer, {"step": 5} if rank == 0 else {})
        return reshard.hand_over(ThreadGroup(rank, network), held, leaving)

    kept = [held for rank, held in enumerate(each_rank(before, give)) if rank not in leaving]
    if not leaving:
        assert not any(network.bytes)
    assert not any(network.bytes[rank] for rank in leaving)
    after = len(kept) + new
    launch_ranks = [number for number in range(before) if number not in leaving]
    launch_ranks += [
        number for number in [*leaving, *range(before, before + new)] if number not in launch_ranks
    ][:new]
    network, held_of = Network(after), [*kept, *[Held()] * new]

    def take(rank: int) -> Rank:
        mine, group, held = Rank(rank, after, mode, launch_ranks), ThreadGroup(rank, network), held_of[rank]
        offers = reshard.gather_offers(group, held)
        assert reshard.is_complete(offers)
        if held.tensors:
            held.load_parameters(mine.model)
        optim = reshard.reshard(group, offers, held, mine.model, mine.sync)
        mine.optimizer.load_state_dict(optim, assign=True)
        return mine

    for rank, mine in enumerate(each_rank(after, take)):
        mine.check(rank, parameters, state)
        assert network.bytes[rank] == lacking(held_of[rank], mine, rank, truth)


@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize(("holders", "others"), [(1, 0), (1, 2), (2, 0), (2, 1), (2, 3)])
def test_after_a_loss_the_ranks_that_have_copies_receive_nothing(
    truth: tuple[dict[str, Tensor], dict[str, ParameterState]], mode: str, holders: int, others: int
) -> None:
    parameters, state = truth
    network = Network(holders + others)

    def take(rank: int) -> tuple[Rank, Held]:
        mine, group = Rank(rank, holders + others, mode), ThreadGroup(rank, network)
        copy = State({"step": 5}, dict(parameters), {name: dict(each) for name, each in state.items()})
        held = reshard.hold_copy(copy if rank < holders else None)
        offers = reshard.gather_offers(group, held)
        assert reshard.is_complete(offers)
        if rank < holders:
            held.load_parameters(mine.model)
        optim = reshard.reshard(group, offers, held, mine.model, mine.sync)
        mine.optimizer.load_state_dict(optim, assign=not held.is_copy)
        return mine, held

    for rank, (mine, held) in enumerate(each_rank(holders + others, take)):
        mine.check(rank, parameters, state)
        for name, tensor in mine.model.state_dict().items():
            assert tensor.data_ptr() != parameters[name].data_ptr(), "training must not change the copy"
        for name, tensors in mine.optimizer.state_dict().items():
            for key, tensor in tensors.items():
                assert tensor.data_ptr() != state[name][key].data_ptr()
        assert not held.tensors
        assert (network.bytes[rank] == 0) == (rank < holders)


@pytest.mark.parametrize("mode", ["dense", "exact", "fast"])
@pytest.mark.parametrize(("before", "lost"), [(3, [1]), (3, [0]), (4, [1]), (4, [3]), (8, [2, 5])], ids=str)
def test_after_a_loss_the_others_receive_only_what_their_own_part_of_a_copy_lacks(
    truth: tuple[dict[str, Tensor], dict[str, ParameterState]], mode: str, before: int, lost: list[int]
) -> None:
    parameters, state = truth
    network = Network(before)

    def keep(rank: int) -> Copy | None:
        mine = Rank(rank, before, mode)
        mine.load(rank, parameters, state)
        copies = Snapshots(ThreadGroup(rank, network), None, [0, 1], [2, 7], on_all=True)
        meta = {"step": 5, "terms": [[2, 0]]}
        copies.start(5, mine.model, mine.sync, mine.optimizer, meta if rank == 0 else {})
        copies.finish()
        assert copies.newest is not None
        assert copies.newest.meta == meta, "so that any rank can continue as the coordinator"
        assert (state_of(copies.newest) is not None) == (rank in (0, 1))
        for tensor in [*mine.model.state_dict().values(), *flatten(mine.optimizer.state_dict()).values()]:
            tensor.fill_(OLD)  # the next steps
        return copies.newest

    kept = [copy for rank, copy in enumerate(each_rank(before, keep)) if rank not in lost]
    after = len(kept)
    network = Network(after)

    def take(rank: int) -> tuple[Rank, int]:
        mine, group, held = Rank(rank, after, mode), ThreadGroup(rank, network), held_of(kept[rank])
        size = lacking(held, mine, rank, truth)
        offers = reshard.gather_offers(group, held)
        assert reshard.is_complete(offers)
        held.load_parameters(mine.model)
        optim = reshard.reshard(group, offers, held, mine.model, mine.sync)
        mine.optimizer.load_state_dict(optim, assign=False)
        return mine, size

    received = []
    for rank, (mine, size) in enumerate(each_rank(after, take)):
        mine.check(rank, parameters, state)
        assert network.bytes[rank] == size
        received.append(size)
    again = [held_of(copy) for copy in kept]
    for tensors in (each.tensors for each in again):
        assert not any((tensor == OLD).all() for tensor in tensors.values()), "a copy stays as it was"
    holders = 2 - len({0, 1} & set(lost))
    assert not any(received[:holders])
    everything = sum(t.nbytes for t in (*parameters.values(), *flatten(state).values()))
    assert max(received) < everything / 2


def test_a_copy_of_the_same_step_from_another_view_is_not_mixed_in() -> None:
    held = [held_of(copy) for copy in two_copies()]

    def offers(*views: tuple[int, int]) -> list[int]:
        network = Network(2)
        parts = [replace(each, view=view) for each, view in zip(held, views, strict=True)]
        found = each_rank(2, lambda rank: reshard.gather_offers(ThreadGroup(rank, network), parts[rank]))
        return [each.step for each in found[0]]

    assert offers((1, 4), (1, 4)) == [5, 5]
    assert offers((1, 4), (1, 3)) == [5, -1]
    assert offers((1, 4), (2, 4)) == [5, -1]


def two_copies() -> list[Copy | None]:
    """The copies of two ranks of the same step."""
    network = Network(2)

    def keep(rank: int) -> Copy | None:
        mine = Rank(rank, 2, "exact")
        copies = Snapshots(ThreadGroup(rank, network), None, [0], [0, 1], on_all=True)
        copies.start(5, mine.model, mine.sync, mine.optimizer, {"step": 5} if rank == 0 else {})
        copies.finish()
        return copies.newest

    return each_rank(2, keep)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_all_rows_are_refreshed_before_the_first_evaluation_after_a_change(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, refreshed = Rank(0, 2, mode), []
    monkeypatch.setattr(RowShards, "refresh", lambda rows: refreshed.append(rows))
    for _ in range(2):
        with mine.sync.shared_parameters():
            assert len(refreshed) == 1


def test_what_nobody_has_is_noticed() -> None:
    mine = [Rank(rank, 2, "exact") for rank in range(2)]
    held = [
        reshard.hold(rank, 5, each.model, each.sync, each.optimizer, {}) for rank, each in enumerate(mine)
    ]
    later = reshard.hold(1, 6, mine[1].model, mine[1].sync, mine[1].optimizer, {})

    def complete(*parts: Held) -> bool:
        network = Network(len(parts))
        offers = each_rank(
            len(parts), lambda rank: reshard.gather_offers(ThreadGroup(rank, network), parts[rank])
        )
        results = {reshard.is_complete(each) for each in offers}
        assert len(results) == 1, "all ranks agree"
        return results.pop()

    assert complete(*held)
    assert complete(held[0], Held(), held[1])
    assert not complete(held[0])
    assert not complete(held[0], Held())
    assert not complete(held[0], later), "of another step"
    assert not complete(Held(), held[0], held[1]), "the coordinator has nothing"
    assert not complete(Held(), Held())


@pytest.mark.parametrize("rows", [[], [4], [0, 1, 2], [0, 1, 5, 6, 9]])
def test_runs_of_rows(rows: list[int]) -> None:
    assert reshard._of_runs(reshard._runs(torch.tensor(rows, dtype=torch.int64))).tolist() == rows
