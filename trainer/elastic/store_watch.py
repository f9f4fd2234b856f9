"""Notices that the rendezvous store does not answer, although the connection to it may stay open.

A connection to a frozen host stays open, and one to a host without power too: a thread that uses the store
may wait for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainer.distributed.rendezvous import open_store
from trainer.host.rank_env import RankEnv

LOST_STORE_SECONDS = 3.0  # without an answer of the store, a member gives up
ASK_SECONDS = 0.5
WATCH_SECONDS = 0.25
FROZEN_SECONDS = 2.0  # if this thread did not run for so long, the wait for an answer begins again


class StoreWatch:
    """Watches the store with two threads: one queries it, the other notices that no answer arrives.

    is_lost: whether the store has not answered for LOST_STORE_SECONDS. It stays True, even if the store
    answers later.
    """

    def __init__(self, env: RankEnv, on_lost: Callable[[], object], stopped: threading.Event) -> None:
        """Start the threads.

        env: environment of this rank. on_lost: called every WATCH_SECONDS while the store is lost. stopped:
        ends the threads when it is set. A thread that waits for the store may remain.
        """
        self.is_lost = False
        self._env, self._on_lost, self._stopped = env, on_lost, stopped
        self._answered = time.monotonic()
        threading.Thread(target=self._ask, name="store", daemon=True).start()
        threading.Thread(target=self._watch, name="membership", daemon=True).start()

    def _ask(self) -> None:
        store = None
        while not self._stopped.wait(ASK_SECONDS):
            try:
                store = store or open_store(self._env, seconds=LOST_STORE_SECONDS / 2)
                store.check(["any"])
                self._answered = time.monotonic()
            except RuntimeError:
                store = None

    def _watch(self) -> None:
        looked = self._answered
        while not self._stopped.wait(WATCH_SECONDS):
            late = time.monotonic() - looked - WATCH_SECONDS
            looked = time.monotonic()
            if late > FROZEN_SECONDS:  # this process was frozen, or its host asleep
                self._answered = looked
            if looked - self._answered > LOST_STORE_SECONDS:
                self.is_lost = True
                self._on_lost()
