"""Embedding tables sharded by rows: each row has one owner rank, which updates it and holds AdamW's moments.

A row is used only when its token occurs in a step, and every rank knows the batch of a step. So a rank
fetches the values of its active rows from their owner ranks before the forward pass, and sends the owners
their gradients after the backward pass. Other rows are not sent, and no rank has a gradient of a whole table.
A row that a rank neither owns nor has fetched for the step is stale on this rank: it has an old value.
`refresh` updates all rows on all ranks.

Rows are owned in blocks of BLOCK_ROWS: rank 0 owns the first block, rank 1 the next, and so on in turn. The
token ids of a tokenizer are sorted by frequency, so all ranks own about equally many active rows. When an
elastic run loses ranks, the others keep their blocks and divide those of the lost ranks (`owners_of_blocks`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.distributed.process_group import Collectives, Pending
from trainer.model.loss import add_rows
from trainer.optim.muon_adamw import MuonAdamW
from trainer.sync.buckets import without_rows

BLOCK_ROWS = 64  # the number of rows of a table is a multiple of it (trainer.model.gpt)
REFRESHED_ROWS = 8192  # rows of a table that are broadcast at a time


class RowShards:
    """The embedding tables of a model, sharded by rows over the ranks.

    group: the ranks. tables: the parameters, (V, D) each with the same V. optimizer: keeps the state of this
    rank's rows. transfer_dtype: number format of gradients on the network; None for that of the tables.
    """

    def __init__(
        self,
        group: Collectives,
        tables: Sequence[Parameter],
        optimizer: MuonAdamW,
        transfer_dtype: torch.dtype | None = None,
    ) -> None:
        self._group, self._tables, self._optimizer = group, list(tables), optimizer
        self._transfer_dtype = transfer_dtype or tables[0].dtype
        owners = owners_of_blocks(group.launch_ranks, group.n_launch_ranks, len(tables[0]) // BLOCK_ROWS)
        self._blocks_of: list[list[int]] = [[] for _ in range(group.world_size)]  # by rank
        positions = []  # of each block, among those of its owner
        for block, owner in enumerate(owners):
            positions.append(len(self._blocks_of[owner]))
            self._blocks_of[owner].append(block)
        # On the CPU, also where the tables are on the device meta, to count bytes.
        self._owner = torch.tensor(owners, device="cpu")
        self._position_of_block = torch.tensor(positions, device="cpu")
        self._columns: list[slice] = []  # of each table, in rows that hold the values of all tables
        self._width = 0
        for number, table in enumerate(self._tables):
            self._columns.append(slice(self._width, self._width + table.size(1)))
            self._width += table.size(1)
            optimizer.shard_rows(table, self._blocks(group.rank))
            table.register_hook(partial(self._add, number))
        self._position = torch.empty(len(tables[0]), dtype=torch.int64, device=tables[0].device)

    def owned_rows(self, rank: int) -> Tensor:
        """The numbers of the rows that `rank` owns, in the order in which its optimizer state has them."""
        rows = [torch.arange(block.start, block.stop) for block in self._blocks(rank)]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

    def _blocks(self, rank: int) -> list[slice]:
        """The rows of each block of `rank`."""
        return [slice(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS) for block in self._blocks_of[rank]]

    def _owners(self, rows: Tensor) -> Tensor:
        return self._owner.to(rows.device)[rows // BLOCK_ROWS]

    # -- a step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self, active: Sequence[Tensor]) -> None:
        """Fetch the values of this rank's active rows, and set their gradients to 0.

        active: by rank, the token ids in its inputs, each once, ascending.
        """
        rank, world_size = self._group.rank, self._group.world_size
        mine, owners = active[rank], self._owners(active[rank])
        self._mine = mine[owners.argsort(stable=True)]  # sorted by owner rank, then by number
        self._counts = owners.bincount(minlength=world_size).tolist()
        first = sum(self._counts[:rank])
        self._own = slice(first, first + self._counts[rank])  # in self._mine
        # By rank, the rows that this rank owns and that are active on that rank.
        self._requests = [rows[self._owners(rows) == rank] for rows in active]
        self._largest = max(self._most_sent(user, rows) for user, rows in enumerate(active))
        numbers = torch.arange(len(mine), device=self._position.device)
        self._position[self._mine] = numbers
        for table in self._tables:
            table.grad = None
        self._gradients = torch.zeros(
            len(mine), self._width, dtype=self._tables[0].dtype, device=self._position.device
        )
        self._fetch()

    def _most_sent(self, user: int, rows: Tensor) -> int:
        """The largest number of rows that any other rank sends to `user`. rows: active rows of that rank."""
        counts = self._owners(rows).bincount(minlength=self._group.world_size).tolist()
        return max([0, *counts[:user], *counts[user + 1 :]])

    def _fetch(self) -> None:
        """Receive the values of the rows in self._mine from their owner ranks; send those of own rows."""
        requested = torch.cat(self._without_own(self._requests))
        values = torch.cat([table[requested] for table in self._tables], dim=1)
        received, pending = self._exchange(values, [len(rows) for rows in self._requests], self._counts)
        self._group.wait([pending])
        others = self._of_others(self._mine)
        for table, columns in zip(self._tables, self._columns, strict=True):
            table[others] = received[:, columns]

    def _add(self, number: int, gradient: Tensor) -> Tensor:
        """Hook on the sparse gradient of a table: add its rows to self._gradients; returns an empty gradient.

        number: the index of the table.
        """
        rows = self._position[gradient._indices()[0]]
        add_rows(self._gradients[:, self._columns[number]], rows, gradient._values())
        return without_rows(gradient)

    def start_reduce(self) -> None:
        """Start to send the gradients of the active rows to their owner ranks."""
        sent = self._of_others(self._gradients).to(self._transfer_dtype)
        self._received, self._pending = self._exchange(
            sent, self._counts, [len(rows) for rows in self._requests]
        )

    def step(self, tokens: int) -> None:
        """Wait for the gradients, add them in rank order, divide by `tokens` and step this rank's rows.

        tokens: the number of target tokens with a loss in the step, over all ranks.
        """
        self._group.wait([self._pending])
        active = torch.cat(self._requests).unique()
        parts = list(self._received.split([len(rows) for rows in self._without_own(self._requests)]))
        parts[self._group.rank] = self._gradients[self._own]
        total = self._gradients.new_zeros(len(active), self._width)
        for rows, part in zip(self._requests, parts, strict=True):
            total[torch.searchsorted(active, rows)] += part
        del parts, self._received, self._gradients
        total.div_(tokens)
        block, row = active // BLOCK_ROWS, active % BLOCK_ROWS
        numbers = self._position_of_block.to(block.device)[block] * BLOCK_ROWS + row  # among the own rows
        for table, columns in zip(self._tables, self._columns, strict=True):
            self._optimizer.step_rows(table, total[:, columns], numbers)

    def refresh(self) -> None:
        """Broadcast the rows of each owner rank, so that no rank has a stale row."""
        for table in self._tables if self._group.world_size > 1 else ():
            for owner in range(self._group.world_size):
                for rows in self.owned_rows(owner).split(REFRESHED_ROWS):
                    values = table.detach()[rows]
                    self._group.broadcast_owned({owner: values.view(-1)})
                    table.detach()[rows] = values

    # -- transfers -------------------------------------------------------------------------------------

    def _without_own(self, by_rank: Sequence[Tensor]) -> list[Tensor]:
        """`by_rank` with an empty tensor instead of that of this rank."""
        return [each[: len(each) * (rank != self._group.rank)] for rank, each in enumerate(by_rank)]

    def _of_others(self, of_mine: Tensor) -> Tensor:
        """The entries of `of_mine` for rows that other ranks own.

        of_mine: a tensor with an entry for each row in self._mine.
        """
        return torch.cat([of_mine[: self._own.start], of_mine[self._own.stop :]])

    def _exchange(
        self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[Tensor, Pending]:
        """Start an exchange of rows of all tables; returns (received rows, pending).

        rows: (n, sum of all D), the rows to send. sends, receives: numbers of rows, by rank; the entry of
        this rank is ignored.
        """
        own, width = self._group.rank, self._width
        sizes = [
            [width * count * (rank != own) for rank, count in enumerate(counts)]
            for counts in (sends, receives)
        ]
        largest = width * self._largest
        received, pending = self._group.start_exchange(rows.flatten(), sizes[0], sizes[1], largest)
        return received.view(-1, self._width), pending


def owners_of_blocks(launch_ranks: Sequence[int], n_launch_ranks: int, n_blocks: int) -> list[int]:
    """The owner rank of each of `n_blocks` blocks of rows.

    launch_ranks: by rank, a number below `n_launch_ranks` that the rank keeps when other ranks are lost or
    join. Block b belongs to the rank with the launch rank b % n_launch_ranks. Blocks whose launch rank is
    absent are assigned to all ranks in turn, so each remaining rank keeps its blocks when another one is
    lost.
    """
    rank_of = {number: rank for rank, number in enumerate(launch_ranks)}
    in_turn = itertools.cycle(range(len(launch_ranks)))
    found = (rank_of.get(block % n_launch_ranks) for block in range(n_blocks))
    return [next(in_turn) if rank is None else rank for rank in found]
