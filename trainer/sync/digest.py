"""Do all ranks hold the same bytes? A digest of each parameter is compared; a difference is named."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from trainer.outcome import Final
from trainer.sync.group import Group


def tensor_digest(tensor: Tensor) -> int:
    """64 bits of the sha256 of a tensor's bytes, as a signed integer."""
    data: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def compare_parameters(group: Group, model: nn.Module, step: int) -> None:
    """Raise Final, on every rank and naming the odd ones, if the ranks' parameters differ in a single bit."""
    if group.world_size == 1:
        return
    names, parameters = zip(*model.named_parameters(), strict=True)
    table = group.gather_int64(torch.tensor([tensor_digest(p) for p in parameters]))
    usual = table.mode(dim=0).values
    odd = [
        (peer, [name for name, differs in zip(names, row != usual, strict=True) if differs])
        for peer, row in zip(group.peers, table, strict=True)
    ]
    found = [f"{peer} in {differing[0]}" + _and_more(differing) for peer, differing in odd if differing]
    if found:
        raise Final(
            f"After step {step} the parameters are not the same on all ranks: {'; '.join(found)}. "
            "A host computes wrongly or its memory fails; train again without it."
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
