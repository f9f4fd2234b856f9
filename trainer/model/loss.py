"""The cross-entropy of the last layer, computed in blocks, so that the logits are never in memory as a whole.

    losses_N = token_losses(x_ND, weight_VD, targets_N, vocab_size)        # nats; 0 where the target is -1
    loss = summed_loss(x_ND, weight_VD, targets_N, vocab_size)             # their sum, with gradients

On a CPU a block of logits has M tokens and W entries of the vocabulary and stays in the processor's caches.
Since logits are capped, the softmax needs no maximum: the exponentials of all blocks are summed, and the
division follows at the end. For the gradients, one number per token and vocabulary entry is kept, for M
tokens at a time: 134 MB in float32 at 32,768 entries. The GEMMs are nearly square. At 2,048 tokens of depth 8
this takes 1.4 s on two cores; blocks of 128 tokens and the whole vocabulary took 1.8 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGIT_CAP = 15.0
IGNORED_TARGET = -1
BLOCK = {"cpu": (1024, 1024), "cuda": (4096, 1 << 20)}
"""Tokens and vocabulary entries of a block; on a GPU a block has the whole vocabulary."""


def token_losses(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """Cross-entropy of each target in nats, (N,), in float32 or better; 0 for target -1. No gradients.

    x_ND: the input of lm_head. weight_VD: the weight of lm_head. targets_N: token ids. vocab_size: the number
    of rows of the weight that stand for tokens; the rows after these are padding.
    """
    with torch.no_grad():
        weight = weight_VD[:vocab_size].to(x_ND.dtype)
        losses = []
        for part in _parts(x_ND):
            softmax = _Softmax(targets_N[part], _wide(x_ND))
            for block in _blocks(x_ND[part], weight):
                softmax.add(*block)
            losses.append(softmax.losses())
        return torch.cat(losses)


def summed_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """The sum of the losses of all targets in nats, a scalar. Arguments: those of `token_losses`.

    The loss has gradients for x_ND and weight_VD. `backward` may run only once.
    """
    if not (torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)):
        return token_losses(x_ND, weight_VD, targets_N, vocab_size).sum()
    loss: Tensor = _SummedLoss.apply(x_ND, weight_VD, targets_N, vocab_size)
    return loss


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # a softmax needs the precision


def _block_shape(x: Tensor) -> tuple[int, int]:
    return BLOCK.get(x.device.type, BLOCK["cuda"])


def _parts(x_ND: Tensor) -> list[slice]:
    tokens = _block_shape(x_ND)[0]
    return [slice(start, min(start + tokens, len(x_ND))) for start in range(0, len(x_ND), tokens)]


def _blocks(x_MD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice of the vocabulary, tanh(logits / cap), exp(capped logits)) for each block.

    The tensors are (M, W). The caller may modify both.
    """
    columns = _block_shape(x_MD)[1]
    for start in range(0, len(weight_VD), columns):
        where = slice(start, min(start + columns, len(weight_VD)))
        squashed = (x_MD @ weight_VD[where].mT).to(_wide(x_MD)).div_(LOGIT_CAP).tanh_()
        yield where, squashed, squashed.mul(LOGIT_CAP).exp_()


