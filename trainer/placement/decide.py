"""Who does what in this attempt: rows by rank, owners' speeds, sync mode. Rank 0 decides it for all.

    measured = measure_all(model, optimizer, group, ...)       # by rank, on every rank
    arrangement, said = decide(measured, names, plan, work, config, by_speed, obstacles)
    arrangement = hand_out(group, arrangement)                 # rank 0's, on every rank
    if arrangement.alone: ...                                  # the run is one host's, by itself

Nothing is measured unless something is left to be decided: shares or sync are auto, and the checkpoint is not
one of the same hosts, whose arrangement stays so that the run goes on bitwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import EXACT_MODES, SYNC_MODES, RunConfig, canonical_json
from trainer.data.dataset import Dataset
from trainer.data.loader import batch_rows
from trainer.distributed.process_group import Group, Peer
from trainer.host.numerics import Numerics
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW
from trainer.outcome import Final
from trainer.placement.batch_split import first_table, relative_speeds
from trainer.placement.cost_model import Prediction, Predictor, Work, choose, table, verdict
from trainer.placement.microbenchmark import Link, Speed, measure_link, measure_speed
from trainer.placement.single_host import Alone, fastest_alone, speed_on
from trainer.run_plan import Plan
from trainer.sync.local import Outer

COUNTED_TOKENS = 2**22  # enough for 62 steps of 65,536: what local's meetings send of embeddings


@dataclass(frozen=True)
class Arrangement:
    """What rank 0 has decided; the same on every rank. With `alone` nothing is trained by these ranks."""

    sync: str
    shares: tuple[int, ...]
    owner_speeds: tuple[float, ...] = ()
    prediction: Prediction | None = None
    alone: Alone | None = None

    def saved(self) -> dict[str, Any]:
        """Plain JSON for checkpoints and the other ranks."""
        return asdict(self)

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Arrangement:
        return cls(
            str(saved["sync"]),
            tuple(saved["shares"]),
            tuple(saved.get("owner_speeds", ())),
            Prediction.load(saved.get("prediction")),
            Alone(**saved["alone"]) if saved.get("alone") else None,
        )

    def tags(self) -> dict[str, str]:
        """For the tracker."""
        tags = {"arrangement.sync": self.sync}
        if self.owner_speeds:
            tags["arrangement.owner_speeds"] = "/".join(map(str, self.owner_speeds))
        if self.prediction:
            tags |= {f"predicted.{name}": str(value) for name, value in self.prediction.saved().items()}
        return tags

    def digest(self) -> str:
        return hashlib.sha256(canonical_json(self.saved())).hexdigest()[:16]


@dataclass(frozen=True)
class Measured:
    """A rank's own speed, that of the link, and that of a GPU which the run cannot use as others lack one."""

    speed: Speed
    link: Link | None
    gpu: Speed | None = None
    gpu_too_small: bool = False  # its memory, for this model and micro-batch


def measure_all(
    group: Group, model: GPT, optimizer: MuonAdamW, numerics: Numerics, gpu: Numerics | None, batch_size: int
) -> list[Measured]:
    """Every rank's figures, on every rank. All measure at once: ranks that share a host do so in the run."""
    link = measure_link(group, numerics.device)
    speed = measure_speed(model, optimizer, batch_size)
    on_gpu = speed_on(gpu, model, batch_size) if gpu else None
    mine = asdict(Measured(speed, link, on_gpu, gpu is not None and on_gpu is None))
    gathered = map(json.loads, group.gather_bytes(json.dumps(mine).encode()))
    return [
        Measured(
            Speed(**one["speed"]),
            Link(**one["link"]) if one["link"] else None,
            Speed(**one["gpu"]) if one["gpu"] else None,
            one["gpu_too_small"],
        )
        for one in gathered
    ]


