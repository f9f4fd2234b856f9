"""The memory and disk that a run needs on a host, computed from the parameter count.

The memory of a rank has float32 weights and gradients, the two AdamW moments of the tables (the embeddings
and the output layer), the Muon moment of the matrices that the rank owns, and the activations of a
micro-batch. A host that is or may become the coordinator also has the copy from which a checkpoint is written
(trainer/checkpoint). With sync=exact the moments of the tables are divided among the ranks; with sync=fast
those of the embeddings are, while each rank has those of the output layer. With both, an embedding has
gradients of its active rows only (trainer/sync/row_shards.py). With sync=local each rank has the whole
optimizer state, and besides its own parameters the outer parameters, their momentum and the error feedback
(trainer/sync/local.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ansible_collections.nanofleet.fleet.trainer.config import RunConfig

GIB = 2**30
# Fitted to the peak resident memory of a rank (see the role's README): Python and torch; activations that a
# layer keeps for the backward pass, per token and unit of the model's width; and with recompute=layers those
# of one layer, with the gradients of its backward pass.
BASE_GIB = 0.4
TORCHRUN_GIB = 0.2  # of the process that starts the ranks of a host
TRACKER_GIB = 0.5  # of the MLflow server on the coordinator and of the process that sends figures to it
KEPT_PER_LAYER = 35
RECOMPUTED = 85
LAYERS_RECEIVED = 3  # number of layers whose gradients are reduced at the same time (trainer/sync/exact.py)
LOSS_TOKENS = 1024  # tokens with a number per vocabulary entry at the same time (trainer/model/loss.py)
VOCABULARY = 32768
SHARDING_MODES = ("exact", "fast")  # sync modes in which the rows of tables have owner ranks


class Need:
    """The memory and disk, in GiB, that the ranks of a run need on one host.

    values: {setting: value} of the run. vocabulary: the number of tokens of its tokenizer. ranks: the number
    of ranks on this host. world_size: the number of all ranks. coordinates: whether the host is the
    coordinator. on_gpu: whether the ranks compute on GPUs. Attributes:
    parts: {purpose: GiB of one rank}. once: {purpose: GiB of the host} besides the ranks.
    copy_gb: the part of `once` for the copy from which a checkpoint is written.
    checkpoint_gb: the size of a checkpoint. own_gb: the size of the file of rank 0's own state beside a
    checkpoint.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        vocabulary: int = VOCABULARY,
        ranks: int = 1,
        world_size: int = 1,
        coordinates: bool = True,
        on_gpu: bool = False,
    ) -> None:
        self.values, self.ranks, self.coordinates = values, ranks, coordinates
        self._others = (vocabulary, ranks, world_size, coordinates, on_gpu)
        self.config = config = RunConfig.resumed({}, values)
        width = config.n_embd
        kv_width = (config.n_kv_head or config.n_head) * config.head_dim
        rows = math.ceil(vocabulary / 64) * 64
        number = (8 if config.dtype == "float64" else 4) / GIB
        tables = number * rows * (2 * width + (config.depth + 1) // 2 * kv_width)
        matrices = number * config.depth * (10 * width * width + 2 * width * kv_width)
        micro_batch = config.device_batch_size * config.sequence_len
        local, shards = config.sync == "local", config.sync in SHARDING_MODES
        outer = tables + matrices if local else 0.0
        self.checkpoint_gb = 3 * tables + 2 * matrices + outer
        # With top-k the residual is in the parameters (trainer/sync/local.py).
        error = 0.0 if config.local_topk else outer
        # Rank 0's own parameters and error feedback, in a file beside each checkpoint.
        self.own_gb = outer + error
        kept = KEPT_PER_LAYER * config.depth
        if config.recompute == "layers":
            kept = RECOMPUTED + config.depth
        activations = number * micro_batch * width * kept
        activations += number * min(LOSS_TOKENS, micro_batch) * rows
        head = number * rows * width
        gradients, moments = tables + matrices, 2 * tables
        if shards:
            step = (config.total_batch_size or micro_batch * world_size) // world_size
            # The active rows of all embeddings: their gradients, those sent, and those received.
            active = (tables - head) * min(rows, step) / rows
            gradients = head + matrices + 3 * active
            replicated = head if config.sync == "fast" else 0.0
            moments = 2 * replicated + 2 * (tables - replicated) / world_size
        if not local:  # what owner ranks receive: with sharding of the head and of few layers at a time
            received = head + min(1.0, LAYERS_RECEIVED / config.depth) * matrices if shards else matrices
            gradients += received * (world_size - 1) / world_size
        self.parts = {
            "weights": tables + matrices,
            "gradients": gradients + head,
            "optimizer": moments + matrices / (1 if local else world_size),
            "outer parameters with momentum and error feedback": 2 * outer + error,
            f"a micro-batch of {config.device_batch_size} x {config.sequence_len} tokens": activations,
            "Python and torch": BASE_GIB,
        }
        if on_gpu:
            self.parts = {"Python, torch and CUDA": 5 * BASE_GIB}
        has_failover = config.has_failover(world_size // ranks)
        may_coordinate = coordinates or has_failover
        self.copy_gb = self.checkpoint_gb if may_coordinate else 0.0
        self.once = {"the copy a checkpoint is written from": self.copy_gb, "torchrun": TORCHRUN_GIB}
        copies = config.is_elastic and not local  # with local each rank continues from its own parameters
        if copies and may_coordinate:  # trainer/elastic/snapshot.py
            self.once["two copies of the state of an elastic run"] = 2 * self.checkpoint_gb
            if has_failover and config.sync != "dense":  # a checkpoint is written from a copy
                self.once["the tables of a copy, assembled for a checkpoint"] = 3 * tables
        senders = ranks - 1 if coordinates and not has_failover else ranks
        if copies and senders:
            part = matrices + (0.0 if config.sync == "dense" else 3 * tables - head)
            self.once["a copy of its part of the state"] = senders * part / world_size
        if copies and has_failover and ranks > 1:  # those of the first rank are above
            own = matrices + (head + (tables - head) / world_size if shards else tables)
            own += self.parts["optimizer"]
            self.once["two copies of the state of its other ranks"] = 2 * (ranks - 1) * own
        if coordinates and config.tracker != "none":
            self.once["the tracker"] = TRACKER_GIB

    @property
    def memory_gb(self) -> float:
        """The memory in GiB that a run needs on the host: `parts` for each of its ranks, and `once`."""
        return self.ranks * sum(self.parts.values()) + sum(self.once.values())

    def with_(self, **values: Any) -> Need:
        """The need of the same run after a change of some settings. values: {setting: new value}."""
        return Need({**self.values, **values}, *self._others)

    def fits(self, memory_gb: float, **values: Any) -> bool:
        """Whether the run is possible after a change of some settings, and needs at most `memory_gb`."""
        try:
            return self.with_(**values).memory_gb <= memory_gb
        except ValueError:  # for example a depth that n_kv_head does not allow
            return False

    def described(self) -> str:
        """The parts of the needed memory in GiB as text, the largest first."""
        parts = {name: self.ranks * size for name, size in self.parts.items()}
        largest = sorted({**parts, **self.once}.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size:.1f}" for name, size in largest if size >= 0.05)
