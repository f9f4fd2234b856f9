"""Plain DDP as a benchmark case: PyTorch's DistributedDataParallel without a sync mode of this package.

    torchrun --nproc-per-node 2 -m trainer bench --ddp

The model, batches, number formats and optimizer are those of the other cases, and so is the process group:
Gloo on the interface of the fleet, NCCL on GPUs. GEMMs are computed by torch's default library.
torch.nn.parallel.DistributedDataParallel reduces whole gradients while backward runs, and every rank takes
the whole optimizer step: there are no owner ranks, and nothing is sent after the step. The ranks hold equal
parameters only as far as their processors round alike.

Plain DDP is no sync mode: `RunConfig.sync` refuses it, and a run cannot be trained with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.bench import DDP
from trainer.bench.steps import BenchTrainer
from trainer.config import ConfigError
from trainer.distributed.process_group import Collectives, broadcast_sends
from trainer.health.run_status import RunStatus
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.rank_batch import RankBatch
from trainer.sync.mode import SyncMode


class PlainDDP(SyncMode):
    """Plain DDP in the form of a sync mode, for the benchmark case `ddp`.

    The attribute `module` is DistributedDataParallel around `model`; the training loop calls it instead of
    `model`. DDP makes each gradient the mean over the ranks, so the summed loss of a rank needs the factor
    `loss_scale` before backward. group: the ranks. optimizer: updates all parameters on each rank.
    """

    def __init__(
        self, group: Collectives, model: nn.Module, optimizer: MuonAdamW, run_status: RunStatus
    ) -> None:
        self._group, self._optimizer, self._run_status = group, optimizer, run_status
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False  # a measurement before step 0 sets it
        self.module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._parameters = list(model.parameters())
        self._bytes_a_step = self._count_bytes()
        self._unfinished = 0  # gradients of the last backward
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def loss_scale(self, tokens: int) -> float:
        """The factor for a rank's summed loss with which DDP computes the gradient of the mean loss.

        The mean is over all tokens of the step. tokens: number of tokens of the step over all ranks.
        """
        return self._group.world_size / tokens

    def begin_step(self, active: Tensor, by_rank: Sequence[Tensor] = ()) -> None:
        self.module.zero_grad()

    @contextmanager
    def last_backward(self, tokens: int) -> Iterator[None]:
        """Context of the last backward of a step, in which DDP reduces the gradients. tokens: not used.

        At its end, the bytes that this rank sends in a step are added to `bytes_sent` of the group. Raises
        PeerLost if the reduction of the gradients fails.
        """
        self._unfinished = len(self._parameters)
        try:
            yield
        except RuntimeError as error:
            if self._unfinished or isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._group.peer_lost(error) from None
        self._group.bytes_sent += self._bytes_a_step

    def _count_bytes(self) -> int:
        """Bytes that this rank sends in a step: gradients in a ring all-reduce, buffers in a broadcast."""
        group = self._group
        gradients, buffers = (
            sum(each.numel() * each.element_size() for each in tensors)
            for tensors in (self._parameters, self.module.buffers())
        )
        copies = 2 * (group.world_size - 1) / group.world_size
        return round(copies * gradients) + broadcast_sends(group.rank, group.world_size) * buffers

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Hook that runs after each gradient. After the last one, the phase is sync: backward only waits."""
        self._unfinished -= 1
        if self._unfinished == 0:
            self._run_status.enter("sync")

    def reduce_gradients(self, tokens: int, mine: int = 0) -> None: ...  # backward has done it

    def step(self) -> None:
        self._optimizer.step()

    def broadcast(self) -> None: ...

    def finish(self) -> None: ...

    def load(self, step: int, common: Mapping[str, ParameterState], own: Mapping[str, Tensor]) -> None: ...


class DDPTrainer(BenchTrainer):
    """Measures the steps of plain DDP on several ranks; arguments as for BenchTrainer.

    The constructor raises ConfigError if the run file asks for a batch split by speed (shares=auto).
    """

    sync: PlainDDP

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.run_file.by_speed:
            raise ConfigError(
                "shares is auto, but plain DDP does not measure its ranks. "
                "Fix: --shares equal, or rows per rank such as --shares 3,1"
            )
        self.setup.predicts = False  # the cost model knows sync modes
        self.setup.chooses_library = False
        self.setup.make_sync = self._wrap  # type: ignore[method-assign]

    def _wrap(self) -> PlainDDP:
        setup = self.setup
        return PlainDDP(setup.group, setup.model, setup.optimizer, self.run_status)

    @property
    def sync_name(self) -> str:
        return DDP

    def forward_backward(self, batch: RankBatch) -> float:
        """Accumulate the gradients of this rank's rows, `batch`; returns the sum of their losses in nats.

        DDP reduces the gradients in the last micro-batch. In the micro-batches before it, gradients are only
        accumulated (`no_sync`).
        """
        total = torch.zeros((), dtype=torch.float64, device=batch.idx.device)
        size = self.setup.micro_batches[self.env.rank]
        scale = self.sync.loss_scale(batch.n_targets)
        batches = list(zip(batch.idx.split(size), batch.targets.split(size), strict=True))
        for number, (idx, targets) in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else self.sync.module.no_sync():
                self.run_status.enter("forward")
                loss = self.sync.module(idx, targets, loss_reduction="sum")
                self.run_status.enter("backward")
                with self.sync.last_backward(batch.n_targets) if is_last else nullcontext():
                    (scale * loss).backward()
            total += loss.detach()
        return total.item()
