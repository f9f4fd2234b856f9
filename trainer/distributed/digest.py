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
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.files import write_json
from trainer.distributed.process_group import Collectives
from trainer.outcome import Final, Retryable

REMEDY = (
    "The memory or the processor of each host named here may be faulty: test it (memtest86+), or remove "
    "the host from the inventory."
)


def tensor_digest(tensor: Tensor) -> int:
    """The first 64 bits of the sha256 of a tensor's bytes, as a signed integer."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def minority_ranks(values: Sequence[Hashable]) -> list[int]:
    """The ranks whose value differs from that of the majority; all ranks if no value has a majority.

    values: the value of each rank, in rank order. A majority is more than half of all ranks.
    """
    usual, count = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if 2 * count <= len(values) or value != usual]


def compare_batches(group: Collectives, checksums: Sequence[int], step: int) -> None:
    """Raise Retryable on every rank if the ranks have read different batches for `step`, counted from 1.

    group: the ranks. checksums: `Batch.checksum` of each rank, in rank order.
    """
    if len(set(checksums)) == 1:
        return
    minority = minority_ranks(checksums)
    who = " and ".join(str(group.peers[rank]) for rank in minority)
    if len(minority) < group.world_size:
        found = f"{who[0].upper()}{who[1:]} read another batch for step {step} than the other ranks"
    else:
        found = f"Ranks read different batches for step {step}, and no majority shows which is right: {who}"
    raise Retryable(
        f"{found}. Each row matched its checksum, so the memory of a named host may be faulty. The next "
        "attempt reads the batch again. If this message appears again, test the memory of these hosts "
        "(memtest86+)."
    )


class ParameterCheck:
    """Compares the parameters of all ranks after a step at which they must be equal.

        check = ParameterCheck(group, model, run_dir)
        found = check(step)                # raises Final on every rank if they differ

    If they differ, each rank writes its digests to digests-<rank>.json in its run directory. A later attempt
    that resumes from a checkpoint before that step computes the parameters again and compares them with the
    file: this shows which rank was wrong. The attribute `recheck_at` is that step; 0 if there is none.
    """

    def __init__(self, group: Collectives, model: nn.Module, run_dir: Path) -> None:
        """Read the digests of an earlier attempt, and gather from all ranks the steps of these digests.

        All ranks call this together. group: the ranks. model: its parameters are compared. run_dir: the run
        directory, with the file of digests.
        """
        self._group, self._model = group, model
        self._compared_at = 0  # the step of the last comparison
        self._path = run_dir / f"digests-{group.rank}.json"
        recorded_step, self._recorded = _read(self._path)
        steps = group.gather_int64(torch.tensor([recorded_step])).unique().tolist()
        self.recheck_at = steps[0] if len(steps) == 1 else 0  # 0: never, or not equal on all ranks

    def __call__(self, step: int) -> str:
        """Compare the parameters of all ranks after `step`, once per step.

        Returns a sentence on the ranks that were wrong in an earlier attempt, if the parameters of that
        attempt differed after this step; else "". Raises Final on every rank, naming the ranks that differ,
        if any bit of a parameter differs between ranks.
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
        sentences = [f"After step {step} the parameters are not the same on all ranks."]
        minorities = {name: minority_ranks(column) for name, column in differing.items()}
        everyone = list(range(self._group.world_size))
        without_majority = [name for name, ranks in minorities.items() if ranks == everyone]
        names_of: dict[int, list[str]] = {}
        for name, ranks in minorities.items():
            for rank in ranks if ranks != everyone else ():
                names_of.setdefault(rank, []).append(name)
        for rank, names in sorted(names_of.items()):
            name = f"R{str(self._group.peers[rank])[1:]}"
            sentences.append(f"{name} differs from most ranks in the parameter {_some(names)}.")
        if without_majority:
            groups: dict[int, list[str]] = {}  # of ranks with equal values
            for peer, value in zip(self._group.peers, differing[without_majority[0]], strict=True):
                groups.setdefault(value, []).append(str(peer))
            who = " and ".join(map(", ".join, groups.values()))
            sentences.append(f"In {_some(without_majority)} no majority shows which is right: {who} differ.")
            sentences.append(
                "The memory or the processor of one of these hosts may be faulty: test them (memtest86+). "
                "Then start the run again on all of them: it resumes from its last checkpoint, computes step "
                f"{step} again and reports which rank had other values."
            )
        else:
            sentences.append(REMEDY)
        return " ".join(sentences)

    def _compare_with_recorded(self, digests: dict[str, int]) -> str:
        """A sentence on the ranks whose digests of an earlier attempt differ from those of this attempt.

        digests: {parameter name: digest} of this attempt, equal on all ranks. Deletes the file of digests.
        """
        self._path.unlink(missing_ok=True)
        changed = [name for name, digest in digests.items() if self._recorded.get(name) != digest]
        found = [json.loads(raw) for raw in self._group.gather_bytes(json.dumps(changed).encode())]
        wrong = [(peer, names) for peer, names in zip(self._group.peers, found, strict=True) if names]
        what = f"Step {self.recheck_at}, after which the parameters once differed, is computed again"
        if len(wrong) == self._group.world_size:
            return f"{what}: all ranks have other values now, so it is unknown which of them was wrong."
        if not wrong:
            return f"{what}: the ranks have the values that they had then. The one that differed is gone."
        who = "; ".join(f"{peer} had other values then, in {_some(names)}" for peer, names in wrong)
        return f"{what}: {who}. {REMEDY}"


def _read(path: Path) -> tuple[int, Mapping[str, int]]:
    """The step and the digests that this rank wrote when parameters differed; (0, {}) without the file."""
    try:
        raw = json.loads(path.read_bytes())
        return int(raw["step"]), dict(raw["digests"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, {}


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
