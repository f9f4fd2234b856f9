"""The rendezvous store, through which ranks find each other before any collective.

The server of the store runs in torchrun's agent on the host of rank 0 if `RankEnv.agent_store` is true,
otherwise in rank 0.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from trainer.host.rank_env import RankEnv
from trainer.outcome import Retryable

JOIN_SECONDS = 45.0


def prefix_of(env: RankEnv) -> str:
    """The prefix of this attempt's keys in the rendezvous store."""
    return f"nanofleet/{env.attempt}"


def open_store(env: RankEnv, is_master: bool = False, seconds: float = JOIN_SECONDS) -> dist.Store:
    """Connect to the rendezvous store; returns it. Its keys get the prefix of this attempt.

    env: has the address of the store. is_master: whether this process runs the server of the store. seconds:
    the longest wait. Raises RuntimeError or ValueError if the store does not answer in time.
    """
    return dist.PrefixStore(prefix_of(env), open_tcp_store(env, is_master, seconds))


def open_tcp_store(env: RankEnv, is_master: bool = False, seconds: float = JOIN_SECONDS) -> dist.TCPStore:
    """As `open_store`, but the keys of the returned store have no prefix.

    If `env.master_port` is 0, the kernel picks the port; the attribute `port` of the store has it.
    """
    return dist.TCPStore(
        env.master_addr,
        env.master_port,
        world_size=None,
        is_master=is_master,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def no_store(env: RankEnv, seconds: float, error: Exception) -> Retryable:
    """The exception for a rank that could not open the rendezvous store, or connect to it within `seconds`.

    env: has the address of the store. error: the exception that was raised.
    """
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return Retryable(
            f"{env.host} cannot open the rendezvous store: another program has port {env.master_port}. To "
            f"see which, on {env.host}: sudo ss -tlnp 'sport = :{env.master_port}'"
        )
    return Retryable(
        f"The rendezvous store at {env.master_addr}:{env.master_port} did not answer within "
        f"{seconds:.0f} s ({cause}). Rank 0 is not running, or its port is not open to {env.host}. To see "
        "which: ansible-playbook status.yml, then: ansible-playbook doctor.yml"
    )


def join_store(env: RankEnv, run_id: str, seconds: float = JOIN_SECONDS) -> dist.Store:
    """Connect to the rendezvous store and register this rank; returns the store.

    env, run_id: environment and run of this rank. Keys of the returned store have the prefix of this attempt.
    Raises Retryable if the store does not answer within `seconds`, or if the rank is registered already: the
    store then belongs to an attempt that is ending.
    """
    try:
        mine = open_store(env, is_master=env.is_coordinator and not env.agent_store, seconds=seconds)
        # A rank that restarts fast may find the store of the attempt that is ending.
        registered = mine.add(f"rank/{run_id}/{env.rank}", 1) > 1
    except (RuntimeError, ValueError) as error:
        raise no_store(env, seconds, error) from None
    if registered:
        raise Retryable(
            f"Rank {env.rank} of the run {run_id} is already registered in the rendezvous store at "
            f"{env.master_addr}:{env.master_port}: this store belongs to an earlier attempt that is still "
            "ending. The unit restarts by itself; by hand, start torchrun again after a few seconds."
        )
    return mine


def wait_for_keys(store: dist.Store, keys: dict[int, str], seconds: float) -> list[int]:
    """Wait until each rank has set its key in `store`; returns the ranks without a key after `seconds`.

    keys: {rank: name of its key}. The returned ranks are ascending; [] if all keys are set.
    """
    deadline = time.monotonic() + seconds
    missing = sorted(keys)
    while True:
        missing = [rank for rank in missing if not store.check([keys[rank]])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)
