"""What ranks tell each other beside the collectives: how they are, each second, and how they ended.

    board = Board(place)                   # a thread with a store connection of its own
    board.start(told)                      # told(): this rank's words
    board.seen                             # rank -> words of the others, and how old they are
    board.say("ended")                     # at once, in a bounded time

A connection is shared by nobody: a client waits behind another thread's call, and one whose server is frozen
or cut off does not return. Then what was seen last grows old, which is all that its readers need.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from trainer.host.rank_env import Place

EVERY_SECONDS = 1.0
ANSWER_SECONDS = 10.0
AGAIN_SECONDS = 10.0  # between attempts to find a store that was lost

Words = dict[str, Any]


class Seen(NamedTuple):
    """The last words of a rank and when, by this host's clock, they were new."""

    words: Words
    at: float

    @property
    def age(self) -> float:
        return time.monotonic() - self.at


class Board:
    """This rank's words to the others, and theirs to it."""

    def __init__(self, place: Place, prefix: str) -> None:
        self._place, self._prefix = place, prefix
        self._key = f"board/{place.rank}"
        self._others = {rank: f"board/{rank}" for rank in range(place.world_size) if rank != place.rank}
        self._told: Callable[[], Words] = dict
        self._count = 0
        self._lock = threading.Lock()  # of the connection
        self._store: dist.Store | None = None
        self._try_at = 0.0
        self._stopped = threading.Event()
        self.seen: dict[int, Seen] = {}

    def start(self, told: Callable[[], Words]) -> None:
        self._told = told
        if self._others:
            threading.Thread(target=self._work, name="board", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def say(self, seconds: float = 1.0) -> bool:
        """Put this rank's words up now, and read the others'; returns whether that was done in time."""
        if not self._others:
            return True
        done = threading.Event()

        def work() -> None:
            self._exchange()
            done.set()

        threading.Thread(target=work, name="board, once", daemon=True).start()
        return done.wait(seconds)

    def _work(self) -> None:
        while not self._stopped.wait(EVERY_SECONDS):
            self._exchange()

    def _exchange(self) -> None:
        """A store that is gone is looked for again the next time."""
        with self._lock:
            try:
                if self._store is None:
                    if time.monotonic() < self._try_at:
                        return
                    self._try_at = time.monotonic() + AGAIN_SECONDS
                    self._store = self._connect()
                self._count += 1
                self._store.set(self._key, json.dumps({**self._told(), "count": self._count}))
                self._read(self._store)
            except (RuntimeError, ValueError):
                self._store = None

    def _connect(self) -> dist.Store:
        store = dist.TCPStore(
            self._place.master_addr,
            self._place.master_port,
            is_master=False,
            timeout=timedelta(seconds=ANSWER_SECONDS),
            wait_for_workers=False,
        )
        return dist.PrefixStore(self._prefix, store)

    def _read(self, store: dist.Store) -> None:
        there = [rank for rank, key in self._others.items() if rank in self.seen or store.check([key])]
        if not there:
            return
        for rank, raw in zip(there, store.multi_get([self._others[rank] for rank in there]), strict=True):
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):  # no run status
                words = dict(json.loads(raw))
                count, before = words["count"], self.seen.get(rank)
                if before is None or before.words["count"] != count:
                    self.seen[rank] = Seen(words, time.monotonic())
