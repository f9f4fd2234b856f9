"""The transfer of a run to one host whose GPU is faster than all ranks on their CPUs.

speed = measure_gpu(numerics, model, batch_size)              # on the rank that has a GPU
faster = find_faster_host({1: speed}, rows, step, obstacles)  # equal on every rank
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
from trainer.outcome import TransferToHost
from trainer.placement.microbenchmark import Speed, measure_speed


@dataclass(frozen=True)
class FasterHost:
    """A rank whose GPU is faster than all ranks on their CPUs together.

    rank: the rank that has the GPU.
    seconds: predicted seconds of a step on that GPU.
    together: predicted seconds of a step on all ranks.
    obstacle: why the run cannot move to the host of the rank; "" if it can.
    """

    rank: int
    seconds: float
    together: float
    obstacle: str = ""

    def sentence(self, names: Sequence[str]) -> str:
        """A sentence that compares a step on the GPU with a step on all ranks. names: names of the ranks."""
        return (
            f"A step is predicted to take {self.seconds:.3g} s on the GPU of {names[self.rank]} alone, and "
            f"{self.together:.3g} s on the CPUs of all {len(names)} ranks."
        )

    def verdict(self, names: Sequence[str]) -> str:
        """The line for the log: the comparison, and whether the run moves to the host of the GPU.

        names: names of the ranks.
        """
        if self.obstacle:
            return f"warning: {self.sentence(names)} The run does not move there: {self.obstacle}."
        return f"sync is auto: {self.sentence(names)} That host should train alone."

    def end(self, peers: Sequence[Peer], names: Sequence[str], table: Sequence[str]) -> TransferToHost:
        """The exception that ends the attempt on all ranks, so that the run can be started on one host.

        A new attempt is needed because a process group cannot shrink. peers, names: all ranks and their
        names, in rank order. table: lines of the predictions, for the log.
        """
        host = peers[self.rank].host
        sentence = (
            f"{self.sentence(names)} train.yml transfers the run to {host}; without the playbooks, start it "
            f"on {host} only. To train on all hosts instead, choose another mode than auto: -e sync=exact, "
            "without the playbooks --sync exact."
        )
        return TransferToHost(sentence, host, self.seconds, self.together, "\n".join(table))


def find_obstacles(
    config: RunConfig,
    fixed_shares: Sequence[int],
    meta: Mapping[str, Any],
    peers: Sequence[Peer],
    requested: bool,
) -> dict[int, str]:
    """The reasons why the run cannot move to the host of a rank: {rank: reason}.

    A rank to whose host the run can move is missing.
    config: settings of the run. fixed_shares: rows per rank that are set by hand; empty for none.
    meta: content of meta.json of the checkpoint that the run starts from; {"step": 0} without a checkpoint.
    peers: all ranks, in rank order.
    requested: whether a person started this attempt. A run that has restarted by itself does not move.
    """
    why = ""
    if config.sync != "auto":
        why = f"sync is {config.sync}, not auto"
    elif fixed_shares:
        why = "its shares are set by hand"
    elif meta.get("step"):
        why = "it resumes from a checkpoint"
    elif not requested:
        why = "it has restarted by itself, and only train.yml transfers a run"
    if why:
        return {peer.rank: why for peer in peers}
    elsewhere = [peer.rank for peer in peers if "imported" in meta and peer.host != peers[0].host]
    return dict.fromkeys(elsewhere, f"its imported weights are on {peers[0].host}")


def find_faster_host(
    gpus: Mapping[int, Speed], rows: int, step: float, obstacles: Mapping[int, str]
) -> FasterHost | None:
    """The rank whose idle GPU takes the fewest seconds for a step.

    None if no GPU is faster than all ranks together. gpus: {rank: measured seconds on its idle GPU}. rows:
    rows of a step. step: predicted seconds of a step on all ranks. obstacles: the result of `find_obstacles`;
    a GPU without an obstacle is preferred.
    """
    seconds = {rank: gpu.step_alone(rows) for rank, gpu in gpus.items()}
    faster = [(rank in obstacles, each, rank) for rank, each in seconds.items() if each < step]
    if not faster:
        return None
    rank = min(faster)[2]
    return FasterHost(rank, round(seconds[rank], 6), round(step, 6), obstacles.get(rank, ""))


def measure_gpu(gpu: Numerics, model: GPT, batch_size: int) -> Speed | None:
    """Measure a model of the shape of `model` on a GPU; returns None if the memory of the GPU is too small.

    gpu: device and number formats of the GPU. batch_size: rows of a micro-batch. The memory is freed
    afterwards.
    """
    torch.cuda.set_device(gpu.device)
    try:
        return _measured_on(gpu, model, batch_size)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _measured_on(gpu: Numerics, model: GPT, batch_size: int) -> Speed:
    on_gpu = GPT(model.config).to(gpu.device, gpu.dtype)
    optimizer = build_optimizer(on_gpu, 0.1, 0.1, 0.1, 0.1, 0.1)  # the rates do not change the speed
    on_gpu.compute_dtype = optimizer.compute_dtype = gpu.compute_dtype
    return measure_speed(on_gpu, optimizer, batch_size)
