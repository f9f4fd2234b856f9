"""Ranks of the local mode as threads of one process, with a small model each."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from conftest import RATES
from torch import Tensor

from trainer.distributed.process_group import Collectives, Pending
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import ParameterState, build_optimizer
from trainer.sync.fragment import Outer
from trainer.sync.local import Local

CONFIG = GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16)


class Room:
    """Where threads that stand for ranks exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.tensors: dict[tuple[int, int], Tensor] = {}
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.shared: dict[int, Any] = {}

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values that all ranks bring, in rank order."""
        self.barrier.wait()
        self.shared[rank] = value
        self.barrier.wait()
        return [self.shared[each] for each in range(self.barrier.parties)]


class RankThread(Collectives):
    """A rank in a thread of its own."""

    def __init__(self, rank: int, world_size: int, room: Room) -> None:
        super().__init__(RankEnv(rank=rank, world_size=world_size), [])
        self.room, self.count = room, 0

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        number, table = self.count, tensor.new_empty(self.world_size, len(tensor))
        self.count += 1
        self.room.tensors[number, self.rank] = table[self.rank] = tensor.clone()

        def arrive() -> None:
            self.room.barrier.wait()
            for rank in range(self.world_size):
                table[rank] = self.room.tensors[number, rank]

        return table, arrive

    def gather_int64(self, values: Tensor) -> Tensor:
        return torch.stack(self.room.gather(self.rank, values))

    def broadcast_owned(self, owned: Mapping[int, Tensor]) -> None:
        for owner, tensor in owned.items():
            tensor.copy_(self.room.gather(self.rank, tensor.clone())[owner])

    def start_exchange(
        self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int], largest: int = 0
    ) -> tuple[Tensor, Pending]:
        pieces = self.room.gather(self.rank, tensor.clone().split(list(sends)))
        received = torch.cat([piece[self.rank] for piece in pieces])
        assert [len(piece[self.rank]) for piece in pieces] == list(receives)
        return received, lambda: None


class Rank:
    """A model, its optimizer and its sync."""

    def __init__(self, rank: int, world_size: int, room: Room, outer: Outer, dtype: torch.dtype) -> None:
        self.rank = rank
        self.model = fresh_model(dtype)
        self.optimizer = build_optimizer(self.model, **RATES)
        self.sync = Local(RankThread(rank, world_size, room), self.model, self.optimizer, outer)

    def step(self, batches: Sequence[Tensor]) -> None:
        self.train(batches)
        self.sync.broadcast()

    def train(self, batches: Sequence[Tensor]) -> None:
        """A step up to where ranks may meet."""
        self.sync.begin_step(torch.cat([idx[:, :-1].flatten() for idx in batches]).unique())
        idx = batches[self.rank]
        tokens = sum(batch[:, 1:].numel() for batch in batches)
        with self.sync.last_backward(tokens):
            self.model(idx[:, :-1], idx[:, 1:], loss_reduction="sum").backward()
        self.sync.reduce_gradients(tokens, idx[:, 1:].numel())
        self.sync.step()

    def own(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def in_common(self) -> list[Tensor]:
        with self.sync.shared_parameters():
            return [p.detach().clone() for p in self.model.parameters()]


def fresh_model(dtype: torch.dtype) -> GPT:
    torch.manual_seed(1)
    model = GPT(CONFIG).to(dtype)
    model.init_weights()
    return model


def batches_of(step: int, rows: Sequence[int]) -> list[Tensor]:
    """A batch for each rank, of so many rows."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(300, (n, 33), generator=draw) for n in rows]


def together(ranks: Sequence[Rank], work: Callable[[Rank], list[Tensor]]) -> list[list[Tensor]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def look(rank: Rank) -> tuple[dict[str, Tensor], dict[str, ParameterState], dict[str, Tensor]]:
    """All that a checkpoint takes of a rank: parameters, the common state, its own."""
    with rank.sync.shared_parameters():
        return copy.deepcopy((rank.model.state_dict(), rank.sync.common_state(), rank.sync.rank_state()))


def resume(states: Sequence[tuple[Any, ...]], step: int, outer: Outer, owned: Sequence[bool]) -> list[Rank]:
    """Ranks that continue from what `look` and the optimizers had after `step`; some have no file."""
    room = Room(len(owned))
    ranks = [Rank(rank, len(owned), room, outer, torch.float32) for rank in range(len(owned))]
    for rank, has_own in zip(ranks, owned, strict=True):
        (weights, common, own), optim = states[rank.rank if has_own else 0]
        rank.model.load_state_dict(copy.deepcopy(weights))
        rank.optimizer.load_state_dict(copy.deepcopy(optim))
        rank.sync.load(step, copy.deepcopy(common), copy.deepcopy(own) if has_own else {})
    return ranks
