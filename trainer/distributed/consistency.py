"""The check before step 0 that all ranks train the same run.

The ranks exchange records of their settings, versions and data over the rendezvous store, and compare them.
No collective is started before this check, so ranks that differ can end with a table of the differing fields.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from trainer.code_digest import code_digest
from trainer.config import RunFile
from trainer.data.rows import RowsInfo
from trainer.distributed.process_group import Peer
from trainer.distributed.rendezvous import wait_for_keys
from trainer.formatting import render_table
from trainer.host.facts import host_facts
from trainer.host.network_interface import NetworkInterface
from trainer.host.numerics import Options
from trainer.host.rank_env import RankEnv
from trainer.outcome import Final, Retryable

ARRIVAL_SECONDS = 45.0  # so that a rank names missing ranks within a minute of its start
LOADING_SECONDS = 1800.0  # for a rank that runs and still packs its rows
FAREWELL_SECONDS = 5.0

Fields = dict[str, str]


@dataclass(frozen=True)
class Record:
    """What one rank reports about itself before step 0, to be compared with the other ranks.

    rank, host, address: number of the rank, name and IP address of its host.
    compared: {name: text} of what must be equal on all ranks: settings, versions, hashes of code and data.
    shown: {name: text} of what may differ and is only printed, such as the network interface.
    problem: why the rank cannot train, a sentence; "" if it can.
    facts: {name: text} about the host of the rank, for the tracker (see host_facts).
    endpoint: address of the rank's health endpoint; "" if it has none.
    """

    rank: int
    host: str
    address: str
    compared: Fields
    shown: Fields
    problem: str = ""
    facts: Fields = field(default_factory=dict)
    endpoint: str = ""

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Record:
        """The record with the fields in `values`, a dict from JSON.

        Fields that only another release of the trainer has are ignored: the digest of the code in `compared`
        shows that the releases differ.
        """
        return cls(
            **{each.name: values[each.name] for each in dataclasses.fields(cls) if each.name in values}
        )

    @property
    def peer(self) -> Peer:
        """Rank, host and address of this record."""
        return Peer(self.rank, self.host, self.address)

    def __str__(self) -> str:
        return str(self.peer)


def make_record(
    env: RankEnv,
    run_file: RunFile,
    options: Options | None = None,
    rows: RowsInfo | None = None,
    hashes: dict[str, str] | None = None,
    problem: str = "",
    endpoint: str = "",
) -> Record:
    """The record of this rank: settings, versions, hashes of code and data, and facts of the host.

    env, run_file: environment and run file (settings and hosts of the run) of this rank.
    options: the devices on which this rank can compute; None if they are unknown.
    rows: the packed training data of this rank; None if it has none.
    hashes: {name: digest} of the data of this rank; None if it has no data.
    problem: why this rank cannot train, a sentence; "" if it can.
    endpoint: address of the health endpoint of this rank; "" if it has none.
    """
    compared = {
        "run_id": run_file.run_id,
        **{f"config.{name}": str(value) for name, value in run_file.config.to_dict().items()},
        "hosts": " ".join(run_file.hosts),
        "world_size": str(env.world_size),
        "shares": run_file.shown_shares,
        "trainer code": code_digest()[:16],
        "python": ".".join(platform.python_version_tuple()[:2]),
        # Without the build: 2.13.0+cpu and 2.13.0+cu130 are one version.
        **{name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "numpy")},
        **(hashes or {}),
    }
    if rows is not None:
        digests = {"rows": rows.digest, "train rows": rows.train_sha256, "val rows": rows.val_sha256}
        compared |= {name: digest[:16] for name, digest in digests.items()}
    compared["run file"] = run_file.digest()[:16]
    shown = {
        "interface": NetworkInterface(env.address()).name,
        "local rank": f"{env.local_rank} of {env.local_world_size}",
        **(options.shown() if options else {}),
    }
    return Record(env.rank, env.host, env.address(), compared, shown, problem, host_facts(), endpoint)


def check_consistency(
    store: dist.Store | None,
    mine: Record,
    world_size: int,
    arrival_seconds: float = ARRIVAL_SECONDS,
    is_alive: Callable[[int], bool] = lambda rank: False,
) -> list[Record]:
    """Exchange the records of all ranks and compare them; returns the records in rank order.

    store: the rendezvous store; None with one rank. mine: the record of this rank. world_size: number of
    ranks. arrival_seconds: time in which all ranks must write their records. is_alive: returns whether a rank
    is running; while all missing ranks are running, they have LOADING_SECONDS more. Raises Final on every
    rank if a rank cannot train, if compared fields differ, or if the hosts of the ranks differ from the run
    file. Raises Retryable if a record is missing or the store is lost.
    """
    records = [mine] if store is None else _exchange(store, mine, world_size, arrival_seconds, is_alive)
    if len({record.problem for record in records}) > 1:
        raise Final(" ".join(f"{record}: {record.problem}" for record in records if record.problem))
    if mine.problem:  # the same on all ranks
        raise Final(mine.problem)
    if differences := compare(records):
        raise Final(*explain(differences, records))
    check_layout(records)
    return records


def check_layout(records: list[Record]) -> None:
    """Raise Final unless the ranks run on the hosts of the run file, in its order.

    records: of all ranks, in rank order.
    """
    named = records[0].compared.get("hosts", "").split()
    found = [host for host, _ in itertools.groupby(record.host for record in records)]
    if named and found != named:
        raise Final(
            f"The hosts of the ranks differ from the run file. In rank order, the run file has "
            f"{', '.join(named)}; the ranks are {', '.join(map(str, records))}. Start the ranks in the "
            "order of the run file, or write it again: ansible-playbook train.yml"
        )


def _exchange(
    store: dist.Store, mine: Record, world_size: int, arrival_seconds: float, is_alive: Callable[[int], bool]
) -> list[Record]:
    keys = {rank: f"consistency/{rank}" for rank in range(world_size)}
    try:
        store.set(keys[mine.rank], json.dumps(mine.__dict__))
        began = time.monotonic()
        missing = wait_for_keys(store, keys, arrival_seconds)
        until = time.monotonic() + LOADING_SECONDS
        while missing and all(map(is_alive, missing)) and time.monotonic() < until:
            missing = wait_for_keys(store, {rank: keys[rank] for rank in missing}, 1.0)
        if missing:
            names = ("Rank " if len(missing) == 1 else "Ranks ") + ", ".join(map(str, missing))
            raise Retryable(
                f"{names} did not become ready within {time.monotonic() - began:.0f} s, while {mine} waited. "
                "To see why: ansible-playbook logs.yml (the first error is at the top), by hand the log of "
                "that rank."
            )
        records = [Record.load(json.loads(store.get(keys[rank]))) for rank in range(world_size)]
        read = {rank: f"consistency/read/{rank}" for rank in range(world_size)}
        store.set(read[mine.rank], "1")
        if mine.rank == 0:  # the store may end with rank 0
            wait_for_keys(store, read, FAREWELL_SECONDS)
        return records
    except RuntimeError as error:
        raise Retryable(
            "The rendezvous store was lost during the consistency check: rank 0 or its host has ended, or "
            f"the network was interrupted. Read the log of rank 0. ({error})"
        ) from None


def compare(records: list[Record]) -> dict[str, list[str]]:
    """The compared fields that differ: {field: list of its values on all ranks, in rank order}.

    A rank without the field has the value "-". The field "run file", the digest of the whole run file, is
    left out if another field differs. records: of all ranks, in rank order.
    """
    names = list(dict.fromkeys(name for record in records for name in record.compared))
    values = {name: [record.compared.get(name, "-") for record in records] for name in names}
    differing = {name: row for name, row in values.items() if len(set(row)) > 1}
    if len(differing) > 1:  # the fields in which the run files differ are in `differing` already
        differing.pop("run file", None)
    return differing


def name_differences(differences: dict[str, list[str]], records: list[Record]) -> str:
    """Text with a clause for each field that differs: the usual value, and the ranks with other values.

    differences, records: as for `explain`.
    """
    clauses = []
    for name, row in differences.items():
        usual = Counter(row).most_common(1)[0][0]  # if equally frequent, that of rank 0
        others = [
            f"{record} has {value}" for record, value in zip(records, row, strict=True) if value != usual
        ]
        clauses.append(f"{name} is {usual}, but {', '.join(others)}")
    return "; ".join(clauses)


def explain(differences: dict[str, list[str]], records: list[Record]) -> tuple[str, str]:
    """Explain differences between ranks: (a sentence with the fields and ranks, a table with all values).

    differences: the result of `compare` for `records`. records: of all ranks, in rank order.
    """
    table = [["field", *map(str, records)], *([name, *row] for name, row in differences.items())]
    return (
        f"The ranks differ, so nothing was trained: {name_differences(differences, records)}. "
        "If code, packages or data differ: ansible-playbook setup.yml, then start the run again. If a "
        "setting differs (config.NAME, shares, hosts): ansible-playbook train.yml, which writes the "
        "same ones to all hosts; by hand, give all ranks the same setting.",
        render_table(table),
    )
