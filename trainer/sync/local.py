"""The local mode: every rank trains by itself and ranks meet now and then, a part of the model at a time.

Each rank steps all parameters on its own rows. Every `every` steps the ranks' ways since the last meeting are
averaged, weighted by tokens, and an outer step with Nesterov momentum takes the outer parameters, the same
bytes on all ranks, along the mean: DiLoCo, arXiv 2311.08105, with Muon inside: MuLoCo, 2505.23725. Each
fragment of the model meets at a step of its own and the next steps hide its journey: Streaming DiLoCo,
2501.18512. A rank then goes on from the outer parameters, and keeps what it has done since its way left.

Looking at a run does not change it: an evaluation, a digest or a checkpoint reads the outer parameters as
they are and leaves a sync round in flight alone. A checkpoint waits for the bytes of the round and stores
them, so that a resumed run takes the outer step when the run would have taken it.

Ways travel in 8 or 4 bits; what rounding took is added to the next way. Every rank adds up the same bytes in
the same order, by operations that round once, so that unlike CPUs come to the same sums.

AdamW's second moments remember as many tokens as those of a step of all ranks would: of a rank's share of
the tokens, its share of the forgetting (arXiv 2507.07101). Without that lm_head learns worse, however often
ranks meet: rows of rare words, forgotten sooner than they come again, are divided by too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.distributed.process_group import Group, Pending
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.buckets import add_rows_alone
from trainer.sync.mode import SyncMode
from trainer.sync.quantize import Quantiser

# AdamW's momentum moves a row after its last token: by 0.8^32, under a thousandth, when this is over.
TAIL_STEPS = 32
NEVER = -(2**40)
ROUND = "round_"  # before the names of what a checkpoint holds of a sync round in flight
COUNT_BYTES = 8  # a rank's tokens, behind its values


@dataclass(frozen=True)
class Outer:
    """How ranks meet. See the knobs of the same names, `local_` in front, in trainer.config."""

    steps: int = 30
    lr: float = 0.7
    momentum: float = 0.6
    bits: int = 8
    delay: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Outer:
        return cls(
            config.local_steps, config.local_lr, config.local_momentum, config.local_bits, config.local_delay
        )


class Journey(NamedTuple):
    """A fragment's values on their way between ranks."""

    left_at: int
    left_with: list[Tensor]  # this rank's parameters when they left
    rows: Tensor | None
    kept: float  # of a row without tokens
    table: Tensor  # (world_size, bytes)
    pending: Pending

    def common_state(self) -> ParameterState:
        """What all ranks have of it, once its bytes are there."""
        state = {
            f"{ROUND}step": torch.tensor(self.left_at),
            f"{ROUND}kept": torch.tensor(self.kept, dtype=torch.float64),
            f"{ROUND}table": self.table,
        }
        return state if self.rows is None else {**state, f"{ROUND}rows": self.rows}

    @classmethod
    def of_state(cls, state: ParameterState, left_with: list[Tensor]) -> Journey:
        """The one that `common_state` describes, whose bytes are there."""
        device = left_with[0].device
        rows = state.get(f"{ROUND}rows")
        return cls(
            int(state[f"{ROUND}step"]),
            left_with,
            rows if rows is None else rows.to(device),
            float(state[f"{ROUND}kept"]),
            state[f"{ROUND}table"].to(device),
            _arrived,
        )


