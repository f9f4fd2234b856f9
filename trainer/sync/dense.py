"""The dense mode, the reference: whole gradients in the number format of the run.

Gradients of AdamW parameters are all-reduced, and every rank steps them. Gradients of Muon matrices are
reduced to their owner ranks, which step them and broadcast the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainer.distributed.process_group import Collectives
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.buckets import OwnerMode, add_only_active_rows, flatten_gradients, flatten_weights


class Dense(OwnerMode):
    """The sync mode dense: reduces gradients after backward, broadcasts Muon's matrices after the step."""

    def __init__(self, group: Collectives, model: nn.Module, optimizer: MuonAdamW) -> None:
        super().__init__(group, model, optimizer)
        parts = {owner: part for owner, part in self._parts.items() if part}
        self._replicated_gradients = flatten_gradients(self._replicated)
        self._owned_gradients = {owner: flatten_gradients(part) for owner, part in parts.items()}
        self._owned_weights = {owner: flatten_weights(part) for owner, part in parts.items()}
        add_only_active_rows(model)

    def begin_step(self, active: Tensor, by_rank: Sequence[Tensor] = ()) -> None:
        self._replicated_gradients.zero_()
        for gradients in self._owned_gradients.values():
            gradients.zero_()

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        """All-reduce the AdamW gradients, reduce those of Muon to their owner ranks, divide by `tokens`."""
        replicated = self._group.start_all_reduce(self._replicated_gradients)
        self._group.wait([replicated, self._group.start_reduces(self._owned_gradients)])
        self._replicated_gradients.div_(tokens)
        if self._group.rank in self._owned_gradients:
            self._owned_gradients[self._group.rank].div_(tokens)

    def step(self) -> None:
        self._optimizer.step_adamw()
        self._optimizer.step_muon(self._parts[self._group.rank])

    def broadcast(self) -> None:
        self._group.broadcast_owned(self._owned_weights)
