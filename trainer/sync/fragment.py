"""Fragments of a model with sync=local, and the state of a sync round.

A fragment is a part of the model that is exchanged in one sync round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.distributed.process_group import Pending
from trainer.optim.muon_adamw import ParameterState
from trainer.sync.compressor import Compressor, make_compressor

# AdamW's momentum moves a row after its last token; after these steps by 0.8^32, less than a thousandth.
TAIL_STEPS = 32
NEVER = -(2**40)  # a step before all others
ROUND = "round_"  # prefix of the state of a sync round in flight, in a checkpoint


@dataclass(frozen=True)
class Outer:
    """The settings of `sync=local`: those of RunConfig that start with local_, without this prefix.

    steps: number of steps from one sync round of a fragment to the next.
    lr, momentum: learning rate and Nesterov momentum of the outer step.
    bits: the bits of a value that is sent. topk: how many of each 4,096 values are sent; 0: all.
    delay: number of steps that overlap with a sync round.
    """

    steps: int = 30
    lr: float = 0.7
    momentum: float = 0.6
    bits: int = 8
    topk: int = 0
    delay: int = 1

    @property
    def keeps_residual(self) -> bool:
        """Whether the unsent part of a pseudo-gradient stays in a rank's parameters, not in a buffer."""
        return self.topk > 0

    @classmethod
    def of(cls, config: RunConfig) -> Outer:
        """The settings of sync=local in `config`."""
        return cls(
            steps=config.local_steps,
            lr=config.local_lr,
            momentum=config.local_momentum,
            bits=config.local_bits,
            topk=config.local_topk,
            delay=config.local_delay,
        )


def saved(state: ParameterState, name: str, prefix: str = "") -> Tensor:
    """The tensor PREFIX + NAME of the state of a parameter; older checkpoints have other names."""
    older = {"synced_at": "met_at", "decay": "kept", "active_at": "touched_at"}
    return state[prefix + name] if prefix + name in state else state[prefix + older[name]]


class SyncRound(NamedTuple):
    """A sync round in flight: the transfer of the pseudo-gradients of one fragment.

    started_at: the step after which the round was started.
    sent_parameters: for each parameter, the values that this rank subtracts from it at the outer step, before
        it adds the new outer parameter.
    rows: for an embedding, the numbers of the rows that are sent, int64; None: all values are sent.
    decay: the factor by which weight decay has reduced rows without tokens since the previous round.
    table: packed pseudo-gradients and token count of each rank, uint8, (world_size, bytes).
    pending: function that waits for the transfer.
    rank: row of this rank in `table`. tokens: number of tokens of this rank since the previous round.
    """

    started_at: int
    sent_parameters: list[Tensor]
    rows: Tensor | None
    decay: float
    table: Tensor
    pending: Pending
    rank: int = 0
    tokens: int = 0

    def common_state(self) -> ParameterState:
        """The state that is equal on all ranks, for a checkpoint: {name: tensor}.

        The transfer must be complete.
        """
        state = {
            f"{ROUND}step": torch.tensor(self.started_at),
            f"{ROUND}decay": torch.tensor(self.decay, dtype=torch.float64),
            f"{ROUND}table": self.table,
        }
        return state if self.rows is None else {**state, f"{ROUND}rows": self.rows}

    @classmethod
    def from_state(cls, state: ParameterState, sent_parameters: list[Tensor]) -> SyncRound:
        """Rebuild a round from its `common_state`. Its transfer is complete, its outer step not yet taken.

        state: the result of `common_state`. sent_parameters: as in the class.
        """
        device = sent_parameters[0].device
        rows = state.get(f"{ROUND}rows")
        return cls(
            int(state[f"{ROUND}step"]),
            sent_parameters,
            rows if rows is None else rows.to(device),
            float(saved(state, "decay", ROUND)),
            state[f"{ROUND}table"].to(device),
            done,
        )


