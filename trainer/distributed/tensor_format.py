"""The format of named tensors sent as bytes: JSON of names, data types and shapes. Nothing is pickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor


def formats_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Name, data type and shape of each tensor, as JSON. tensors: {name: tensor}."""
    formats = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    return json.dumps(formats).encode()


def tensors_of(formats: bytes, data: Tensor) -> dict[str, Tensor]:
    """The named tensors whose bytes are in `data`.

    formats: the result of `formats_of` for these tensors. data: uint8, flat, the bytes of one tensor after
    another. The tensors are views of `data`, except those that are not aligned there, which are copies.
    """
    tensors, start = {}, 0
    for name, dtype, shape in json.loads(formats):
        kind = getattr(torch, dtype)
        end = start + math.prod(shape) * kind.itemsize
        piece = data[start:end]
        piece = piece if start % kind.itemsize == 0 else piece.clone()
        tensors[name] = piece.view(kind).view(shape)
        start = end
    return tensors


def empty_tensors(formats: bytes) -> dict[str, Tensor]:
    """Uninitialised CPU tensors of these formats, to receive into. formats: the result of `formats_of`."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in json.loads(formats)
    }
