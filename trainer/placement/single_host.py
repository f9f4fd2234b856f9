"""A GPU that ranks leave idle as others have none: whether it would by itself be faster than all of them.

speed = speed_on(numerics, model, batch_size)              # on the rank that has one
alone = fastest_alone({1: speed}, rows, step, obstacles)   # the same on every rank
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import RunConfig
from trainer.distributed.process_group import Peer
from trainer.host.numerics import Numerics
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import build_optimizer
from trainer.outcome import LeftToOne
from trainer.placement.microbenchmark import Speed, measure_speed


@dataclass(frozen=True)
class Alone:
    """A rank whose GPU would by itself be faster than all ranks on their CPUs; seconds a step.

    obstacle: why the run cannot be left to it; empty where it can.
    """

    rank: int
    seconds: float
    together: float
    obstacle: str = ""

    def said(self, names: Sequence[str]) -> str:
        return (
            f"The GPU of {names[self.rank]} would take {self.seconds:.3g} s a step alone, {len(names)} ranks "
            f"together, on their CPUs, {self.together:.3g} s."
        )

    def verdict(self, names: Sequence[str]) -> str:
        if self.obstacle:
            return f"warning: {self.said(names)} The run is not left to it: {self.obstacle}."
        return f"sync is auto: {self.said(names)} It should train by itself."

    def end(self, peers: Sequence[Peer], names: Sequence[str], said: Sequence[str]) -> LeftToOne:
        """Of ranks that have met and cannot become one; who has started them can start that one."""
        host = peers[self.rank].host
        sentence = f"{self.said(names)} The run is for {host} alone, or for all with another sync than auto."
        return LeftToOne(sentence, host, self.seconds, self.together, "\n".join(said))


def find_obstacles(
    config: RunConfig,
    fixed_shares: Sequence[int],
    meta: Mapping[str, Any],
    peers: Sequence[Peer],
    asked_anew: bool,
) -> dict[int, str]:
    """By rank, why a run that begins with a state of this meta cannot be left to that rank's host alone.

    asked_anew: whether somebody has started this attempt: one that follows on another has nobody to move it.
    """
    why = ""
    if config.sync != "auto":
        why = f"sync is {config.sync}, not auto"
    elif fixed_shares:
        why = "its shares were given by hand"
    elif meta.get("step"):
        why = "it goes on from a checkpoint"
    elif not asked_anew:
        why = "it has restarted by itself, so nobody is there to start it elsewhere"
    if why:
        return {peer.rank: why for peer in peers}
    elsewhere = [peer.rank for peer in peers if "imported" in meta and peer.host != peers[0].host]
    return dict.fromkeys(elsewhere, f"its imported weights are on {peers[0].host}")


def fastest_alone(
    gpus: Mapping[int, Speed], rows: int, step: float, obstacles: Mapping[int, str]
) -> Alone | None:
    """The GPU, by rank, that needs the least for a step of so many rows, and less than all ranks' `step`.

    One that the run can be left to goes before those that have an obstacle.
    """
    faster = [
        (rank in obstacles, gpu.solo(rows), rank) for rank, gpu in gpus.items() if gpu.solo(rows) < step
    ]
    if not faster:
        return None
    _, seconds, rank = min(faster)
    return Alone(rank, round(seconds, 6), round(step, 6), obstacles.get(rank, ""))


def speed_on(gpu: Numerics, model: GPT, batch_size: int) -> Speed | None:
    """What a model of this shape takes on the GPU, None if its memory is too small; it is free afterwards."""
    torch.cuda.set_device(gpu.device)
    try:
        return _measured_on(gpu, model, batch_size)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _measured_on(gpu: Numerics, model: GPT, batch_size: int) -> Speed:
    there = GPT(model.config).to(gpu.device, gpu.dtype)
    rates = dict.fromkeys(("unembedding_lr", "embedding_lr", "matrix_lr", "scalar_lr", "weight_decay"), 0.1)
    optimizer = build_optimizer(there, **rates)
    there.compute_dtype = optimizer.compute_dtype = gpu.compute_dtype
    return measure_speed(there, optimizer, batch_size)
