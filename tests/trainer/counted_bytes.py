"""The bytes that a rank sends in a step, from shapes alone: nothing is computed or sent.

    predicted_bytes("exact", model_config, world_size=2, rank=0, active_rows=2000)

The code of the mode runs a step on meta tensors, in a group that only counts bytes. A real step adds the step
report, some hundred bytes, to Collectives.bytes_sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.distributed.process_group import Collectives, Pending
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import MuonAdamW, build_optimizer
from trainer.sync.fragment import Outer
from trainer.sync.modes import make_sync


def predicted_bytes(
    mode: str,
    model_config: GPTConfig,
    world_size: int,
    rank: int = 0,
    active_rows: int = 0,
    outer: Outer | None = None,
    by_rank: Sequence[Tensor] = (),
) -> int:
    """Bytes that `rank` sends in a step; for local, with the settings `outer`, the mean over its steps.

    `active_rows` is the number of different input tokens of a step, for exact and fast of each rank: they are
    then 0, 1, 2 ... or, if `by_rank` has them, those. For `local` it counts all steps between two sync rounds
    and the 32 before. Ranks differ slightly, by the matrices and rows that they own.
    """
    if world_size == 1:
        return 0
    outer = outer or Outer()
    steps = outer.steps if mode == "local" else 1
    group = CountingGroup(rank, world_size)
    active = torch.arange(min(active_rows, model_config.vocab_size))
    with torch.device("meta"):
        model = GPT(model_config)
        sync = make_sync(mode, group, model, NoOpOptimizer(model), outer)
        for _ in range(steps):
            sync.begin_step(active, by_rank or [active] * world_size)
            with sync.last_backward(world_size):
                pass
            sync.reduce_gradients(world_size)
            sync.step()
            sync.broadcast()
    return group.bytes_sent // steps


class CountingGroup(Collectives):
    """Collectives without peers: counts the bytes that a rank would send, and sends nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(RankEnv(rank=rank, world_size=world_size), [])

    def _launch(self, start: Callable[[Tensor], Any], parts: Iterable[Tensor]) -> Pending:
        return lambda: None


class NoOpOptimizer(MuonAdamW):
    """A MuonAdamW with the parameter groups of `model` whose steps do nothing."""

    def __init__(self, model: GPT) -> None:
        groups = build_optimizer(model, 0.0, 0.0, 0.0, 0.0, 0.0).param_groups
        super().__init__(groups, dict(model.named_parameters()))

    def step_adamw(self) -> None:
        pass

    def step_muon(self, owned: Iterable[Parameter] | None = None) -> None:
        pass

    def step_rows(self, p: Parameter, gradients: Tensor, active: Tensor | None = None) -> None:
        pass

    def muon_update(self, p: Parameter) -> Tensor:
        return p
