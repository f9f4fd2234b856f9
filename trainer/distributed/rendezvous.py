"""The rendezvous store: how ranks find each other before any collective, and the seat each one takes.

torchrun's agent on the coordinator owns the store; started by hand, rank 0 does.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from trainer.host.rank_env import Place
from trainer.outcome import Retryable

JOIN_SECONDS = 45.0


def prefix_of(place: Place) -> str:
    """What the keys of this attempt begin with in the store."""
    return f"nanofleet/{place.attempt}"


def join_store(place: Place, run_id: str, seconds: float = JOIN_SECONDS) -> dist.Store:
    """Connect to the store and take this rank's seat. Raises Retryable if none is there, or an old one."""
    try:
        store = dist.TCPStore(
            place.master_addr,
            place.master_port,
            world_size=None,
            is_master=place.coordinates and not place.agent_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        mine = dist.PrefixStore(prefix_of(place), store)
        # A rank that comes back fast can meet the store of the attempt that is just dying.
        taken = mine.add(f"seat/{run_id}/{place.rank}", 1) > 1
    except (RuntimeError, ValueError) as error:
        raise Retryable(
            f"The store at {place.master_addr}:{place.master_port} did not answer within {seconds:.0f} s "
            f"({_first_line(error)}). Is rank 0 running, and is its port open to {place.host}?"
        ) from None
    if taken:
        raise Retryable(
            f"The store at {place.master_addr}:{place.master_port} has seen rank {place.rank} of {run_id} "
            "before: it belongs to an attempt that is ending. Try again in some seconds."
        )
    return mine


def wait_for_keys(store: dist.Store, keys: dict[int, str], seconds: float) -> list[int]:
    """Wait until every rank has set its key; returns the ranks that had not when the time was up."""
    deadline = time.monotonic() + seconds
    missing = sorted(keys)
    while True:
        missing = [rank for rank in missing if not store.check([keys[rank]])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
