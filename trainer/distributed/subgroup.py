"""A process group of some ranks, with its own connections, for a thread other than the training loop.

    link = Subgroup.open(group, "checkpoint copies", members=[0, 2], source=0)    # all ranks call it
    link.broadcast(tensor)                                                        # only members call it

All members call the collectives in the same order. The subgroup uses Gloo, also in a run on GPUs. If a member
does not call a collective, the collective fails on the other members after UNMEASURED_TIMEOUT (10 minutes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.process_group import Collectives


class Subgroup:
    """A process group of some ranks of a run. Its collectives raise PeerLost if they fail.

    rank: rank of this process among all ranks of the run. members: ranks of the subgroup, ascending.
    peers: the same ranks with their hosts. source: the rank that broadcasts.
    """

    def __init__(self, group: Collectives, process_group: Any, members: Sequence[int], source: int) -> None:
        self._group, self._process_group = group, process_group
        self.rank, self.members, self.source = group.rank, sorted(members), source
        self.peers = [group.peers[rank] for rank in self.members]

    @classmethod
    def open(cls, group: Collectives, name: str, members: Sequence[int], source: int) -> Subgroup:
        """Connect the ranks `members`; returns the subgroup on all ranks of `group`.

        On a rank that is not a member, `is_member` is False, and no collective of the subgroup may be called.
        All ranks of `group` call this function, and start it and other collectives in the same order. name:
        name of the subgroup. source: the member that broadcasts. Raises PeerLost if a member cannot be
        connected.
        """
        ranks = sorted(members)
        try:
            made = group.connect_again(name, ranks)
        except RuntimeError as error:
            raise group.peer_lost(error) from None
        return cls(group, made, members, source)

    @property
    def is_member(self) -> bool:
        """Whether this rank is a member."""
        return self.rank in self.members

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast the tensor of `source`; the other members receive it in place."""
        self._finish(lambda: dist.broadcast(tensor, self.source, self._process_group, async_op=True), tensor)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Gather the `values` of all members on every member; returns them in the order of `members`.

        values: a tensor of the same shape on every member.
        """
        rows = [torch.empty_like(values) for _ in self.members]
        self._finish(lambda: dist.all_gather(rows, values, self._process_group, async_op=True), rows)
        return rows

    def _finish(self, start: Any, tensors: Any) -> None:
        try:
            self._group.finish(self._group.start_on_other(start), tensors)
        except RuntimeError as error:
            raise self._group.peer_lost(error) from None
