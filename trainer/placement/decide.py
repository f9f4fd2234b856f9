"""The placement of an attempt: rows per rank, speeds of owner ranks, sync mode. Rank 0 decides for all.

    measured = measure_all(group, model, optimizer, ...)       # of all ranks, equal on every rank
    placement, lines = decide(measured, names, plan, work, config, by_speed, obstacles)
    placement = broadcast_placement(group, placement)          # every rank gets the placement of rank 0
    if placement.faster_host: ...                              # the run moves to one host

When a run trains, speeds are measured only if `shares` or `sync` is auto. A run that resumes on the hosts of
its checkpoint measures nothing and keeps its placement, so that it resumes bitwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import RunConfig, canonical_json
from trainer.data.dataset import Dataset
from trainer.data.loader import batch_rows, read_sequences
from trainer.distributed.process_group import Collectives, Peer
from trainer.host.numerics import Numerics
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW
from trainer.outcome import Final
from trainer.placement.batch_split import first_split
from trainer.placement.cost_model import (
    CostModel,
    Prediction,
    StepWork,
    choose_mode,
    render_predictions,
    warn_of_baseline,
)
from trainer.placement.microbenchmark import (
    Link,
    Speed,
    measure_delay,
    measure_link,
    measure_speed,
    slowest_link,
)
from trainer.placement.single_host import FasterHost, find_faster_host, measure_gpu
from trainer.run_plan import Plan
from trainer.sync.fragment import Outer

COUNTED_TOKENS = 2**22  # enough for 62 steps of 65,536: the active rows of a sync round in local


@dataclass(frozen=True)
class Placement:
    """How the ranks divide the work of a step, as rank 0 has decided; equal on every rank.

    sync: the sync mode.
    shares: rows of a step, by rank.
    owner_speeds: relative speed of each rank at the updates of Muon; empty: all equal.
    prediction: the predicted seconds of a step; None if nothing was measured.
    faster_host: the rank whose GPU is faster than all ranks together, to whose host the run moves; None if
        there is no such rank.
    """

    sync: str
    shares: tuple[int, ...]
    owner_speeds: tuple[float, ...] = ()
    prediction: Prediction | None = None
    faster_host: FasterHost | None = None

    def saved(self) -> dict[str, Any]:
        """The placement as JSON values, for checkpoints and the other ranks: a dict of its fields."""
        return asdict(self)

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Placement:
        """The placement in `saved`, a dict that the method `saved` has returned."""
        return cls(
            str(saved["sync"]),
            tuple(saved["shares"]),
            tuple(saved.get("owner_speeds", ())),
            Prediction.load(saved.get("prediction")),
            FasterHost(**saved["faster_host"]) if saved.get("faster_host") else None,
        )

    def tags(self) -> dict[str, str]:
        """The tags of the placement for the tracker: {name: text}.

        Names: `placement.sync`; `placement.owner_speeds` if the speeds are known; `predicted.NAME` for
        each field of the prediction, if there is a prediction.
        """
        tags = {"placement.sync": self.sync}
        if self.owner_speeds:
            tags["placement.owner_speeds"] = "/".join(map(str, self.owner_speeds))
        if self.prediction:
            tags |= {f"predicted.{name}": str(value) for name, value in asdict(self.prediction).items()}
        return tags

    def digest(self) -> str:
        """The first 16 hex digits of the sha256 of the placement, with which ranks compare placements."""
        return hashlib.sha256(canonical_json(self.saved())).hexdigest()[:16]


@dataclass(frozen=True)
class RankMeasurements:
    """The measurements of one rank.

    speed: the measured seconds of the rank on the device of the run.
    link: bandwidth and latency to the other ranks; None with one rank.
    gpu: the measured seconds on the idle GPU of the rank, which the run does not use because other ranks have
        no GPU; None without an idle GPU, or if its memory is too small.
    gpu_too_small: whether the memory of the idle GPU is too small for this model and micro-batch.
    """

    speed: Speed
    link: Link | None
    gpu: Speed | None = None
    gpu_too_small: bool = False

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> RankMeasurements:
        """The measurements in `saved`, a dict of the fields in which speed, link and gpu are dicts too."""
        link, gpu = saved["link"], saved["gpu"]
        return cls(
            Speed(**saved["speed"]), link and Link(**link), gpu and Speed(**gpu), saved["gpu_too_small"]
        )


def measure_all(
    group: Collectives,
    model: GPT,
    optimizer: MuonAdamW,
    numerics: Numerics,
    gpu: Numerics | None,
    batch_size: int,
) -> list[RankMeasurements]:
    """Measure speed and link of every rank; every rank returns the results of all ranks. A collective call.

    model, optimizer: of this rank; weights and optimizer state are overwritten. numerics: device and number
    formats of this rank. gpu: device and number formats of the GPU that the run does not use, because other
    ranks have no GPU; None without such a GPU. batch_size: rows of a micro-batch. The results are in rank
    order. All ranks measure at the same time, because ranks of one host also share its processors in a step.
    """
    link = measure_link(group, numerics.device)
    if link and numerics.device.type == "cpu":
        link = replace(link, delay=measure_delay(group))
    speed = measure_speed(model, optimizer, batch_size)
    on_gpu = measure_gpu(gpu, model, batch_size) if gpu else None
    mine = asdict(RankMeasurements(speed, link, on_gpu, gpu is not None and on_gpu is None))
    return [RankMeasurements.load(json.loads(one)) for one in group.gather_bytes(json.dumps(mine).encode())]


def work_of(model: GPT, optimizer: MuonAdamW, data: Dataset, plan: Plan, config: RunConfig) -> StepWork:
    """The sizes of a step of a run, for the cost model.

    model, optimizer, data, plan, config: those of the run. The number of active embedding rows is counted in
    the sequences that the run trains on first.
    """

    @functools.cache
    def first_seen() -> NDArray[np.int64]:
        """For each token, the number of the first row of the run that has it; sorted ascending."""
        count = min(COUNTED_TOKENS // config.sequence_len, len(data.train))
        rows = read_sequences(data.train, batch_rows(config.seed, 0, count, len(data.train))).tokens
        _, first = np.unique(rows[:, :-1], return_index=True)
        return np.sort(first // config.sequence_len)

    def active(rows: int) -> int:
        """The number of different tokens in the first `rows` rows of the run: its active embedding rows."""
        return int(np.searchsorted(first_seen(), rows))

    return step_work(model, optimizer, config.device_batch_size, active)


def step_work(model: GPT, optimizer: MuonAdamW, micro_batch: int, active: Callable[[int], int]) -> StepWork:
    """The sizes of a step of `model` with `optimizer`. micro_batch, active: see StepWork."""
    counts = model.param_counts()
    tables = counts["wte"] + counts["value_embeds"]
    return StepWork(
        tables=tables,
        table_width=tables // model.config.padded_vocab_size,
        matrices=counts["transformer_matrices"],
        others=counts["lm_head"] + counts["scalars"],
        matrix_flops=tuple(float(matrix.flops) for matrix in optimizer.muon_parameters()),
        micro_batch=micro_batch,
        active=active,
        value_bytes=next(model.parameters()).element_size(),
    )


def rank_names(peers: Sequence[Peer]) -> list[str]:
    """The name of each rank in messages: its host, or HOST/RANK if that host has several ranks."""
    counts = Counter(peer.host for peer in peers)
    return [peer.host if counts[peer.host] == 1 else f"{peer.host}/{peer.rank}" for peer in peers]


def decide(
    measured: Sequence[RankMeasurements],
    names: Sequence[str],
    plan: Plan,
    work: StepWork,
    config: RunConfig,
    by_speed: bool,
    obstacles: Mapping[int, str],
) -> tuple[Placement, list[str]]:
    """Decide the placement from the measurements of all ranks; returns (placement, lines for the log).

    This is a pure function.
    measured, names: measurements and name of each rank.
    plan, config: plan and settings of the run. work: the sizes of a step.
    by_speed: whether the rows are split by speed.
    obstacles: {rank: why the run cannot move to its host}; a rank to whose host the run can move is missing.
    Muon's matrices are assigned to owner ranks by speed if `by_speed` is True or sync is auto. If the GPU of
    one rank is faster than all ranks together and there is no obstacle, the field `faster_host` of the
    placement names that rank.
    """
    rows, length = plan.rows_per_step, plan.model.sequence_len
    speeds = [one.speed for one in measured]
    links = [one.link for one in measured if one.link]
    slowest = slowest_link(links) if links else None
    owners_by_speed = by_speed or config.sync == "auto"
    split = None if by_speed else plan.shares
    cost_model = CostModel(speeds, slowest, work, names, split, owners_by_speed, Outer.of(config))
    change = first_split([speed.row for speed in speeds], rows, names) if by_speed else None
    shares = change.shares if change else plan.shares
    modes = config.auto_modes
    best = choose_mode(cost_model, rows, modes)
    mode = best if config.sync == "auto" else config.sync
    step = cost_model.step(mode, rows, shares)
    gpus = {rank: one.gpu for rank, one in enumerate(measured) if one.gpu}
    faster_host = find_faster_host(gpus, rows, step, obstacles)
    transfers = faster_host is not None and not faster_host.obstacle
    lines = []
    if change and not transfers:
        lines.append(f"rows of a step: {change.reason}")
    if config.sync == "auto" and not transfers and len(names) > 1:
        others = ", ".join(other for other in modes if other != mode)
        lines.append(f"sync is {mode}, the fastest by prediction (not {others})")
    elif mode in modes and mode != best:
        seconds = cost_model.step(best, rows, shares)
        lines.append(f"sync=auto would select {best}, with a predicted {seconds:.3g} s a step")
    baseline_seconds, rank = cost_model.single_host(rows)
    lines.append(
        render_predictions(cost_model, rows, length, {names[rank]: gpu for rank, gpu in gpus.items()})
    )
    if not transfers:
        lines.append(warn_of_baseline(cost_model, rows, length, mode))
    if faster_host:
        lines.append(faster_host.verdict(names))
    lines += [
        f"warning: the GPU of {name} has too little memory for this model and device_batch_size."
        for name, one in zip(names, measured, strict=True)
        if one.gpu_too_small
    ]
    prediction = Prediction(mode, round(step, 4), round(baseline_seconds, 4), names[rank])
    owners = cost_model.owner_speeds if owners_by_speed else ()
    placement = Placement(mode, tuple(shares), tuple(owners), prediction, faster_host if transfers else None)
    return placement, [line for line in lines if line]


def broadcast_placement(group: Collectives, placement: Placement | None) -> Placement:
    """Broadcast the placement of rank 0; returns it on every rank. Other ranks' arguments are ignored."""
    mine = json.dumps(placement.saved()).encode() if placement is not None and group.rank == 0 else b""
    return Placement.load(json.loads(group.gather_bytes(mine)[0]))


