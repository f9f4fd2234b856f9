"""The shape of a model: context, vocabulary, layers, heads and width. Checkpoints and exports contain it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

VOCAB_MULTIPLE = 64  # the rows of embeddings and lm_head are a multiple of it, which makes GEMMs faster
SMEAR_CHANNELS = 24  # the smear gate reads this many channels of the embedding


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model, which determines the shapes of its parameters.

    sequence_len: the number of tokens of the context, T. vocab_size: the number of tokens of the tokenizer.
    n_layer: the number of layers. n_embd: the width D. n_head: the number of attention heads. n_kv_head: the
        number of heads of keys and values.
    window_pattern: the attention windows: letters S (a quarter of the context, rounded up to a multiple of
        128 tokens) and L (whole context), repeated over the layers; the last layer is always L.
    Raises ValueError if a value is out of range or contradicts another value.
    """

    sequence_len: int = 1024
    vocab_size: int = 32_768
    n_layer: int = 8
    n_head: int = 4
    n_kv_head: int = 4
    n_embd: int = 512
    window_pattern: str = "SSSL"

    def __post_init__(self) -> None:
        for name in ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_embd < SMEAR_CHANNELS:
            raise ValueError(f"n_embd must be at least {SMEAR_CHANNELS}, not {self.n_embd}")
        if self.n_embd % self.n_head or self.head_dim % 2:
            raise ValueError(f"n_embd {self.n_embd} does not make {self.n_head} heads of an even width")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(f"window_pattern is made of S and L, not {self.window_pattern!r}")

    @classmethod
    def from_depth(
        cls,
        depth: int,
        vocab_size: int,
        sequence_len: int = 1024,
        aspect_ratio: int = 64,
        head_dim: int = 128,
        n_kv_head: int = 0,
        window_pattern: str = "SSSL",
    ) -> GPTConfig:
        """The shape of a model of `depth` layers.

        The width is depth * aspect_ratio, rounded up to a multiple of head_dim, the width of a head.
        n_kv_head: the number of heads of keys and values; 0: the number of attention heads. vocab_size,
        sequence_len, window_pattern: as for GPTConfig.
        """
        n_head = ceil(depth * aspect_ratio / head_dim)
        kv_heads, n_embd = n_kv_head or n_head, n_head * head_dim
        return cls(sequence_len, vocab_size, depth, n_head, kv_heads, n_embd, window_pattern)

    @property
    def head_dim(self) -> int:
        """The width of an attention head."""
        return self.n_embd // self.n_head

    @property
    def kv_dim(self) -> int:
        """The width of all heads of keys together, which is also that of the values."""
        return self.n_kv_head * self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of embeddings and lm_head: vocab_size, rounded up to a multiple of 64."""
        return ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def has_value_embedding(self, layer: int) -> bool:
        """Whether the layer has a value embedding: every second one, including the last."""
        return layer % 2 == (self.n_layer - 1) % 2

    def windows(self) -> list[int]:
        """The attention window of each layer in tokens: the query at t sees the keys t - window .. t."""
        sizes = {"S": ceil(self.sequence_len / 4 / 128) * 128, "L": self.sequence_len}
        tiled = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.n_layer)]
        return [sizes[letter] for letter in [*tiled[:-1], "L"]]
