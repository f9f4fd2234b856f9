"""The keys that ranks write into the rendezvous store to agree on the members of a run.

A member is identified by its number and its incarnation. The number is its rank among all ranks of the run
(`RankEnv.rank`). The incarnation is 1 for the first process that starts as this rank, 2 for the second, and
so on. A view is the list of members between two changes. The generation is the number of a view; it grows
with each view. The rank of a member in a view is its position in the list.

    nonce                       run id and term of the coordinator; nonce of all signatures (signed.py)
    incarnation/NUMBER          how many processes have started as a rank
    requests                    how often a rank has asked for something by one of the next three keys
    fetch/NUMBER                token of a rank that asks for the shared state before it joins (prefetch.py)
    join/NUMBER                 incarnation and consistency record of a rank that asks to join
    leave/NUMBER                incarnation of a member that ends after the present step
    broken/GENERATION           why the members of a generation no longer wait for each other
    ready/GENERATION/NUMBER     incarnation of a member that waits for the next view
    proposal                    the newest view that the coordinator proposes
    accepted/GENERATION/NUMBER  incarnation of a member that accepts the proposed view
    committed                   the newest view that all its members have accepted
    connecting/GENERATION/NUMBER  set when a member of a generation is about to connect to the others
    dropped/NUMBER              incarnation that is never a member again
    refused/NUMBER              incarnation of a rank that may not join, and the reason
    ended                       outcome and reason of the coordinator, once it ends
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist

from trainer.distributed.consistency import Record


@dataclass(frozen=True)
class Member:
    """A rank that is a member of an elastic run, or asks to become one.

    number: its rank among all ranks of the run. incarnation: how many processes have started as this rank up
    to this one. record: its consistency record.
    """

    number: int
    incarnation: int
    record: Record

    def __str__(self) -> str:
        return str(self.record)


@dataclass(frozen=True)
class View:
    """The members of an elastic run between two changes.

    generation: number of the view. members: the members by ascending number; a member's rank in the view is
    its position here. kind: device kind of the run: "cpu", or "" before it is decided.
    """

    generation: int
    members: tuple[Member, ...]
    kind: str = ""

    @property
    def numbers(self) -> list[int]:
        """The number of each member, in the order of `members`."""
        return [member.number for member in self.members]

    def has(self, number: int, incarnation: int) -> bool:
        """Whether the process `incarnation` of the rank `number` is a member."""
        return any(each.number == number and each.incarnation == incarnation for each in self.members)

    def dump(self) -> str:
        """The view as JSON text, for the rendezvous store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> View:
        """The view of which `dump` has returned `text`."""
        values = json.loads(text)
        members = tuple(load_member(each) for each in values["members"])
        return cls(values["generation"], members, values["kind"])


def load_member(values: dict[str, Any]) -> Member:
    """The member with the fields in `values`: number, incarnation and record (a dict of Record's fields)."""
    return Member(values["number"], values["incarnation"], Record.load(values["record"]))


class Keys(Protocol):
    """The keys and values in the rendezvous store by which ranks agree on the members.

    The methods raise RuntimeError if the store is lost.
    """

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str:
        """The value of `key`; "" if it is not set."""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, 0 if it is not set; returns the sum."""


class StoreKeys:
    """Keys in a rendezvous store of torch.distributed, with the prefix "members".

    Several threads may use one object.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("members", store)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def get(self, key: str) -> str:
        with self._lock:
            found = self._store.get(key) if self._store.check([key]) else b""
        return str(found.decode(errors="replace"))  # anybody who reaches the store can write to it

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            return int(self._store.add(key, amount))