class Fragment:
    """Parameters that share a sync round: the matrices of a layer, an embedding, or lm_head and the rest.

    parameters: {name: parameter}. outer: the settings of sync=local. sync_at: the step after which the first
    round is due; further rounds follow every `outer.steps` steps. of_rows: whether the fragment is an
    embedding, of which only some rows are sent.
    Attributes:
    outer, momentum: the outer parameters and their momentum, one tensor for each parameter.
    error: the error feedback, one tensor for each parameter; empty if the parameters keep the residual.
    synced_at: the step after which the last round was started. tokens: tokens of this rank since then.
    completed: the step after which the last complete round was started.
    checksum: the sum of the bytes that the ranks sent in the last complete round, int64.
    is_due: whether a round was taken back (dropped unfinished), and starts again after the next step.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], outer: Outer, sync_at: int, of_rows: bool
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.sync_at = sync_at
        self.outer = [p.detach().clone() for p in self.parameters]
        self.momentum = [torch.zeros_like(value) for value in self.outer]
        self._sizes = [] if of_rows else [value.numel() for value in self.outer]
        self.compressor = self.make_compressor(outer)
        self.error = [] if outer.keeps_residual else [torch.zeros_like(value) for value in self.outer]
        # Of an embedding, the last step at which each row was active; on the CPU.
        self.active_at = torch.full((len(self.outer[0]),), NEVER, device="cpu") if of_rows else None
        self.synced_at = self.completed = 0
        self.is_due, self.checksum = False, torch.tensor(0)
        self.tokens = 0  # of this rank since its last round
        self.decay = 1.0  # weight decay of a row without tokens since the last round
        self.sync_round: SyncRound | None = None

    def make_compressor(self, outer: Outer) -> Compressor:
        return make_compressor(outer.bits, outer.topk, self._sizes)

    def rows(self) -> Tensor | None:
        """For an embedding, the numbers of the rows that may differ between ranks; None for other fragments.

        The result is equal on every rank.
        """
        if self.active_at is None:
            return None
        return (self.active_at > self.synced_at - TAIL_STEPS).nonzero().flatten().to(self.outer[0].device)

    def common_state(self, synced_at: int, decay: float) -> dict[str, ParameterState]:
        """The state for a checkpoint, without a round in flight: {parameter name: {state name: tensor}}.

        synced_at, decay: the values of these attributes to write.
        """
        states: dict[str, ParameterState] = {}
        for name, momentum in zip(self.names, self.momentum, strict=True):
            states[name] = {"momentum": momentum, "synced_at": torch.tensor(synced_at)}
            if self.active_at is not None:
                states[name]["active_at"] = self.active_at
                states[name]["decay"] = torch.tensor(decay, dtype=torch.float64)
        return states

    def apply_to_outer(self, sent: Tensor, rows: Tensor | None) -> list[Tensor]:
        """The outer parameters minus the pseudo-gradients `sent`, as new tensors.

        sent: flat tensor. rows: for an embedding, the numbers of the rows in `sent`; the other rows get the
        weight decay since the last round. None: `sent` has all values.
        """
        values = [outer.clone() for outer in self.outer]
        if rows is not None:
            values[0].mul_(self.decay)
        write_rows(values, rows, torch.cat([rows_of(outer, rows).flatten() for outer in self.outer]) - sent)
        return values


def make_fragments(model: nn.Module, outer: Outer) -> list[Fragment]:
    """Divide the model into fragments, whose sync rounds are spread over `outer.steps` steps."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        layer = name.split(".")[2] if name.startswith("transformer.h.") else ""
        part = name if id(p) in tables else f"layer {layer}" if layer else "the rest"
        parts.setdefault(part, {})[name] = p
    return [
        Fragment(part, outer, max(1, outer.steps * number // len(parts)), name in part)
        for number, (name, part) in enumerate(parts.items(), start=1)
    ]


def done() -> None:
    """The Pending of a transfer that is complete."""


def rows_of(values: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of `values` with the numbers `rows`, int64; None: all values."""
    return values if rows is None else values[rows]


def write_rows(tensors: list[Tensor], rows: Tensor | None, flat: Tensor) -> None:
    """Copy the flat tensor `flat` into `tensors`, one after another.

    rows: numbers of the rows whose values `flat` has; `tensors` then has one tensor, whose other rows do not
    change. None: `flat` has all values.
    """
    if rows is not None:
        tensors[0][rows] = flat.view(len(rows), -1)
        return
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
