"""Caches of the keys and values of earlier tokens, for generation.

KVCache is for a batch of rows of equal length, KVCacheRows for rows of different lengths.

Shapes: L layers, B rows, T tokens, H = n_kv_head heads of E = head_dim, D = n_embd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.model.attention import attend
from trainer.model.config import GPTConfig


class KVCache:
    """Keys and values of earlier tokens, so that generating a token does not recompute them.

    config: shape of the model. batch_size: the number of rows, B. max_len: the maximum length of a row in
        tokens.
    dtype: the model's compute_dtype. device: the device of the tensors.
    k_LBHTE, v_LBHTE: keys and values, (L, B, H, max_len, E). length: the number of tokens of each row so far.
    last_B1D: embedding of the last token, (B, 1, D).
    Under `torch.no_grad()`, pass the cache to `GPT.forward`, which appends the new tokens.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.n_layer, batch_size, config.n_kv_head, max_len, config.head_dim)
        self.k_LBHTE = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBHTE = torch.zeros(shape, dtype=dtype, device=device)
        self.last_B1D = torch.zeros((batch_size, 1, config.n_embd), dtype=dtype, device=device)
        self.max_len = max_len
        self.length = 0

    @property
    def lengths(self) -> list[int]:
        """For each row, the number of tokens that the cache holds."""
        return [self.length] * self.last_B1D.size(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, grouped: bool) -> Tensor:
        """Append the keys and values of new tokens in one layer, and attend to these and earlier ones.

        layer: the number of the layer, from 0. q, k, v: (B, heads, new tokens, E). window: the number of keys
        before its own that a query sees. grouped: whether there are fewer heads of keys than of queries.
        Returns a tensor of q's shape.
        """
        end = self.length + k.size(2)
        self.k_LBHTE[layer, :, :, self.length : end] = k
        self.v_LBHTE[layer, :, :, self.length : end] = v
        seen = slice(max(0, self.length - window), end)
        return attend(q, self.k_LBHTE[layer, :, :, seen], self.v_LBHTE[layer, :, :, seen], window, grouped)

    def advance(self, last_B1D: Tensor, count: int) -> None:
        """Count new tokens as part of the cache, after all layers have attended to them.

        count: the number of new tokens of each row. last_B1D: the embedding of the last new token, (B, 1, D).
        The model adds it, weighted by a learned gate (smear), to the embedding of the next token.
        """
        self.last_B1D = last_B1D
        self.length += count


class KVCacheRows:
    """Combines caches of one row each, with different lengths, into one batch: row i has caches[i]."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = caches
        self.max_len = min(cache.max_len for cache in caches)

    @property
    def lengths(self) -> list[int]:
        return [cache.length for cache in self.caches]

    @property
    def last_B1D(self) -> Tensor:  # noqa: N802 - an attribute of KVCache, with its shape in the name
        return torch.cat([cache.last_B1D for cache in self.caches])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, grouped: bool) -> Tensor:
        """As KVCache.attend, each row with its own keys and values. q, k, v: (rows, heads, 1, E)."""
        rows = zip(self.caches, q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([cache.attend(layer, q1, k1, v1, window, grouped) for cache, q1, k1, v1 in rows])

    def advance(self, last_B1D: Tensor, count: int) -> None:
        for cache, last in zip(self.caches, last_B1D.split(1), strict=True):
            cache.advance(last, count)


Cache = KVCache | KVCacheRows