def work_of(model: GPT, optimizer: MuonAdamW, data: Dataset, plan: Plan, config: RunConfig) -> Work:
    """What a step has to do and to send."""
    counts = model.param_counts()
    tables = counts["wte"] + counts["value_embeds"]

    @functools.cache
    def first_seen() -> NDArray[np.int64]:
        """The row, in the run's order, in which each token is an input for the first time; ascending."""
        count = min(COUNTED_TOKENS // config.sequence_len, len(data.train))
        rows = data.train[batch_rows(config.seed, 0, count, len(data.train))]
        _, first = np.unique(rows[:, :-1], return_index=True)
        return np.sort(first // config.sequence_len)

    def touched(rows: int) -> int:
        """Unique input tokens of the first `rows` rows."""
        return int(np.searchsorted(first_seen(), rows))

    return Work(
        tables=tables,
        table_width=tables // plan.model.padded_vocab_size,
        matrices=counts["transformer_matrices"],
        others=counts["lm_head"] + counts["scalars"],
        matrix_flops=tuple(float(matrix.flops) for matrix in optimizer.muon_parameters()),
        micro_batch=config.device_batch_size,
        touched=touched,
        value_bytes=next(model.parameters()).element_size(),
    )


def names_of(peers: Sequence[Peer]) -> list[str]:
    """The hosts' names; with the rank where a host has several."""
    times = Counter(peer.host for peer in peers)
    return [peer.host if times[peer.host] == 1 else f"{peer.host}/{peer.rank}" for peer in peers]


def decide(
    measured: Sequence[Measured],
    names: Sequence[str],
    plan: Plan,
    work: Work,
    config: RunConfig,
    by_speed: bool,
    obstacles: Mapping[int, str],
) -> tuple[Arrangement, list[str]]:
    """The arrangement, and what to say about it. Pure. `by_speed`: the rows may be split by speed.

    Owners are by speed where anything may be; a run that leaves nothing open is predicted as it is.
    Where the GPU of one host would by itself be faster than all hosts together, the run is for that host
    `alone`. obstacles: by rank, why the run cannot be left to it.
    """
    rows, length = plan.rows_per_step, plan.model.sequence_len
    speeds = [one.speed for one in measured]
    predictor = Predictor(speeds, _slowest_link(measured), work, names, by_speed, Outer.of(config))
    change = first_table([speed.row for speed in speeds], rows, names) if by_speed else None
    shares = change.shares if change else plan.shares
    modes = [*EXACT_MODES, *config.sync_allow.split(",")] if config.sync_allow else list(EXACT_MODES)
    best = choose(predictor, rows, modes)
    mode = best if config.sync == "auto" else config.sync
    step = predictor.step(mode, rows, shares)
    gpus = {rank: one.gpu for rank, one in enumerate(measured) if one.gpu}
    by_gpu = fastest_alone(gpus, rows, step, obstacles)
    moves = by_gpu is not None and not by_gpu.obstacle
    said = []
    if change and not moves:
        said.append(f"rows of a step: {change.reason}")
    if config.sync == "auto" and not moves and len(names) > 1:
        others = ", ".join(other for other in modes if other != mode)
        said.append(f"sync is {mode}, the fastest by prediction (not {others})")
    elif mode in modes and mode != best:
        said.append(f"sync=auto would take {best}: {predictor.step(best, rows, shares):.3g} s a step")
    solo, rank = predictor.alone(rows)
    said.append(table(predictor, rows, length, SYNC_MODES, {names[rank]: gpu for rank, gpu in gpus.items()}))
    if not moves:
        said.append(verdict(predictor, rows, length, mode))
    if by_gpu:
        said.append(by_gpu.verdict(names))
    said += [
        f"warning: the GPU of {name} has too little memory for this model and device_batch_size."
        for name, one in zip(names, measured, strict=True)
        if one.gpu_too_small
    ]
    prediction = Prediction(mode, round(step, 4), round(solo, 4), names[rank])
    owners = relative_speeds([speed.muon for speed in speeds]) if by_speed or config.sync == "auto" else ()
    arrangement = Arrangement(mode, tuple(shares), tuple(owners), prediction, by_gpu if moves else None)
    return arrangement, [line for line in said if line]


def _slowest_link(measured: Sequence[Measured]) -> Link | None:
    links = [one.link for one in measured if one.link]
    if not links:
        return None
    return Link(min(link.goodput for link in links), max(link.latency for link in links))


def hand_out(group: Group, arrangement: Arrangement | None) -> Arrangement:
    """Rank 0's arrangement on every rank."""
    mine = json.dumps(arrangement.saved()).encode() if arrangement is not None and group.rank == 0 else b""
    return Arrangement.load(json.loads(group.gather_bytes(mine)[0]))


def again(arrangement: Arrangement, meta: Mapping[str, Any], by_speed: bool, auto: bool) -> Arrangement:
    """As a checkpoint of the same hosts had it; shares given by hand and a named sync mode stay theirs."""
    before = meta.get("arrangement") or {}
    return replace(
        arrangement,
        shares=tuple(meta["shares"]) if by_speed else arrangement.shares,
        sync=before.get("sync", arrangement.sync) if auto else arrangement.sync,
        owner_speeds=tuple(before.get("owner_speeds", ())),
        prediction=Prediction.load(before.get("prediction")),
    )


def compare_arrangements(peers: Sequence[Peer], digests: Sequence[str]) -> None:
    """Raise Final, naming the ranks, if they are about to train by unlike tables."""
    odd = [
        f"{peer} has {digest}" for peer, digest in zip(peers, digests, strict=True) if digest != digests[0]
    ]
    if odd:
        raise Final(f"The tables of shares and owners differ: rank 0 has {digests[0]}, {', '.join(odd)}.")
