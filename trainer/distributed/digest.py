"""Comparison of parameters and batches between ranks, by digests.

A rank is named as faulty only if more than half of all ranks hold another value. Of two ranks that differ,
either may be faulty.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data.files import write_json
from trainer.distributed.process_group import Collectives, Peer
from trainer.outcome import Final, Retryable

REMEDY = "Its memory fails or it computes wrongly: test it (memtest86+) or train without it."


def tensor_digest(tensor: Tensor) -> int:
    """The first 64 bits of the sha256 of a tensor's bytes, as a signed integer."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def minority_ranks(values: Sequence[Hashable]) -> list[int]:
    """The ranks whose value is not that of more than half of all ranks; all ranks if there is no majority.

    `values` has the value of each rank.
    """
    usual, count = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if 2 * count <= len(values) or value != usual]


def compare_batches(group: Collectives, checksums: Sequence[int], step: int) -> None:
    """Raise Retryable on every rank if the ranks have read different batches for `step`, counted from 1.

    `checksums` has the checksum of the batch of each rank (`Batch.checksum`).
    """
    if len(set(checksums)) == 1:
        return
    odd = minority_ranks(checksums)
    who = " and ".join(f"{group.peers[rank]} with {checksums[rank] >> 32} active rows" for rank in odd)
    if len(odd) < group.world_size:
        found = f"{who} read another batch for step {step} than the other ranks"
    else:
        found = f"ranks read different batches for step {step}, and no majority shows which is right: {who}"
    raise Retryable(
        f"{found[0].upper()}{found[1:]}. Each row matched its checksum, so a bit has changed in memory "
        "since. The next attempt reads the batch again. If this happens again, test the memory of that host "
        "(memtest86+)."
    )


class ParameterCheck:
    """Compares the parameters of all ranks after a step at which they must be equal.

        check = ParameterCheck(group, model, run_dir)
        found = check(step)                # raises Final on every rank if they differ

    If they differ, each rank writes its digests to digests-<rank>.json in its run directory. A later attempt
    that resumes from a checkpoint before that step computes the parameters again and compares them with the
    file: this shows which rank was wrong.
    """

    def __init__(self, group: Collectives, model: nn.Module, run_dir: Path) -> None:
        """Read the digests of an earlier attempt.

        All ranks must call this together: it gathers their steps.
        """
        self._group, self._model = group, model
        self._compared_at = 0  # the step of the last comparison
        self._path = run_dir / f"digests-{group.rank}.json"
        self._before = _read(self._path)
        steps = group.gather_int64(torch.tensor([self._before.step])).unique().tolist()
        self.recheck_at = steps[0] if len(steps) == 1 else 0  # 0: never, or not equal on all ranks

    def __call__(self, step: int) -> str:
        """Compare the parameters after `step`, once per step.

        Returns "", or a sentence on a difference in an earlier attempt. Raises Final on every rank, naming
        the faulty ones, if parameters differ in a single bit.
        """
        if self._group.world_size == 1 or step == self._compared_at:
            return ""
        self._compared_at = step
        digests = {name: tensor_digest(p) for name, p in self._model.named_parameters()}
        table = self._group.gather_int64(torch.tensor(list(digests.values())))
        columns = dict(zip(digests, table.T.tolist(), strict=True))
        differing = {name: column for name, column in columns.items() if len(set(column)) > 1}
        if differing:
            with contextlib.suppress(OSError):  # then a later attempt cannot name the rank
                write_json(self._path, {"step": step, "digests": digests})
            raise Final(self._explain(differing, step))
        return self._compare_with_recorded(digests) if step == self.recheck_at else ""

    def _explain(self, differing: dict[str, list[int]], step: int) -> str:
        said = [f"After step {step} the parameters are not the same on all ranks."]
        odd = {name: minority_ranks(column) for name, column in differing.items()}
        open_names = [name for name in odd if len(odd[name]) == self._group.world_size]
        accused = {rank for name in odd.keys() - set(open_names) for rank in odd[name]}
        for rank in sorted(accused):
            names = [name for name in odd if rank in odd[name] and name not in open_names]
            said.append(f"{_capital(self._group.peers[rank])} differs from most in {_some(names)}.")
        if open_names:
            column = differing[open_names[0]]
            said.append(
                f"In {_some(open_names)} no majority shows who is right: {self._groups(column)} differ."
            )
        if accused and not open_names:
            said.append(REMEDY)
        else:
            said.append(
                "The memory of one of them fails, or it computes wrongly. Test them (memtest86+) and train "
                f"again with all of them: from the last checkpoint the run computes step {step} again and "
                "reports which of them had changed."
            )
        return " ".join(said)

    def _groups(self, column: list[int]) -> str:
        """The ranks as text: those with equal values joined by commas, these groups joined by "and"."""
        members: dict[int, list[str]] = {}
        for peer, value in zip(self._group.peers, column, strict=True):
            members.setdefault(value, []).append(str(peer))
        return " and ".join(", ".join(alike) for alike in members.values())

    def _compare_with_recorded(self, digests: dict[str, int]) -> str:
        """A sentence on the ranks whose parameters differed from today's in the earlier attempt.

        The parameters are equal on all ranks now. Deletes the recorded digests; all ranks must call it
        together.
        """
        self._path.unlink(missing_ok=True)
        before = self._before.digests
        changed = [name for name, digest in digests.items() if before.get(name) != digest]
        found = [json.loads(raw) for raw in self._group.gather_bytes(json.dumps(changed).encode())]
        odd = [(peer, names) for peer, names in zip(self._group.peers, found, strict=True) if names]
        what = f"Step {self.recheck_at}, after which the parameters once differed, is computed again"
        if len(odd) == self._group.world_size:
            return f"{what}: all ranks have other values now, so it is unknown which of them was wrong."
        who = "; ".join(f"{peer} had other values then, in {_some(names)}" for peer, names in odd)
        return f"{what}: {who}. {REMEDY}"


class _Before(NamedTuple):
    """The parameter digests that this rank wrote when parameters differed; step 0: there are none."""

    step: int = 0
    digests: Mapping[str, int] = {}


def _read(path: Path) -> _Before:
    try:
        raw = json.loads(path.read_bytes())
        return _Before(int(raw["step"]), dict(raw["digests"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _Before()


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _capital(peer: Peer) -> str:
    return f"R{str(peer)[1:]}"
