"""What all ranks must agree on before step 0: gathered over the store, compared, odd host and field named.

No collective is entered before this has passed, so ranks that differ end with a table and not in silence.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from trainer.config import RunFile, code_digest
from trainer.data.rows import RowsInfo
from trainer.distributed.process_group import Peer
from trainer.distributed.rendezvous import wait_for_keys
from trainer.formatting import render_table
from trainer.host.facts import host_facts
from trainer.host.network_interface import Wire
from trainer.host.numerics import Options
from trainer.host.rank_env import Place
from trainer.outcome import Final, Retryable

ARRIVAL_SECONDS = 45.0  # so that a rank says within a minute of its start who is missing
LOADING_SECONDS = 1800.0  # for one that is there, but still packs its rows
FAREWELL_SECONDS = 5.0

Fields = dict[str, str]


@dataclass(frozen=True)
class Record:
    """What one rank brings to the meeting: fields that must be equal, others that are only shown.

    `problem` is why it cannot train, if it cannot; `facts` are its host's, for the tracker.
    """

    rank: int
    host: str
    address: str
    compared: Fields
    shown: Fields
    problem: str = ""
    facts: Fields = field(default_factory=dict)
    told: str = ""  # where it can be asked how it is

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, data: bytes) -> Record:
        return cls(**json.loads(data))

    @property
    def peer(self) -> Peer:
        return Peer(self.rank, self.host, self.address)

    def __str__(self) -> str:
        return str(self.peer)


def make_record(
    place: Place,
    run_file: RunFile,
    options: Options | None = None,
    rows: RowsInfo | None = None,
    hashes: dict[str, str] | None = None,
    problem: str = "",
    told: str = "",
) -> Record:
    """This rank's record: what must be equal, and what may differ by host and is only shown."""
    compared = {
        "run_id": run_file.run_id,
        **{f"config.{name}": str(value) for name, value in run_file.config.to_dict().items()},
        "hosts": " ".join(run_file.hosts),
        "world_size": str(place.world_size),
        "shares": run_file.shown_shares,
        "trainer code": code_digest()[:16],
        "python": ".".join(platform.python_version_tuple()[:2]),
        # Without the build: 2.13.0+cpu and 2.13.0+cu130 are one version.
        **{name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "numpy")},
        **(hashes or {}),
    }
    if rows is not None:
        compared |= {
            "rows": rows.digest[:16],
            "train rows": rows.train_sha256[:16],
            "val rows": rows.val_sha256[:16],
        }
    compared["run file"] = run_file.digest()[:16]
    shown = {
        "interface": Wire(place.address()).name,
        "local rank": f"{place.local_rank} of {place.local_world_size}",
        **(options.shown() if options else {}),
    }
    return Record(place.rank, place.host, place.address(), compared, shown, problem, host_facts(), told)


def meet(
    store: dist.Store | None,
    mine: Record,
    world_size: int,
    arrival_seconds: float = ARRIVAL_SECONDS,
    lives: Callable[[int], bool] = lambda rank: False,
) -> list[Record]:
    """Exchange records with all ranks, in rank order; those of whom `lives` knows are waited for longer.

    Raises Final, on every rank alike, when one cannot train or they differ; Retryable when one stays away.
    """
    records = [mine] if store is None else _exchange(store, mine, world_size, arrival_seconds, lives)
    problems = {record.problem for record in records}
    if problems != {""}:
        if len(problems) == 1:  # the same everywhere
            raise Final(mine.problem)
        raise Final(" ".join(f"{record}: {record.problem}" for record in records if record.problem))
    differences = compare(records)
    if differences:
        raise Final(*explain(differences, records))
    check_layout(records)
    return records


def check_layout(records: list[Record]) -> None:
    """Raise Final unless the ranks sit on the hosts that the run file names, in its order."""
    named = records[0].compared.get("hosts", "").split()
    found = [host for host, _ in itertools.groupby(record.host for record in records)]
    if named and found != named:
        raise Final(
            f"The ranks are not on the hosts of the run file, in its order: it names {', '.join(named)}, and "
            f"there are {', '.join(map(str, records))}. Start the ranks in that order, or render it again."
        )


def _exchange(
    store: dist.Store, mine: Record, world_size: int, arrival_seconds: float, lives: Callable[[int], bool]
) -> list[Record]:
    keys = {rank: f"contract/{rank}" for rank in range(world_size)}
    try:
        store.set(keys[mine.rank], mine.to_json())
        missing = wait_for_keys(store, keys, arrival_seconds)
        until = time.monotonic() + LOADING_SECONDS
        while missing and all(map(lives, missing)) and time.monotonic() < until:
            missing = wait_for_keys(store, {rank: keys[rank] for rank in missing}, 1.0)
        if missing:
            raise Retryable(
                f"{_ranks(missing)} did not arrive within {arrival_seconds:.0f} s of {mine}. "
                "Look at the log of the hosts that are missing."
            )
        records = [Record.from_json(store.get(keys[rank])) for rank in range(world_size)]
        _part(store, mine.rank, world_size)
        return records
    except RuntimeError as error:
        raise Retryable(f"The store was lost while the ranks met: {error}") from None


def _part(store: dist.Store, rank: int, world_size: int) -> None:
    """The store goes with rank 0's host, so rank 0 waits until the others have read."""
    store.set(f"contract/read/{rank}", "1")
    if rank == 0:
        wait_for_keys(store, {r: f"contract/read/{r}" for r in range(world_size)}, FAREWELL_SECONDS)


def compare(records: list[Record]) -> dict[str, list[str]]:
    """The compared fields that are not equal everywhere: the value of each rank ("-" where it has none)."""
    names = list(dict.fromkeys(name for record in records for name in record.compared))
    values = {name: [record.compared.get(name, "-") for record in records] for name in names}
    differing = {name: row for name, row in values.items() if len(set(row)) > 1}
    if len(differing) > 1:  # what is in the run file is named already
        differing.pop("run file", None)
    return differing


def explain(differences: dict[str, list[str]], records: list[Record]) -> tuple[str, str]:
    """A sentence that names fields and odd hosts, and the table of field by host."""
    sentences = []
    for name, row in differences.items():
        usual = Counter(row).most_common(1)[0][0]  # among equals the first, rank 0's
        odd = [f"{record} has {value}" for record, value in zip(records, row, strict=True) if value != usual]
        sentences.append(f"{name} is {usual}, but {', '.join(odd)}")
    table = [["field", *map(str, records)], *([name, *row] for name, row in differences.items())]
    return (
        f"The ranks do not agree, so nothing was trained: {'; '.join(sentences)}. "
        "Bring the odd hosts in line and train again.",
        render_table(table),
    )


def _ranks(ranks: list[int]) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))