class Fragment:
    """Parameters that meet at one time: a layer's matrices, an embedding, or lm_head and what is left."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], meets_at: int, of_rows: bool) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.meets_at = meets_at
        self.outer = [p.detach().clone() for p in self.parameters]
        self.momentum = [torch.zeros_like(value) for value in self.outer]
        self.error = [torch.zeros_like(value) for value in self.outer]
        # Of an embedding, the step that last had a token of each row; on the CPU, which counts rows.
        self.touched_at = torch.full((len(self.outer[0]),), NEVER, device="cpu") if of_rows else None
        self.met_at = 0
        self.tokens = 0  # of this rank since it met
        self.kept = 1.0  # of a row without tokens, by decay since it met
        self.journey: Journey | None = None

    def rows(self) -> Tensor | None:
        """Of an embedding the rows that may differ between ranks: the same numbers on every rank."""
        if self.touched_at is None:
            return None
        return (self.touched_at > self.met_at - TAIL_STEPS).nonzero().flatten().to(self.outer[0].device)


class Local(SyncMode):
    """Local steps, outer steps, and one set of parameters that all ranks have in common."""

    def __init__(
        self, group: Group, model: nn.Module, optimizer: MuonAdamW, outer: Outer | None = None
    ) -> None:
        self._group, self._model, self._optimizer = group, model, optimizer
        self._outer = outer or Outer()
        self._quantiser = Quantiser(self._outer.bits)
        self._step = 0
        self._rates_of = {p: g for g in optimizer.param_groups for p in g["params"]}
        self._betas = [(g, *g["betas"]) for g in optimizer.param_groups if g["kind"] == "adamw"]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        add_rows_alone(model)
        self._fragments = _cut(model, self._outer.steps)
        self._tables = [f for f in self._fragments if f.touched_at is not None]
        self._touched = torch.empty(0, dtype=torch.int64)

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self, touched: Tensor) -> None:
        """Rows are the same on all ranks, so `touched` are those of all: this rank's are among them."""
        tables = {f.parameters[0] for f in self._tables}
        for p in self._model.parameters():
            assert p.grad is not None
            if p in tables:
                p.grad.index_fill_(0, self._touched.to(p.device), 0)
            else:
                p.grad.zero_()
        self._touched = touched
        for fragment in self._tables:
            assert fragment.touched_at is not None
            fragment.touched_at[touched.cpu()] = self._step + 1

    def last_backward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None:
        mine = mine or tokens // self._group.world_size
        for p in self._model.parameters():
            assert p.grad is not None
            p.grad.div_(mine)
        for rates, beta1, beta2 in self._betas:
            rates["betas"] = (beta1, beta2 ** (mine / tokens))
        for fragment in self._fragments:
            fragment.tokens += mine

    def step(self) -> None:
        self._optimizer.step()
        for fragment in self._tables:
            rates = self._rates_of[fragment.parameters[0]]
            fragment.kept *= 1 - rates["lr"] * rates["weight_decay"]

    def hand_out(self) -> None:
        """Send the fragments off whose step this is, and bring those home that have had their time."""
        self._step += 1
        for fragment in self._fragments:
            if (self._step - fragment.meets_at) % self._outer.steps == 0:
                self._leave(fragment)
        for fragment in self._fragments:
            if fragment.journey and fragment.journey.left_at + self._outer.delay <= self._step:
                self._arrive(fragment)

    def at_rest(self) -> bool:
        return not any(fragment.journey for fragment in self._fragments)

    # -- meeting ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _leave(self, fragment: Fragment) -> None:
        """Begin to send how far this rank has come since it last met the others."""
        rows = fragment.rows()
        ways = [outer - p for outer, p in zip(fragment.outer, fragment.parameters, strict=True)]
        way = torch.cat([_some(way, rows).flatten() for way in ways])
        way += torch.cat([_some(error, rows).flatten() for error in fragment.error])
        packed = self._quantiser.pack(way)
        way -= self._quantiser.unpack(packed, way.numel(), way.dtype)
        _put(fragment.error, rows, way)
        count = torch.tensor([fragment.tokens], device=way.device).view(torch.uint8)
        table, pending = self._group.start_gather_all(torch.cat([packed, count]))
        here = [p.detach().clone() for p in fragment.parameters]
        fragment.journey = Journey(self._step, here, rows, fragment.kept, table, pending)
        fragment.tokens, fragment.kept = 0, 1.0
        fragment.met_at = self._step

    @torch.no_grad()
    def _arrive(self, fragment: Fragment) -> None:
        """Wait for the others' ways, take the outer step, and go on from there."""
        journey, fragment.journey = fragment.journey, None
        assert journey is not None
        self._group.wait([journey.pending])
        ways = [torch.zeros_like(outer) for outer in fragment.outer]
        if journey.rows is not None:  # a row without tokens has gone the way of decay, on every rank
            torch.mul(fragment.outer[0], 1 - journey.kept, out=ways[0])
        _put(ways, journey.rows, self._mean(journey, fragment))

        for parameter, outer, momentum, way, there in zip(
            fragment.parameters, fragment.outer, fragment.momentum, ways, journey.left_with, strict=True
        ):
            momentum.mul_(self._outer.momentum).add_(way)
            outer.sub_((momentum * self._outer.momentum).add_(way).mul_(self._outer.lr))
            if journey.left_at == self._step:
                parameter.copy_(outer)
            else:
                parameter.add_(outer - there)

    def _mean(self, journey: Journey, fragment: Fragment) -> Tensor:
        """The ranks' ways, weighted by their tokens, in a row: the same bits on every rank."""
        values, counts = journey.table[:, :-COUNT_BYTES], journey.table[:, -COUNT_BYTES:]
        tokens = counts.flatten().clone().view(torch.int64).double()  # a copy starts where int64 may
        dtype = fragment.outer[0].dtype
        weights = (tokens / tokens.sum()).to(dtype)
        n = sum(_some(outer, journey.rows).numel() for outer in fragment.outer)
        mean = torch.zeros(n, dtype=dtype, device=values.device)
        for packed, weight in zip(values, weights, strict=True):
            mean += self._quantiser.unpack(packed, n, dtype).mul_(weight)
        return mean

    def _arrive_all(self) -> None:
        """Take the outer steps of all sync rounds in flight now."""
        for fragment in self._fragments:
            if fragment.journey:
                self._arrive(fragment)

    def _wait(self, journey: Journey) -> Journey:
        """The same sync round with its bytes there; its outer step is not taken."""
        self._group.wait([journey.pending])
        return journey._replace(pending=_arrived)

    # -- what ranks have in common, and what not ---------------------------------------------------------

    def finish(self) -> None:
        self._arrive_all()
        for fragment in self._fragments:
            if fragment.tokens:
                self._leave(fragment)
        self._arrive_all()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the model's parameters with the outer ones; nothing is copied."""
        for fragment in self._fragments:
            for i, p in enumerate(fragment.parameters):
                p.data, fragment.outer[i] = fragment.outer[i], p.data

    def common_state(self) -> dict[str, ParameterState]:
        states: dict[str, ParameterState] = {}
        for fragment in self._fragments:
            for name, momentum in zip(fragment.names, fragment.momentum, strict=True):
                states[name] = {"momentum": momentum, "met_at": torch.tensor(fragment.met_at)}
                if fragment.touched_at is not None:
                    states[name]["touched_at"] = fragment.touched_at
                    states[name]["kept"] = torch.tensor(fragment.kept, dtype=torch.float64)
            if fragment.journey:
                fragment.journey = self._wait(fragment.journey)
                states[fragment.names[0]] |= fragment.journey.common_state()
        return states

    def own_state(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for fragment in self._fragments:
            for name, value, error in zip(fragment.names, fragment.outer, fragment.error, strict=True):
                tensors[f"here/{name}"] = value  # inside `agreed`, where the two have changed places
                tensors[f"error/{name}"] = error
                tensors[f"tokens/{name}"] = torch.tensor(fragment.tokens)
            if fragment.journey:
                sent = zip(fragment.names, fragment.journey.left_with, strict=True)
                tensors |= {f"sent/{name}": value for name, value in sent}
        return tensors

    @torch.no_grad()
    def load(self, step: int, common: Mapping[str, ParameterState], own: Mapping[str, Tensor]) -> None:
        self._step = step
        for fragment in self._fragments:
            for i, (name, p) in enumerate(zip(fragment.names, fragment.parameters, strict=True)):
                fragment.outer[i].copy_(p)
                if name not in common:
                    continue
                state = common[name]
                fragment.momentum[i].copy_(state["momentum"])
                fragment.met_at = int(state["met_at"])
                if fragment.touched_at is not None:
                    fragment.touched_at.copy_(state["touched_at"])
                    fragment.kept = float(state["kept"])
                if own:
                    p.copy_(own[f"here/{name}"])
                    fragment.error[i].copy_(own[f"error/{name}"])
                    fragment.tokens = int(own[f"tokens/{name}"])
            state = common.get(fragment.names[0], {})
            if f"{ROUND}table" in state:
                # A rank without a state of its own goes on from the outer parameters: those it sent with.
                pairs = zip(fragment.names, fragment.outer, strict=True)
                left_with = [own.get(f"sent/{name}", p).to(p.device, copy=True) for name, p in pairs]
                fragment.journey = Journey.of_state(state, left_with)


def _cut(model: nn.Module, steps: int) -> list[Fragment]:
    """The model in fragments, which meet one after the other in the course of `steps`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        layer = name.split(".")[2] if name.startswith("transformer.h.") else ""
        part = name if id(p) in tables else f"layer {layer}" if layer else "the rest"
        parts.setdefault(part, {})[name] = p
    return [
        Fragment(part, max(1, steps * number // len(parts)), name in part)
        for number, (name, part) in enumerate(parts.items(), start=1)
    ]


def _arrived() -> None:
    """Nothing is left to wait for."""


def _some(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _put(tensors: list[Tensor], rows: Tensor | None, flat: Tensor) -> None:
    """Lay what `flat` has in a row into tensors, or into these rows of the one there is."""
    if rows is not None:
        tensors[0][rows] = flat.view(len(rows), -1)
        return
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