class _Softmax:
    """The softmax of M tokens over the blocks that were added so far; all its tensors are (M,)."""

    def __init__(self, targets_M: Tensor, wide: torch.dtype) -> None:
        self.targets, self.counts = targets_M.clamp_min(0), targets_M != IGNORED_TARGET
        self.sums = torch.zeros(len(targets_M), dtype=wide, device=targets_M.device)
        self.squashed = torch.zeros_like(self.sums)  # of the target

    def add(self, columns: slice, squashed: Tensor, exps: Tensor) -> None:
        """Add a block of the vocabulary, `columns`. In `exps`, sets the entries of the targets to 0."""
        self.sums += exps.sum(dim=1)
        here = (self.targets >= columns.start) & (self.targets < columns.stop)
        at = (self.targets - columns.start).clamp(0, squashed.size(1) - 1)[:, None]
        self.squashed = torch.where(here, squashed.gather(1, at).squeeze(1), self.squashed)
        exps.scatter_(1, at, exps.gather(1, at) * ~here[:, None])

    def losses(self) -> Tensor:
        return (self.sums.log() - LOGIT_CAP * self.squashed) * self.counts

    def target_gradients(self) -> Tensor:
        """Derivatives of the losses with respect to the targets' uncapped logits, (M,); 0 for target -1."""
        shares = (LOGIT_CAP * self.squashed).exp() / self.sums
        return (shares - 1) * (1 - self.squashed.square()) * self.counts


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or total = a @ b if `first`. Products of a narrow dtype are summed in total's dtype."""
    if total.dtype != a.dtype:
        product = a @ b
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


def add_rows(total_VD: Tensor, rows_M: Tensor, values_MD: Tensor) -> None:
    """Add values_MD to the rows rows_M of total_VD; repeated rows in a fixed order, for reproducible bits."""
    if total_VD.is_cuda:
        total_VD.index_put_((rows_M,), values_MD, accumulate=True)  # on a GPU it sorts; index_add_ does not
    else:
        total_VD.index_add_(0, rows_M, values_MD)  # on a CPU it adds rows in their order, unlike index_put_


class _SummedLoss(torch.autograd.Function):
    """Computes the loss and both gradients in forward, in one pass over the tokens; backward returns them.

    The derivative with respect to an uncapped logit is (p - t) (1 - tanh^2), where p = exp(capped logit) /
    sum, and t is 1 for the target, else 0. The kept blocks hold exp(capped logit) (1 - tanh^2) and are not
    divided by the sum: the other factor of each GEMM is divided instead. Their entries for the targets are 0,
    and the gradients of the targets are added separately: p - 1 is then computed before it is rounded to a
    narrow format, which is more precise where p is close to 1.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
        weight, wide = weight_VD[:vocab_size].to(x_ND.dtype), _wide(x_ND)
        grad_x, grad_weight = torch.empty_like(x_ND), torch.empty_like(weight_VD)
        grad_weight[vocab_size:] = 0
        total = torch.zeros((), dtype=torch.float64, device=x_ND.device)
        room = x_ND.new_empty(min(_block_shape(x_ND)[0], len(x_ND)) * vocab_size)
        for part in _parts(x_ND):
            x, softmax = x_ND[part], _Softmax(targets_N[part], wide)
            grad = x.new_empty(x.shape, dtype=wide)
            kept = []
            for columns, squashed, exps in _blocks(x, weight):
                softmax.add(columns, squashed, exps)
                block = room[len(x) * columns.start : len(x) * columns.stop].view(squashed.shape)
                torch.addcmul(exps, exps, squashed.square_(), value=-1, out=exps)
                block.copy_(exps)
                _add_product(grad, block, weight[columns], first=columns.start == 0)
                kept.append((columns, block))
            total += softmax.losses().sum()
            shares = softmax.counts[:, None] / softmax.sums[:, None]
            of_targets = softmax.target_gradients()[:, None]
            grad_x[part] = grad.mul_(shares).addcmul_(of_targets, weight[softmax.targets].to(wide))
            divided = (x * shares).to(x.dtype)
            for columns, block in kept:
                _add_product(grad_weight[columns], block.mT, divided, first=part.start == 0)
            add_rows(grad_weight, softmax.targets, (x * of_targets).to(grad_weight.dtype))
        ctx.save_for_backward(grad_x, grad_weight)
        return total.to(wide)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_total.device.type != "cpu" or grad_total != 1:
            grad_x, grad_weight = grad_x * grad_total.to(grad_x.dtype), grad_weight * grad_total
        return grad_x, grad_weight, None, None
