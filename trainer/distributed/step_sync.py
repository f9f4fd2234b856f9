"""The all-reduce of step reports at the end of each step, which runs beside that of the gradients.

    step_sync = StepSync(group, rows_per_step)
    pending = step_sync.start(StepReport(loss_sum, seconds, rows, stop=True))
    summary = step_sync.finish(pending)       # losses summed, seconds of each rank, requests of any rank

The reduced tensor has sections with one element per rank, such as the seconds of each rank. Each rank sets
its own element and leaves the other elements 0, so after the all-reduce each element is the value of its
rank. Values that only rank 0 sets are 0 on the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.distributed.process_group import Collectives, Pending
from trainer.outcome import Final

FLAGS = 6  # stop, save, failed_save, change, snapshot, copy


@dataclass(frozen=True)
class StepReport:
    """What one rank reports to the others at the end of a step.

    loss_sum: sum of the losses of its rows, in nats.
    seconds: the time that the rank has computed. rows: the number of its rows.
    next_batch: checksum of the next step's batch. The ranks compare it one step ahead, because the active
        rows of a batch determine the shapes of the collectives of its step: the collectives can only complete
        if all ranks have the same batch.
    Requests of rank 0 to all ranks:
    stop: end the run. save: write a checkpoint. failed_save: a checkpoint could not be written.
    copy: send the newest checkpoint to the hosts that keep copies.
    shares: rows per rank from the next step on; empty: unchanged.
    snapshot: in an elastic run, copy the state to the ranks that hold copies (trainer/elastic/snapshot.py).
    Request of any rank of an elastic run:
    change: change the members after this step, because ranks leave or join.
    """

    loss_sum: float
    seconds: float
    rows: int
    stop: bool = False
    save: bool = False
    failed_save: bool = False
    change: bool = False
    snapshot: bool = False
    copy: bool = False
    shares: tuple[int, ...] = ()
    next_batch: int = 0


@dataclass(frozen=True)
class StepSummary:
    """What every rank receives at the end of a step: the reports of all ranks, combined.

    loss_sum: sum of the losses of the step, in nats.
    seconds: the time that each rank has computed, by rank. next_batches: `next_batch` of each rank.
    shares: rows per rank from the next step on; empty: unchanged.
    stop, save, failed_save, change, snapshot, copy: whether a rank has made this request (see StepReport).
    """

    loss_sum: float
    seconds: list[float]
    stop: bool
    save: bool
    failed_save: bool
    change: bool
    snapshot: bool
    copy: bool
    shares: list[int]
    next_batches: list[int]


class StepSync:
    """Combines the step reports of all ranks: `start` begins the all-reduce, `finish` returns the summary.

    group: the ranks. rows_per_step: rows of a step over all ranks, with which the reported rows are compared.
    """

    def __init__(self, group: Collectives, rows_per_step: int) -> None:
        self._group, self._rows_per_step = group, rows_per_step

    def start(self, report: StepReport) -> tuple[Tensor, Pending]:
        """Start the all-reduce with the `report` of this rank; returns the argument of `finish`."""
        seconds, shares, batches = ([0.0] * self._group.world_size for _ in range(3))
        seconds[self._group.rank] = report.seconds
        batches[self._group.rank] = float(report.next_batch)
        for rank, rows in enumerate(report.shares):
            shares[rank] = float(rows)
        flags = (report.stop, report.save, report.failed_save, report.change, report.snapshot, report.copy)
        head = [report.loss_sum, float(report.rows), *map(float, flags)]
        shared = torch.tensor([*head, *seconds, *shares, *batches], dtype=torch.float64)
        return shared, self._group.start_all_reduce(shared)

    def finish(self, started: tuple[Tensor, Pending]) -> StepSummary:
        """Wait for the all-reduce; returns the summary. started: the result of `start`.

        Raises Final if the reported rows of all ranks do not add up to `rows_per_step`.
        """
        shared, pending = started
        self._group.wait([pending])
        loss_sum, rows, *rest = shared.tolist()
        stop, save, failed_save, change, snapshot, copy = (value > 0 for value in rest[:FLAGS])
        tables = rest[FLAGS:]
        if rows != self._rows_per_step:
            raise Final(
                f"The rows of this step add up to {rows:.0f} over all ranks instead of "
                f"{self._rows_per_step}, so the ranks have different batch splits. This is a bug in "
                "nanofleet. Start the run again: it resumes from its last checkpoint. Keep the logs of all "
                "ranks for a bug report."
            )
        n = self._group.world_size
        shares = [round(share) for share in tables[n : 2 * n]]
        return StepSummary(
            loss_sum,
            tables[:n],
            stop,
            save,
            failed_save,
            change,
            snapshot,
            copy,
            shares if any(shares) else [],
            [int(batch) for batch in tables[2 * n :]],
        )
