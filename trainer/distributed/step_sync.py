"""What all ranks know at the end of a step, in one short all-reduce that travels beside the gradients.

    agreement = Agreement(group, rows_per_step)
    pending = agreement.start(Words(loss_sum, seconds, rows, stop=True))
    told = agreement.finish(pending)               # losses added up, each rank's seconds, what rank 0 wishes

A sum can carry a table: each rank adds to its own place, and what is rank 0's alone the others leave at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.distributed.process_group import Group, Pending
from trainer.outcome import Final


@dataclass(frozen=True)
class Words:
    """What one rank says: the sum of its losses, seconds that it computed for its rows; rank 0's wishes.

    `batch` comes a step ahead: the active rows of a batch set the shapes of its collectives.
    """

    loss_sum: float
    seconds: float
    rows: int
    stop: bool = False
    save: bool = False
    trouble: bool = False
    shares: tuple[int, ...] = ()  # from the next step on; none: as they are
    batch: int = 0  # the checksum of the next step's batch


@dataclass(frozen=True)
class Told:
    """The same of all ranks."""

    loss_sum: float
    seconds: list[float]
    stop: bool
    save: bool
    trouble: bool
    shares: list[int]
    batches: list[int]


class Agreement:
    """The all-reduce of one step, between `start` and `finish`."""

    def __init__(self, group: Group, rows_per_step: int) -> None:
        self._group, self._rows_per_step = group, rows_per_step

    def start(self, words: Words) -> tuple[Tensor, Pending]:
        """Put this rank's words on their way."""
        seconds, shares, batches = ([0.0] * self._group.world_size for _ in range(3))
        seconds[self._group.rank] = words.seconds
        batches[self._group.rank] = float(words.batch)
        for rank, share in enumerate(words.shares):
            shares[rank] = float(share)
        head = [words.loss_sum, float(words.rows), *map(float, (words.stop, words.save, words.trouble))]
        shared = torch.tensor([*head, *seconds, *shares, *batches], dtype=torch.float64)
        return shared, self._group.start_sum(shared)

    def finish(self, started: tuple[Tensor, Pending]) -> Told:
        """What all have said. Raises Final when the ranks' rows did not make up the step."""
        shared, pending = started
        self._group.wait([pending])
        loss_sum, rows, stop, save, trouble, *tables = shared.tolist()
        if rows != self._rows_per_step:
            raise Final(
                f"The ranks took {rows:.0f} rows of a step of {self._rows_per_step}: their tables of shares "
                "differ, which is a fault of the trainer."
            )
        n = self._group.world_size
        shares = [round(share) for share in tables[n : 2 * n]]
        return Told(
            loss_sum,
            tables[:n],
            stop > 0,
            save > 0,
            trouble > 0,
            shares if any(shares) else [],
            [int(batch) for batch in tables[2 * n :]],
        )
