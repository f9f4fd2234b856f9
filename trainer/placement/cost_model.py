"""What a step will take, before there was one: alone and in every sync mode, at the asked and larger batches.

    predictor = Predictor(speeds, link, work, names)
    predictor.step("exact", rows=16)               # seconds, with the rows split by speed
    predictor.alone(rows=16)                       # (seconds, rank): the fastest host by itself
    choose(predictor, 16, ["dense", "exact"])      # the mode to take

Pure arithmetic over what was measured (trainer.placement.microbenchmark) and counted; a run says afterwards
how far off it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import SYNC_MODES
from trainer.data.loader import equal_split
from trainer.formatting import render_table
from trainer.placement.batch_split import relative_speeds, slowest, split_rows
from trainer.placement.microbenchmark import Link, Speed
from trainer.sync.buckets import share_out
from trainer.sync.local import TAIL_STEPS, Outer
from trainer.sync.quantize import Quantiser

# Of backward's and the optimizer's time in which exact and fast could send, the part in which they do: a
# processor that computes is also the one that moves the bytes.
OVERLAP = 0.5
BETTER = 0.03  # of a step, by which a mode must be faster than one that is named before it
TIMES = (1, 4, 16)  # the asked batch, and larger ones
LARGEST = 64  # times the asked batch: further on nobody looks for one that pays


@dataclass(frozen=True)
class Work:
    """What there is to do, and to send, whoever does it. Parameters are counted, not bytes."""

    tables: int  # embedding tables, together
    table_width: int  # values of one token's row in all tables
    matrices: int
    others: int  # lm_head and the scalars
    matrix_flops: tuple[float, ...]  # Muon's, one matrix each
    micro_batch: int  # rows
    touched: Callable[[int], int]  # unique tokens in so many rows
    value_bytes: int = 4

    @property
    def parameters(self) -> int:
        return self.tables + self.matrices + self.others


def _check(mode: str) -> None:
    """Raise ValueError for a mode whose cost is not known here."""
    if mode not in SYNC_MODES:
        raise ValueError(f"no cost is known for the sync mode {mode!r}, only for {', '.join(SYNC_MODES)}")


def payload(mode: str, work: Work, rows: int, world_size: int, outer: Outer | None = None) -> float:
    """Bytes that a rank sends in a step of so many rows, of local in the mean of its steps.

    Ring and hand-out move (n-1)/n twice. trainer.sync.payload counts the same in the modes' own code.
    """
    _check(mode)
    way = 2 * (world_size - 1) / world_size
    if mode == "dense":
        return way * work.value_bytes * work.parameters
    outer = outer or Outer()
    steps = outer.steps + TAIL_STEPS if mode == "local" else 1
    values = work.touched(steps * rows) * work.table_width + work.matrices + work.others
    if mode == "local":
        return (world_size - 1) * values * Quantiser(outer.bits).bytes_a_value / outer.steps
    return way * values * (2 if mode == "fast" else work.value_bytes)


@dataclass(frozen=True)
class Predictor:
    """Speeds by rank, and the link between them."""

    speeds: Sequence[Speed]
    link: Link | None
    work: Work
    names: Sequence[str]
    by_speed: bool = True
    outer: Outer | None = None  # how ranks meet in local

    def shares(self, rows: int) -> list[int]:
        if not self.by_speed:
            return equal_split(rows, len(self.speeds))
        return split_rows([speed.row for speed in self.speeds], rows)

    @property
    def owner_speeds(self) -> list[float]:
        """Relative speeds by rank that Muon's work is shared out by."""
        return relative_speeds([speed.muon for speed in self.speeds])

    def alone(self, rows: int) -> tuple[float, int]:
        """Seconds of a step on the rank that is fastest by itself, and that rank."""
        return min((speed.solo(rows), rank) for rank, speed in enumerate(self.speeds))

    def step(self, mode: str, rows: int, shares: Sequence[int] = ()) -> float:
        """Seconds of a step by all ranks; their rows split as the run would unless `shares` are given."""
        _check(mode)
        shares = shares or self.shares(rows)
        compute = slowest([speed.row for speed in self.speeds], shares)
        adamw = max(speed.adamw for speed in self.speeds)
        if self.link is None:
            return self.speeds[0].solo(rows)
        sent = payload(mode, self.work, rows, len(self.speeds), self.outer)
        wire = sent / self.link.goodput + 4 * self.link.latency
        if mode == "local":
            return max(s.solo(r) for s, r in zip(self.speeds, shares, strict=True)) + wire
        muon = self._muon()
        if mode == "dense":
            return compute + wire + muon + adamw
        last = max(
            speed.row * (share % self.work.micro_batch or self.work.micro_batch)
            for speed, share in zip(self.speeds, shares, strict=True)
        )
        hidden = OVERLAP * (2 / 3 * last + muon)
        return compute + max(0.0, wire - hidden) + muon + adamw

    def _muon(self) -> float:
        """The slowest owner's part of Muon's work, shared out by speed."""
        costs = self.work.matrix_flops
        owners = share_out(costs, len(self.speeds), self.owner_speeds)
        total = sum(costs)
        return max(
            sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) / total * speed.muon
            for rank, speed in enumerate(self.speeds)
        )

    def pays_from(self, mode: str, rows: int) -> int | None:
        """The rows of a step from which all ranks are faster than one alone; None if none is found."""
        for times in range(1, LARGEST + 1):
            if self.step(mode, times * rows) < self.alone(times * rows)[0]:
                return times * rows
        return None