def restore_placement(placement: Placement, meta: Mapping[str, Any], by_speed: bool, auto: bool) -> Placement:
    """`placement` with values from a checkpoint of the same hosts.

    meta: content of the checkpoint's meta.json; the values are in its keys `placement` (a saved placement)
    and `shares`. by_speed: whether rows are split by speed. auto: whether the setting sync is auto. The
    checkpoint always sets owner_speeds and prediction; it sets the rows per rank only if `by_speed` is True,
    and the sync mode only if `auto` is True.
    """
    before = meta.get("placement") or meta.get("arrangement") or {}  # as older ones have it
    return replace(
        placement,
        shares=tuple(meta["shares"]) if by_speed else placement.shares,
        sync=before.get("sync", placement.sync) if auto else placement.sync,
        owner_speeds=tuple(before.get("owner_speeds", ())),
        prediction=Prediction.load(before.get("prediction")),
    )


def compare_placements(peers: Sequence[Peer], digests: Sequence[str]) -> None:
    """Raise Final, naming the ranks, if the placement differs between ranks.

    peers: all ranks, in rank order. digests: the result of `Placement.digest` of each rank, in rank order.
    """
    others = [f"{peer} has {own}" for peer, own in zip(peers, digests, strict=True) if own != digests[0]]
    if others:
        raise Final(
            "The ranks have different placements (such as sync mode and rows per rank). The digest of rank 0 "
            f"is {digests[0]}, but {', '.join(others)}. Start the run again. If this repeats, report it "
            "with the logs of all ranks: ansible-playbook logs.yml"
        )
