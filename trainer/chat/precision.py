"""The format of the weights while generating: float32, bfloat16, or int8 with a scale for each row.

Generating a token reads every weight once and is limited by memory bandwidth: half the bytes take half the
time, if the processor computes fast in the format. Embeddings are looked up and are not converted to bfloat16
or int8.
int8 rounds each weight to a multiple of 1/127 of the largest weight in its row: the error is at most 0.4 % of
that largest weight.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.gpt import GPT, Linear

REPEATS = 10
SMALLEST = 1024  # weights; smaller matrices (the gates) keep their format


class Int8Linear(nn.Module):
    """A linear layer without a bias whose weight is int8, with a float scale for each row.

    weight_OI: the weight to convert, (outputs, inputs). weight: int8, (outputs, inputs). scale: float,
    (outputs,). weight * scale[:, None] approximates weight_OI.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        scale = weight_OI.abs().amax(dim=1).clamp_(min=1e-12) / 127
        self.register_buffer("weight", (weight_OI / scale[:, None]).round_().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.size(-1))
        if flat.size(0) > 1:  # the kernel below is slow for several rows
            return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        y = torch._weight_int8pack_mm(flat.contiguous(), self.weight, self.scale.to(x.dtype))
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def set_format(model: GPT, name: str) -> str:
    """Convert the weights of the large matrices of `model`; returns the name of their new format.

    name: float32, bfloat16 or int8; auto: the format that `fastest` returns.
    """
    chosen = fastest(model) if name == "auto" else name
    if chosen == "bfloat16":
        model.compute_dtype = torch.bfloat16
    else:
        model.float()
        model.compute_dtype = torch.float32
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if not isinstance(child, Linear) or child.weight.numel() < SMALLEST:
                continue
            if chosen == "bfloat16":
                child.weight.data = child.weight.data.bfloat16()
            elif chosen == "int8":
                setattr(parent, key, Int8Linear(child.weight))
    return chosen


def fastest(model: GPT) -> str:
    """Measure which format is faster for one token in the model's MLP; returns "float32" or "bfloat16"."""
    width = model.config.n_embd
    seconds = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weights = [torch.randn(4 * width, width, device=model.device).to(dtype) for _ in range(4)]
        x = torch.randn(1, width, device=model.device).to(dtype)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            total = sum(F.linear(x, weight).sum().item() for weight in weights)
            times.append(time.perf_counter() - start + 0 * total)
        seconds[name] = min(times)
    return min(seconds, key=lambda name: seconds[name])
