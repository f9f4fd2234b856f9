"""The cost model: predicted seconds per step on one host and in every sync mode, for several batch sizes.

    model = CostModel(speeds, link, work, names)
    model.step("exact", rows=16)                   # seconds, with the rows split by speed
    model.single_host(rows=16)                     # (seconds, rank): the single-host baseline
    choose_mode(model, 16, ["dense", "exact"])     # the fastest mode

Pure arithmetic over measured speeds (trainer.placement.microbenchmark) and counted bytes. At its end, a run
reports the predicted and the measured seconds of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from trainer.config import SYNC_MODES
from trainer.data.loader import equal_split, proportional_split
from trainer.formatting import render_table
from trainer.placement.batch_split import relative_speeds, slowest, split_rows
from trainer.placement.microbenchmark import Link, Speed
from trainer.sync.buckets import assign_owners
from trainer.sync.compressor import make_compressor
from trainer.sync.fragment import TAIL_STEPS, Outer

BETTER = 0.03  # the part of a step by which a mode must be faster than those listed before it
TIMES = (1, 4, 16)  # multiples of the batch in the table
LARGEST = 64  # the largest multiple of the batch that `pays_from` tries


@dataclass(frozen=True)
class StepWork:
    """The sizes that determine the cost of a step.

    tables: number of parameters in all embedding tables together.
    table_width: number of values that one token has in all tables together.
    matrices: number of parameters in the matrices that Muon updates.
    others: number of parameters of lm_head and the scalars.
    matrix_flops: FLOPs of Muon's update of each matrix.
    micro_batch: rows of a micro-batch.
    active: function of a number of rows of data, which returns how many different tokens these rows have:
        the number of active embedding rows.
    value_bytes: bytes of one parameter value.
    """

    tables: int
    table_width: int
    matrices: int
    others: int
    matrix_flops: tuple[float, ...]
    micro_batch: int
    active: Callable[[int], int]
    value_bytes: int = 4

    @property
    def backward(self) -> float:
        """The part of the FLOPs of forward and backward that is backward, estimated from the parameters.

        Backward of lm_head is part of the forward phase: the loss computes the gradients with its value.
        """
        return 2 / 3 * self.matrices / (self.matrices + self.others)


def _check(mode: str) -> None:
    """Raise ValueError if `mode` is not a sync mode."""
    if mode not in SYNC_MODES:
        raise ValueError(f"no cost is known for the sync mode {mode!r}, only for {', '.join(SYNC_MODES)}")


def payload(mode: str, work: StepWork, rows: int, world_size: int, outer: Outer | None = None) -> float:
    """Bytes that a rank sends in a step in the sync mode `mode`; for local, the mean over the steps.

    work: the sizes of a step. rows: rows of the step over all ranks. world_size: number of ranks. outer: the
    settings of sync=local; None: the defaults. With n ranks, each rank sends (n-1)/n of the values in a
    reduce, and (n-1)/n of them in a broadcast. Raises ValueError for an unknown mode.
    """
    _check(mode)
    copies = 2 * (world_size - 1) / world_size
    if mode == "dense":
        return copies * work.value_bytes * (work.tables + work.matrices + work.others)
    if mode == "local":
        outer = outer or Outer()
        seen = work.active((outer.steps + TAIL_STEPS) * rows)
        values = seen * work.table_width + work.matrices + work.others
        packed = values * make_compressor(outer.bits, outer.topk).bytes_per_value
        return (world_size - 1) * packed / outer.steps
    gradient_bytes = 2 if mode == "fast" else work.value_bytes
    # A rank fetches the values of the active rows of its own rows of data, and sends their gradients back.
    active = mean(work.active(share) for share in equal_split(rows, world_size))
    of_tables = copies / 2 * active * work.table_width * (work.value_bytes + gradient_bytes)
    return of_tables + copies * (work.matrices + work.others) * gradient_bytes


def transfer_seconds(sent: float, link: Link) -> float:
    """Predicted seconds of a rank's transfers in a step if they do not overlap with computation.

    sent: bytes that the rank sends. link: bandwidth and latency between the ranks.
    """
    return sent / link.bandwidth + 4 * link.latency


@dataclass(frozen=True)
class CostModel:
    """Predicts the seconds of a step on one host and on all ranks, in each sync mode.

    speeds: the measured Speed of each rank.
    link: bandwidth and latency between the ranks; None with one rank.
    work: the sizes of a step.
    names: names of the ranks, for messages.
    split: rows per rank; the rows of a step are split in these proportions. None: they are split by speed.
    owners_by_speed: whether Muon's matrices are assigned to owner ranks by speed, or equally.
    outer: the settings of sync=local; None: the defaults.
    """

    speeds: Sequence[Speed]
    link: Link | None
    work: StepWork
    names: Sequence[str]
    split: Sequence[int] | None = None
    owners_by_speed: bool = True
    outer: Outer | None = None

    def shares(self, rows: int) -> list[int]:
        """Rows per rank of a step of `rows` rows."""
        if self.split is not None:
            return proportional_split(self.split, rows)
        return split_rows([speed.row for speed in self.speeds], rows)

    @property
    def owner_speeds(self) -> list[float]:
        """Relative speed of each rank, by which Muon matrices are assigned to owner ranks."""
        seconds = [speed.muon if self.owners_by_speed else 1.0 for speed in self.speeds]
        return relative_speeds(seconds)

    def single_host(self, rows: int) -> tuple[float, int]:
        """The single-host baseline for a step of `rows` rows: the rank that is fastest by itself.

        Returns (predicted seconds of the step on this rank, number of this rank).
        """
        return min((speed.step_alone(rows), rank) for rank, speed in enumerate(self.speeds))

    def step(self, mode: str, rows: int, shares: Sequence[int] = ()) -> float:
        """Predicted seconds of a step of `rows` rows over all ranks, in the sync mode `mode`.

        shares: rows per rank, by default self.shares(rows). Raises ValueError for an unknown mode.
        """
        _check(mode)
        shares = shares or self.shares(rows)
        compute = slowest([speed.row for speed in self.speeds], shares)
        adamw = max(speed.adamw for speed in self.speeds)
        if self.link is None:
            return self.speeds[0].step_alone(rows)
        sent = payload(mode, self.work, rows, len(self.speeds), self.outer)
        wire = transfer_seconds(sent, self.link)
        if mode == "local":
            return max(s.step_alone(r) for s, r in zip(self.speeds, shares, strict=True)) + wire
        muon = self._muon()
        if mode == "dense":
            return compute + wire + muon + adamw
        last = max(
            speed.row * (share % self.work.micro_batch or self.work.micro_batch)
            for speed, share in zip(self.speeds, shares, strict=True)
        )
        # The last micro-batch's backward and the optimizer overlap with transfers, and are slowed by them.
        hidden = min(wire, self.work.backward * last + muon)
        slowed = hidden / wire * sent * self.link.delay
        return compute + slowed + wire - hidden + muon + adamw / len(self.speeds)

    def network(self, mode: str, rows: int) -> float:
        """Predicted seconds of a rank's transfers in a step of `rows` rows in the sync mode `mode`.

        The result is 0 with one rank. It includes transfers that overlap with computation. Raises ValueError
        for an unknown mode.
        """
        _check(mode)
        if self.link is None:
            return 0.0
        sent = payload(mode, self.work, rows, len(self.speeds), self.outer)
        return transfer_seconds(sent, self.link)

    def _muon(self) -> float:
        """Seconds that the slowest owner rank takes for its Muon matrices."""
        costs = self.work.matrix_flops
        of_rank = [0.0] * len(self.speeds)
        for cost, owner in zip(costs, assign_owners(costs, len(self.speeds), self.owner_speeds), strict=True):
            of_rank[owner] += cost
        total = sum(costs)
        return max(cost / total * speed.muon for cost, speed in zip(of_rank, self.speeds, strict=True))

    def pays_from(self, mode: str, rows: int) -> int | None:
        """The smallest number of rows per step with which all ranks are faster than the single-host baseline.

        mode: the sync mode. rows: rows of a step of the run; its multiples up to LARGEST times are tried.
        Returns None if all ranks are not faster with any of these multiples.
        """
        batches = (times * rows for times in range(1, LARGEST + 1))
        return next((each for each in batches if self.step(mode, each) < self.single_host(each)[0]), None)


def choose_mode(model: CostModel, rows: int, modes: Sequence[str]) -> str:
    """The sync mode of `modes` with the shortest step of `rows` rows, as predicted by `model`.

    A mode is preferred to those before it in `modes` only if its step is shorter by more than the fraction
    BETTER.
    """
    best = modes[0]
    for mode in modes[1:]:
        if model.step(mode, rows) < (1 - BETTER) * model.step(best, rows):
            best = mode
    return best


def render_predictions(model: CostModel, rows: int, sequence_len: int, gpus: Mapping[str, Speed]) -> str:
    """A table of predicted seconds per step and tokens per second, by sync mode and batch size, as text.

    model: the cost model. rows: rows of a step of the run. sequence_len: tokens of a row. gpus: {host:
    measured seconds on its idle GPU}.
    """
    batches = [times * rows for times in TIMES]
    head = ["predicted, s a step (tok/s)", *(f"{batch * sequence_len:,} tokens" for batch in batches)]

    def line(name: str, seconds: Callable[[int], float]) -> list[str]:
        cells = [(seconds(batch), batch * sequence_len / seconds(batch)) for batch in batches]
        return [name, *(f"{each:.3g} ({speed:,.0f})" for each, speed in cells)]

    fastest = model.names[model.single_host(rows)[1]]
    lines = [line(f"{host}'s GPU alone", gpu.step_alone) for host, gpu in gpus.items()]
    on_cpu = ", on its CPU" * bool(lines)
    lines.append(line(f"{fastest} alone{on_cpu}", lambda batch: model.single_host(batch)[0]))
    if len(model.speeds) > 1:
        lines += [line(mode, functools.partial(model.step, mode)) for mode in SYNC_MODES]
    return render_table([head, *lines])


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds of a step of a run.

    sync: the sync mode of the run. step_seconds: seconds of a step on all ranks in that mode. baseline: name
    of the rank that is fastest by itself. baseline_seconds: seconds of a step on that rank by itself.
    """

    sync: str
    step_seconds: float
    baseline_seconds: float
    baseline: str

    @classmethod
    def load(cls, saved: Mapping[str, Any] | None) -> Prediction | None:
        """The prediction in `saved`, a dict of its fields; None if `saved` is empty or None."""
        if not saved:
            return None
        renamed = {"alone": "baseline", "alone_seconds": "baseline_seconds"}  # as older checkpoints have them
        return cls(**{renamed.get(name, name): value for name, value in saved.items()})

    def against(self, seconds: float) -> str:
        """The sentence that compares the prediction with the measured `seconds` of a step.

        For example: "Predicted 5.2 s a step, measured 5.4."
        """
        return f"Predicted {self.step_seconds:.3g} s a step, measured {seconds:.3g}."


def warn_of_baseline(model: CostModel, rows: int, sequence_len: int, mode: str) -> str:
    """The warning that the single-host baseline is faster than all ranks in the mode `mode`; "" if it is not.

    model: the cost model. rows: rows of a step. sequence_len: tokens of a row. The warning names the batch
    size from which all ranks together are faster, if one was found.
    """
    together, (alone, rank) = model.step(mode, rows), model.single_host(rows)
    if len(model.speeds) == 1 or together <= alone:
        return ""
    from_rows = model.pays_from(mode, rows)
    remedy = (
        f"All ranks together are faster from total_batch_size {from_rows * sequence_len} on (a new run)"
        if from_rows
        else f"They are not faster with {LARGEST} times as many tokens either"
    )
    return (
        f"warning: {model.names[rank]} alone is predicted to be faster than all ranks together: "
        f"{alone:.3g} s a step instead of {together:.3g} s ({mode}) at {rows * sequence_len:,} tokens a "
        f"step. {remedy}."
    )
