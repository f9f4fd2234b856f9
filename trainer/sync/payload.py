"""How many bytes a rank puts on the wire in a step, told from shapes alone: nothing is computed or sent.

    predicted_bytes("exact", model_config, world_size=2, rank=0, touched_rows=2000)

The mode's own code goes through a step on tensors without data, in a group that only counts. So what is told
is what Group.bytes_sent will say, but for the words that ranks exchange beside gradients, some hundred bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.distributed.process_group import Group, Pending
from trainer.host.rank_env import Place
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import MuonAdamW, build_optimizer
from trainer.sync.local import Outer
from trainer.sync.modes import make_sync


def predicted_bytes(
    mode: str,
    model_config: GPTConfig,
    world_size: int,
    rank: int = 0,
    touched_rows: int = 0,
    outer: Outer | None = None,
) -> int:
    """Bytes that `rank` sends in a step; of `local`, which `outer` describes, the mean of its steps.

    `touched_rows` is how many different tokens the inputs of a step have, those of all ranks together: what
    exact and fast send of each embedding. For `local` it is those of all the steps between two meetings and
    the 32 before. Ranks differ a little, by what they own.
    """
    if world_size == 1:
        return 0
    outer = outer or Outer()
    steps = outer.steps if mode == "local" else 1
    group = CountingGroup(rank, world_size)
    touched = torch.arange(min(touched_rows, model_config.vocab_size))
    with torch.device("meta"):
        model = GPT(model_config)
        sync = make_sync(mode, group, model, IdleOptimizer(model), outer)
        for _ in range(steps):
            sync.begin_step(touched)
            with sync.last_backward():
                pass
            sync.reduce_gradients(world_size)
            sync.step()
            sync.hand_out()
    return group.bytes_sent // steps


class CountingGroup(Group):
    """A rank of a group that is not there."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(Place(rank=rank, world_size=world_size), [])

    def _launch(self, start: Callable[[Tensor], Any], parts: Iterable[Tensor]) -> Pending:
        return lambda: None


class IdleOptimizer(MuonAdamW):
    """Knows whose step is whose, and takes none."""

    def __init__(self, model: GPT) -> None:
        groups = build_optimizer(model, 0.0, 0.0, 0.0, 0.0, 0.0).param_groups
        super().__init__(groups, dict(model.named_parameters()))

    def step_adamw(self) -> None:
        pass

    def step_muon(self, owned: Iterable[Parameter] | None = None) -> None:
        pass

    def muon_update(self, p: Parameter) -> Tensor:
        return p
