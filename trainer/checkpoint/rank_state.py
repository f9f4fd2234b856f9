"""The state of a checkpoint that differs between ranks (sync=local): a file per rank, on the rank's host.

own/step_000100-rank1.pt has the parameters of rank 1, which differ from the outer parameters; if a sync round
is in flight, the values that the rank subtracts from its parameters at the outer step; the number of its
tokens since the last sync round; its error feedback; and its optimizer state. The optimizer state of rank 0
is in the checkpoint instead. The checkpoint's meta.json has the sha256 of each file. If the file of a rank is
missing or has another sha256, the rank resumes from the checkpoint alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.exchange import flatten, unflatten
from trainer.checkpoint.storage import DamagedCheckpointError, read_tensors, save_tensors
from trainer.data.files import file_sha256, sync_file
from trainer.distributed.process_group import Collectives
from trainer.optim.muon_adamw import MuonAdamW, ParameterState
from trainer.sync.mode import SyncMode

OPTIMIZER = "optim/"


def save_rank_states(
    group: Collectives,
    sync: SyncMode,
    optimizer: MuonAdamW,
    run_dir: Path,
    step: int,
    keep: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Write the state that differs between ranks to a file per rank, on the rank's host. A collective call.

    run_dir: the run directory. step: the step of the checkpoint. keep: number of checkpoints that are kept.
    log: called with a warning if the file of this rank cannot be written. Returns an entry for meta.json,
    {"own_sha256": [sha256 of each rank's file, by rank; "" if it was not written]}; {} for a sync mode whose
    state is equal on all ranks.
    """
    own = sync.rank_state()
    if not own:
        return {}
    sha256, rank = "", group.rank
    optim = optimizer.state_dict() if rank else {}  # that of rank 0 is in the checkpoint
    try:
        sha256 = save_rank_state(run_dir, step, rank, own, optim, keep)
    except OSError as error:
        log(
            f"warning: the state of rank {rank} cannot be saved in {run_dir} ({error.strerror}). "
            "Make room there. A run that resumes from this checkpoint takes that of rank 0 instead."
        )
    return {"own_sha256": [sha.decode() for sha in group.gather_bytes(sha256.encode())]}


def save_rank_state(
    run_dir: Path,
    step: int,
    rank: int,
    own: Mapping[str, Tensor],
    optim: Mapping[str, ParameterState],
    keep: int,
) -> str:
    """Write the state file of this rank; returns its sha256. Raises OSError if it cannot be written.

    own: {name: tensor} from the sync mode. optim: {parameter name: {state name: tensor}}; {} on rank 0. keep:
    number of checkpoints that are kept. The state files of the newest `keep` + 1 steps stay, because the
    coordinator writes the checkpoint of this step later; until then, a run resumes from an earlier step.
    """
    path = rank_state_file(run_dir, step, rank)
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().cpu() for name, tensor in own.items()}
    tensors |= {name: tensor.cpu() for name, tensor in flatten(optim, OPTIMIZER).items()}
    temporary = path.with_suffix(".tmp")
    for killed in path.parent.glob(f"step_*-rank{rank}.tmp"):
        killed.unlink()
    try:
        with open(temporary, "wb") as file:
            save_tensors(tensors, file)
            sync_file(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    files = list(path.parent.glob("step_*-rank*.pt"))
    step_of = {each: int(each.name.partition("-")[0].removeprefix("step_")) for each in files}
    kept = sorted(set(step_of.values()))[-keep - 1 :]
    for old in files:
        if step_of[old] not in kept:
            old.unlink(missing_ok=True)  # another rank of this host may have removed it
    return file_sha256(path)


def rank_state_file(run_dir: Path, step: int, rank: int) -> Path:
    """The path of the state file of `rank` at `step` in a run directory."""
    return run_dir / "own" / f"step_{step:06d}-rank{rank}.pt"


def load_rank_state(
    run_dir: Path, meta: Mapping[str, Any], rank: int
) -> tuple[dict[str, Tensor], dict[str, ParameterState]] | None:
    """Read the state file of `rank` that belongs to a checkpoint.

    meta: the content of the checkpoint's meta.json. Returns (tensors of the sync mode, optimizer state), as
    {name: tensor} and {parameter name: {state name: tensor}}. Returns None if the file is missing in
    `run_dir`, or if its sha256 is not the one in `meta`.
    """
    hashes = meta.get("own_sha256", [])
    path = rank_state_file(run_dir, int(meta["step"]), rank)
    try:
        if rank >= len(hashes) or file_sha256(path) != hashes[rank]:
            return None
        tensors: dict[str, Tensor] = read_tensors(path)
    except (OSError, DamagedCheckpointError):
        return None
    optim = unflatten(tensors, OPTIMIZER)
    return {name: tensors[name] for name in tensors if not name.startswith(OPTIMIZER)}, optim
