"""The loss of the last layer, without its logits ever lying in memory at once.

    losses_N = token_losses(x_ND, weight_VD, targets_N, vocab_size)        # nats; 0 where the target is -1
    loss = summed_loss(x_ND, weight_VD, targets_N, vocab_size)             # their sum, with gradients

Logits, softcap and cross-entropy are done for some tokens at a time, small enough for the processor's caches,
and so is the way back, at once: a full table of logits would be written and read some ten times over (at
2,048 tokens and 32,768 words it holds 268 MB in float32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGIT_CAP = 15.0
IGNORED_TARGET = -1
CHUNK_TOKENS = {"cpu": 128, "cuda": 4096}


def token_losses(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """Cross-entropy of each target in nats, (N,), in float32 or better; no gradients."""
    with torch.no_grad():
        weight_VD = weight_VD[:vocab_size].to(x_ND.dtype)
        return torch.cat([_losses(part)[0] for part in _capped(x_ND, weight_VD, targets_N)])


def summed_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """The sum of all tokens' losses: a scalar that can be differentiated, once."""
    loss: Tensor = _SummedLoss.apply(x_ND, weight_VD, targets_N, vocab_size)
    return loss


Part = tuple[
    slice, Tensor, Tensor, Tensor
]  # which tokens, their tanh(logits / cap), targets, and which count


def _capped(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Iterator[Part]:
    """Some tokens at a time, their logits divided by the cap and squashed."""
    tokens = CHUNK_TOKENS.get(x_ND.device.type, CHUNK_TOKENS["cuda"])
    wide = torch.promote_types(x_ND.dtype, torch.float32)  # the softmax needs the digits
    for start in range(0, len(x_ND), tokens):
        where = slice(start, start + tokens)
        squashed = (x_ND[where] @ weight_VD.mT).to(wide).div_(LOGIT_CAP).tanh_()
        counts = targets_N[where] != IGNORED_TARGET
        yield where, squashed, targets_N[where].clamp_min(0)[:, None], counts


def _losses(part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """A part's losses, and exp(logits) with their sums; logits are capped, so that no maximum is needed."""
    _, squashed, targets, counts = part
    exps = squashed.mul(LOGIT_CAP).exp_()
    sums = exps.sum(dim=1, keepdim=True)
    losses = (sums.log() - LOGIT_CAP * squashed.gather(1, targets)).squeeze(1)
    return losses * counts, exps, sums


class _SummedLoss(torch.autograd.Function):
    """Forward and backward in one pass over the tokens; what is kept is the two gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
        weight = weight_VD[:vocab_size].to(x_ND.dtype)
        if not any(ctx.needs_input_grad[:2]):
            return torch.cat([_losses(part)[0] for part in _capped(x_ND, weight, targets_N)]).sum()
        grad_x = torch.empty_like(x_ND)
        # In a narrow format sums of sums would lose their digits: it is one product over all tokens.
        narrow = x_ND.dtype.itemsize < 4
        grad_logits = x_ND.new_empty(len(x_ND), vocab_size) if narrow else None
        grad_weight = torch.zeros_like(weight_VD)
        total = torch.zeros((), dtype=torch.float64, device=x_ND.device)
        for part in _capped(x_ND, weight, targets_N):
            where, squashed, targets, counts = part
            losses, exps, sums = _losses(part)
            total += losses.sum()
            grad = exps.mul_(counts[:, None] / sums)
            grad.scatter_add_(1, targets, -counts[:, None].to(grad.dtype))
            grad.mul_(squashed.square_().neg_().add_(1))
            if grad_logits is None:
                torch.mm(grad, weight, out=grad_x[where])
                grad_weight[:vocab_size].addmm_(grad.mT, x_ND[where])
            else:
                grad_logits[where] = grad
                torch.mm(grad_logits[where], weight, out=grad_x[where])
        if grad_logits is not None:
            grad_weight[:vocab_size] = grad_logits.mT @ x_ND
        ctx.save_for_backward(grad_x, grad_weight)
        return total.to(torch.promote_types(x_ND.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_total.device.type != "cpu" or grad_total != 1:
            grad_x, grad_weight = grad_x * grad_total.to(grad_x.dtype), grad_weight * grad_total
        return grad_x, grad_weight, None, None