def choose(predictor: Predictor, rows: int, modes: Sequence[str]) -> str:
    """The fastest of these modes; one named before another goes first unless it is clearly slower."""
    best = modes[0]
    for mode in modes[1:]:
        if predictor.step(mode, rows) < (1 - BETTER) * predictor.step(best, rows):
            best = mode
    return best


def table(
    predictor: Predictor,
    rows: int,
    sequence_len: int,
    modes: Sequence[str],
    gpus: Mapping[str, Speed] | None = None,
) -> str:
    """Seconds a step and tokens a second, by mode and batch. gpus: those that are left idle, by host."""
    batches = [times * rows for times in TIMES]
    head = ["predicted, s a step (tok/s)", *(f"{batch * sequence_len:,} tokens" for batch in batches)]

    def line(name: str, seconds: Callable[[int], float]) -> list[str]:
        cells = [(seconds(batch), batch * sequence_len / seconds(batch)) for batch in batches]
        return [name, *(f"{each:.3g} ({speed:,.0f})" for each, speed in cells)]

    fastest = predictor.names[predictor.alone(rows)[1]]
    lines = [line(f"{host}'s GPU alone", gpu.solo) for host, gpu in (gpus or {}).items()]
    on_cpu = ", on its CPU" * bool(lines)
    lines.append(line(f"{fastest} alone{on_cpu}", lambda batch: predictor.alone(batch)[0]))
    if len(predictor.speeds) > 1:
        lines += [line(mode, lambda batch, mode=mode: predictor.step(mode, batch)) for mode in modes]  # type: ignore[misc]
    return render_table([head, *lines])


@dataclass(frozen=True)
class Prediction:
    """What the tracker and the closing line compare the run with."""

    sync: str
    step_seconds: float
    alone_seconds: float
    alone: str

    def saved(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def load(cls, saved: Mapping[str, Any] | None) -> Prediction | None:
        return cls(**saved) if saved else None

    def against(self, seconds: float) -> str:
        """predicted 5.2 s a step, measured 5.4."""
        return f"Predicted {self.step_seconds:.3g} s a step, measured {seconds:.3g}."


def verdict(predictor: Predictor, rows: int, sequence_len: int, mode: str) -> str:
    """A warning where one host alone would be faster, with the batch from which all pay; empty where not."""
    together, (alone, rank) = predictor.step(mode, rows), predictor.alone(rows)
    if len(predictor.speeds) == 1 or together <= alone:
        return ""
    from_rows = predictor.pays_from(mode, rows)
    remedy = (
        f"they pay from total_batch_size {from_rows * sequence_len} on"
        if from_rows
        else f"they would not at {LARGEST} times as many tokens either"
    )
    return (
        f"warning: the other ranks do not pay at {rows * sequence_len:,} tokens a step: "
        f"{predictor.names[rank]} alone would take {alone:.3g} s a step, all together take {together:.3g} "
        f"({mode}); {remedy}."
    )
