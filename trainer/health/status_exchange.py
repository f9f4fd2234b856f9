"""The run status of every rank, exchanged each second through the rendezvous store.

    exchange = StatusExchange(env)
    exchange.start(status)                     # a thread; status() returns the record of this rank
    exchange.received                          # rank -> ReceivedStatus, for the other ranks
    exchange.publish()                         # publish and read at once, in a bounded time

The exchange has a connection of its own: a TCPStore client serves one thread at a time, and a call to a
frozen or unreachable server does not return. During such a call `received` is not updated, and the `age` of
its entries grows.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

from trainer.distributed.rendezvous import open_store
from trainer.health.status_record import RunStatusRecord
from trainer.host.rank_env import RankEnv

PUBLISH_SECONDS = 1.0
ARRIVAL_SECONDS = 0.2  # until a status of every other rank has arrived
START_SECONDS = 60.0  # after which a rank that has not published yet may be one that is off
ANSWER_SECONDS = 10.0
RECONNECT_SECONDS = 10.0  # between attempts to connect to a store that was lost


class ReceivedStatus(NamedTuple):
    """The last run status that was received from a rank.

    status: the run status. number: the number of the publication; each rank counts its publications. at:
    value of time.monotonic() on this host when the publication was first read.
    """

    status: RunStatusRecord
    number: int
    at: float

    @property
    def age(self) -> float:
        """Seconds since the status was received."""
        return time.monotonic() - self.at


class StatusExchange:
    """Publishes the run status of this rank and reads those of the other ranks, each second, in a thread.

    env: of this rank. received: {rank: its last status}, for the other ranks.
    """

    def __init__(self, env: RankEnv) -> None:
        self._env, self.is_started = env, False
        self._key = f"status/{env.rank}"
        self._others: dict[int, str] = {}
        self.expect(set(range(env.world_size)) - {env.rank})
        self._status: Callable[[], RunStatusRecord] = RunStatusRecord
        self._number = 0
        self._lock = threading.Lock()  # of the connection
        self._store: dist.Store | None = None
        self._try_at = 0.0
        self._stopped = threading.Event()
        self.received: dict[int, ReceivedStatus] = {}

    def expect(self, ranks: Iterable[int]) -> None:
        """Read the run status of these ranks too, besides those at the start of the run."""
        self._others = {**self._others, **{rank: f"status/{rank}" for rank in ranks}}

    def start(self, status: Callable[[], RunStatusRecord]) -> None:
        """Start the thread that publishes and reads each second. status: returns that of this rank."""
        self._status, self.is_started = status, True
        threading.Thread(target=self._work, name="status exchange", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def publish(self, seconds: float = 1.0) -> None:
        """Publish this rank's status and read those of the other ranks now; wait at most `seconds` for this.

        Does nothing before `start`. Raises nothing if the connection is lost.
        """
        if self.is_started:
            once = threading.Thread(target=self._exchange, name="status exchange, once", daemon=True)
            once.start()
            once.join(seconds)

    def _work(self) -> None:
        interval, began = 0.0, time.monotonic()
        while not self._stopped.wait(interval):
            self._exchange()
            is_start = time.monotonic() - began < START_SECONDS and len(self.received) < len(self._others)
            interval = ARRIVAL_SECONDS if is_start else PUBLISH_SECONDS

    def _exchange(self) -> None:
        """Publish this rank's status and read the others once; reconnect after a lost connection."""
        with self._lock:
            try:
                if self._store is None:
                    if time.monotonic() < self._try_at:
                        return
                    self._try_at = time.monotonic() + RECONNECT_SECONDS
                    self._store = open_store(self._env, seconds=ANSWER_SECONDS)
                self._number += 1
                self._store.set(self._key, json.dumps({**self._status().message(), "number": self._number}))
                self._read(self._store)
            except (RuntimeError, ValueError):
                self._store = None

    def _read(self, store: dist.Store) -> None:
        others = self._others
        there = [rank for rank, key in others.items() if rank in self.received or store.check([key])]
        if not there:
            return
        for rank, raw in zip(there, store.multi_get([others[rank] for rank in there]), strict=True):
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):  # no run status
                values = json.loads(raw)
                number, before = values["number"], self.received.get(rank)
                if before is None or before.number != number:
                    status = RunStatusRecord.load(values)
                    self.received[rank] = ReceivedStatus(status, number, time.monotonic())
