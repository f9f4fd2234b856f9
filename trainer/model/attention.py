"""Causal attention with windows: a query sees the key at its own position and `window` keys before it.

On a CPU the attention of whole sequences is computed as GEMMs, over blocks of queries and the keys that they
see. These GEMMs reach the processor's GEMM rate, also in bfloat16; torch's attention reaches it in bfloat16
only on processors with AMX. On a GPU, and with cached keys, torch's attention is used.
Shapes: B rows, T tokens, H heads of queries with E numbers each; G heads of queries share one head of keys
and values; N = B * H / G.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROTARY_BASE = 100_000.0
BLOCK = 128  # queries per block
KEEP_BYTES = 2**25  # attention weights of a layer are kept for backward up to this size, else recomputed

Rotary = tuple[Tensor, Tensor]  # cosines and sines, (T, 1, E / 2)


def rotary_tables(length: int, head_dim: int) -> Rotary:
    """cos and sin of the rotary angles, each (length, 1, head_dim / 2) in float32.

    The tables are computed in float64 and then rounded, so that all CPUs get the same bits. They are
    always on the CPU, also if the default device is `meta`: there, torch.arange imports torch._dynamo, which
    takes seconds.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, ROTARY_BASE**-exponents)[:, None, :]
    return angles.cos().float(), angles.sin().float()


def window_mask(n_query: int, n_key: int, window: int, device: torch.device) -> Tensor | None:
    """The attention mask: bool, (n_query, n_key), True where the query sees the key.

    The queries are at the last `n_query` positions of the keys. window: the number of keys before its own
    that a query sees. Returns None if a plain causal mask has the same effect.
    """
    if n_query == n_key and window >= n_key - 1:
        return None
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    distance = query - torch.arange(n_key, device=device)
    return (distance >= 0) & (distance <= window)


def attend(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, window: int, grouped: bool) -> Tensor:
    """Causal attention: each query sees the key at its own position and `window` keys before it.

    q_BHTE: queries, (B, H, T, E). k_BHTE, v_BHTE: keys and values, (B, heads, tokens, E), tokens >= T; the
    queries belong to the last T of these positions. grouped: whether there are fewer heads of keys than of
    queries. Returns a tensor of q's shape.
    """
    n_query, n_key = q_BHTE.size(2), k_BHTE.size(2)
    if n_query == n_key and q_BHTE.device.type == "cpu":
        y_BHTE: Tensor = _InBlocks.apply(q_BHTE, k_BHTE, v_BHTE, min(window, n_key - 1))
        return y_BHTE
    sees_all = n_query == 1 and n_key <= window + 1
    mask = None if sees_all else window_mask(n_query, n_key, window, q_BHTE.device)
    causal = mask is None and not sees_all
    return F.scaled_dot_product_attention(
        q_BHTE, k_BHTE, v_BHTE, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


class _InBlocks(torch.autograd.Function):
    """Attention in blocks of queries. Logits and softmax are in float32 or better, the rest in q's dtype."""

    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, window: int) -> Tensor:
        rows, heads = k_BHTE.shape[:2]
        k_NTE, v_NTE = k_BHTE.flatten(0, 1), v_BHTE.flatten(0, 1)
        q_NGTE = q_BHTE.reshape(rows * heads, -1, *q_BHTE.shape[2:])
        softmax = _Softmax(q_NGTE, k_NTE, window)
        keeps = any(ctx.needs_input_grad) and softmax.nbytes <= KEEP_BYTES
        y_BHTE, kept = torch.empty_like(q_BHTE), []
        y_BHGTE = y_BHTE.unflatten(1, (heads, -1))
        for queries, keys in _blocks(q_NGTE.size(2), window):
            P = softmax(queries, keys)
            y = torch.bmm(P, v_NTE[:, keys])
            y_BHGTE[:, :, :, queries] = y.view(rows, heads, q_NGTE.size(1), -1, y.size(-1))
            kept += [P] if keeps else []
        ctx.save_for_backward(q_NGTE, k_NTE, v_NTE, y_BHTE, *kept)
        ctx.window = window
        return y_BHTE

    @staticmethod
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NGTE, k_NTE, v_NTE, y_BHTE, *kept = ctx.saved_tensors
        softmax = _Softmax(q_NGTE, k_NTE, ctx.window)
        grad_NGTE = grad_BHTE.reshape(q_NGTE.shape)
        # The backward pass of softmax subtracts sum(P * dP) of a row from each dP; this sum is grad . y.
        common_NGT1 = (grad_BHTE * y_BHTE).sum(-1, keepdim=True, dtype=softmax.dtype)
        common_NGT1 = common_NGT1.reshape(*q_NGTE.shape[:3], 1)
        dq_NGTE, dk_NTE, dv_NTE = torch.empty_like(q_NGTE), torch.zeros_like(k_NTE), torch.zeros_like(v_NTE)
        for number, (queries, keys) in enumerate(_blocks(q_NGTE.size(2), ctx.window)):
            P = kept[number] if kept else softmax(queries, keys)
            q, grad, common = (x[:, :, queries].flatten(1, 2) for x in (q_NGTE, grad_NGTE, common_NGT1))
            k, v = k_NTE[:, keys], v_NTE[:, keys]
            logits = (torch.bmm(grad, v.mT) - common).mul_(P).to(q.dtype)
            dq_NGTE[:, :, queries] = torch.bmm(logits, k).view(dq_NGTE[:, :, queries].shape)
            dk_NTE[:, keys] += torch.bmm(logits.mT, q)
            dv_NTE[:, keys] += torch.bmm(P.mT, grad)
        dq_NGTE *= softmax.scale
        dk_NTE *= softmax.scale
        shape = (grad_BHTE.size(0), -1, *k_NTE.shape[1:])
        return dq_NGTE.view(grad_BHTE.shape), dk_NTE.view(shape), dv_NTE.view(shape), None


def _blocks(length: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield (slice of the queries of a block, slice of the keys that they see) for each block."""
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        yield slice(start, end), slice(max(0, start - window), end)


class _Softmax:
    """Computes the attention weights of a block of queries: (N, G * queries, keys), in the dtype of q."""

    def __init__(self, q_NGTE: Tensor, k_NTE: Tensor, window: int) -> None:
        self.format, self.dtype = q_NGTE.dtype, torch.promote_types(q_NGTE.dtype, torch.float32)
        self.scale, self.window = q_NGTE.size(-1) ** -0.5, window
        self.q_NGTE, self.k_NTE = q_NGTE.to(self.dtype), k_NTE.to(self.dtype)
        mask = window_mask(BLOCK, window + BLOCK, window, q_NGTE.device)
        assert mask is not None
        self.hidden = torch.zeros(mask.shape, dtype=self.dtype).masked_fill_(~mask, -math.inf)

    @property
    def nbytes(self) -> int:
        """An upper bound of the bytes that the attention weights of all blocks take."""
        queries = self.q_NGTE.shape[:3].numel()
        return queries * min(self.window + BLOCK, self.k_NTE.size(1)) * self.format.itemsize

    def __call__(self, queries: slice, keys: slice) -> Tensor:
        q = self.q_NGTE[:, :, queries].flatten(1, 2)
        first = self.window - (queries.start - keys.start)
        hidden = self.hidden[: queries.stop - queries.start, first : first + keys.stop - keys.start]
        hidden = hidden.repeat(self.q_NGTE.size(1), 1)
        logits = torch.baddbmm(hidden, q, self.k_NTE[:, keys].mT, alpha=self.scale)
        return logits.softmax(-1).to(self.format)
