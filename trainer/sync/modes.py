"""Creates a sync mode by its name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainer.config import ConfigError
from trainer.distributed.process_group import Collectives
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.dense import Dense
from trainer.sync.exact import Exact
from trainer.sync.fast import Fast
from trainer.sync.fragment import Outer
from trainer.sync.local import Local
from trainer.sync.mode import SyncMode


def make_sync(
    mode: str, group: Collectives, model: nn.Module, optimizer: MuonAdamW, outer: Outer | None = None
) -> SyncMode:
    """Create the sync mode named `mode` for the parameters of `model`.

    mode: dense, exact, fast or local; with one rank, fast creates the mode exact. group: the ranks.
    optimizer: the optimizer of `model`. outer: the settings of sync=local; None: their defaults. Raises
    ConfigError if no mode has this name.
    """
    if mode == "local":
        return Local(group, model, optimizer, outer)
    modes: dict[str, Callable[[Collectives, nn.Module, MuonAdamW], SyncMode]]
    modes = {"dense": Dense, "exact": Exact, "fast": Fast if group.world_size > 1 else Exact}
    if mode not in modes:
        raise ConfigError(f"sync is {mode!r}: it must be {', '.join(modes)} or local.")
    return modes[mode](group, model, optimizer)
