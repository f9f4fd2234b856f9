"""The GPT: nanochat's architecture, its initialisation, and its counts of parameters and FLOPs.

    config = GPTConfig.from_depth(8, vocab_size=32768)
    model = GPT(config)
    model.init_weights()
    loss = model(idx, targets)                      # scalar
    logits = model(idx)                             # (B, T, V)
    cache = KVCache(config, batch_size=1, max_len=256)
    logits = model(idx, cache=cache)                # in later calls, pass only the new tokens
    model.compute_dtype = torch.bfloat16            # for GEMMs; weights and gradients keep their dtype
    model.recompute = True                          # backward computes each layer again: less memory

Parameter names are those of nanochat, so that nanochat can load a state dict of this model, and the reverse.
Shapes: B rows, T tokens, D = n_embd, H heads of E = head_dim, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.attention import Rotary, attend, rotary_tables
from trainer.model.config import SMEAR_CHANNELS, GPTConfig
from trainer.model.kv_cache import Cache
from trainer.model.loss import IGNORED_TARGET, LOGIT_CAP, summed_loss, token_losses
from trainer.model.ops import rms, rotate_rms, squared_relu
from trainer.model.recompute import recomputed

VE_GATE_CHANNELS = 12  # a value-embedding gate reads this many channels of its layer's input
QK_SCALE = 1.2  # sharpens attention after q and k are normalised

LossReduction = Literal["mean", "sum", "none"]


class Linear(nn.Linear):
    """A linear layer without bias. It computes in the dtype of its input, not in that of its weight."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing: GPT.init_weights() sets the weights and would overwrite PyTorch's initial values."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """An embedding without PyTorch's initialisation, which imports torch._dynamo on the device `meta`."""

    def reset_parameters(self) -> None:
        """Does nothing: GPT.init_weights() sets the weights."""


class Attention(nn.Module):
    """Causal attention with rotary positions, normalised q and k, and a value embedding on some layers.

    A value embedding is a second embedding of each token, which is added to v with a learned gate. config:
    shape of the model. layer: number of the layer, from 0.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.grouped = config.n_kv_head != config.n_head
        self.c_q = Linear(config.n_embd, config.n_embd)
        self.c_k = Linear(config.n_embd, config.kv_dim)
        self.c_v = Linear(config.n_embd, config.kv_dim)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        if config.has_value_embedding(layer):
            self.ve_gate = Linear(VE_GATE_CHANNELS, config.n_kv_head)

    def forward(
        self, x: Tensor, ve: Tensor | None, rotary: Rotary, window: int, cache: Cache | None
    ) -> Tensor:
        """The result of the attention for x (B, T, D), in x's shape.

        ve: value embeddings, (B, T, kv_dim), or None. rotary: cos and sin of the positions. window: the
        number of keys before its own that a query sees. cache: keys and values of earlier tokens, or None.
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(x).view(heads) for project in (self.c_q, self.c_k, self.c_v))
        if ve is not None:
            gate_BTH1 = 3 * torch.sigmoid(self.ve_gate(x[..., :VE_GATE_CHANNELS])).unsqueeze(-1)
            v = v + gate_BTH1 * ve.view(heads)
        q, k = (rotate_rms(y, *rotary, QK_SCALE) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if cache is None:
            y_BHTE = attend(q, k, v, window, self.grouped)
        else:
            y_BHTE = cache.attend(self.layer, q, k, v, window, self.grouped)
        return self.c_proj(y_BHTE.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    """The MLP of a layer: two linear layers with a squared ReLU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(squared_relu(self.c_fc(x)))


class Block(nn.Module):
    """A layer of the transformer: attention and MLP, each added to the residual stream.

    config: shape of the model. layer: number of the layer, from 0.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, ve: Tensor | None, rotary: Rotary, window: int, cache: Cache | None
    ) -> Tensor:
        """Apply the layer to x (B, T, D); returns a tensor of x's shape and dtype.

        GEMMs are computed in the dtype of `rotary`. ve, rotary, window, cache: as for Attention.
        """
        compute_dtype = rotary[0].dtype
        x = x + self.attn(rms(x).to(compute_dtype), ve, rotary, window, cache)
        return x + self.mlp(rms(x).to(compute_dtype))


class GPT(nn.Module):
    """The whole model. Its weights are undefined until `init_weights()` or `load_state_dict()`.

    config: the shape of the model. cos, sin: tables of the rotary angles, (positions, 1, head_dim / 2).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self._compute_dtype: torch.dtype | None = None
        self.recompute = False
        vocab, layers = config.padded_vocab_size, range(config.n_layer)
        wte = Embedding(vocab, config.n_embd)
        blocks = nn.ModuleList(Block(config, layer) for layer in layers)
        self.transformer = nn.ModuleDict({"wte": wte, "h": blocks})
        self.lm_head = Linear(config.n_embd, vocab)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = Linear(SMEAR_CHANNELS, 1)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        with_ve = [layer for layer in layers if config.has_value_embedding(layer)]
        self.value_embeds = nn.ModuleDict({str(i): Embedding(vocab, config.kv_dim) for i in with_ve})
        cos, sin = rotary_tables(config.sequence_len, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialise every parameter, in the order of `named_parameters()`.

        generator: the source of the random numbers; None: torch's default generator.
        """
        s = sqrt(3 / self.config.n_embd)  # uniform(-s, s) has the standard deviation 1 / sqrt(D)
        for name, p in self.named_parameters():
            match name.removesuffix(".weight").split("."):
                case ["transformer", "wte"]:
                    p.normal_(0.0, 0.8, generator=generator)
                case ["lm_head"]:
                    p.normal_(0.0, 0.001, generator=generator)
                case [*_, "c_q" | "c_k" | "c_v"] | ["value_embeds", _]:
                    p.uniform_(-s, s, generator=generator)
                case [*_, "c_fc"]:
                    p.uniform_(-0.4 * s, 0.4 * s, generator=generator)
                case [*_, "ve_gate" | "smear_gate"]:
                    p.uniform_(0.0, 0.02, generator=generator)
                case [*_, "c_proj"] | ["smear_lambda"]:
                    p.zero_()
                case ["backout_lambda"]:
                    p.fill_(0.2)
                case ["resid_lambdas"]:
                    p.copy_(1.15 - 0.10 * self._depth_fractions())
                case ["x0_lambdas"]:
                    p.copy_(0.20 - 0.15 * self._depth_fractions())
                case _:
                    raise ValueError(f"no initialisation is known for parameter {name}")

    def _depth_fractions(self) -> Tensor:
        """Relative depth of each layer, shape (L,): 0 for the first to 1 for the last."""
        n_layer = self.config.n_layer
        return torch.arange(n_layer, dtype=torch.float64) / max(n_layer - 1, 1)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.resid_lambdas.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of GEMMs and their inputs. If it is not assigned, it is the dtype of the weights.

        The residual stream and norms keep the dtype of the weights. That costs no time and preserves the
        gradients of the scalar parameters: while some weights are still near zero, these gradients are so
        small that bfloat16 leaves only rounding noise, which AdamW would scale up to whole steps.
        """
        return self._compute_dtype or self.resid_lambdas.dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype) -> None:
        self._compute_dtype = dtype

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        loss_reduction: LossReduction = "mean",
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Return the logits of the tokens idx (B, T), or their cross-entropy in nats if targets are given.

        Logits are (B, T, V) in float32 or better. targets: token ids, (B, T); -1 is ignored. loss_reduction:
        "mean" or "sum" of the losses, a scalar; "none": the loss of each token, (B * T,), without gradients.
        cache: keys and values of the earlier tokens of the sequences that idx continues. last_only: return
        the logits of the last token only, (B, 1, V). Raises ValueError if earlier and new tokens together are
        more than sequence_len, or more than the cache can hold.
        """
        x_BTD = self._body(idx, cache)
        weight, vocab_size = self.lm_head.weight, self.config.vocab_size
        if targets is None:
            return self._logits(x_BTD[:, -1:] if last_only else x_BTD)
        flat = x_BTD.flatten(0, 1), weight, targets.flatten(), vocab_size
        if loss_reduction == "none":
            return token_losses(*flat)
        loss = summed_loss(*flat)
        return loss / (targets != IGNORED_TARGET).sum() if loss_reduction == "mean" else loss

    def logits_at(self, idx: Tensor, chosen: Tensor) -> Tensor:
        """Logits of selected positions only, (positions, V), row by row.

        idx: token ids, (B, T). chosen: bool, (B, T), True at the selected positions. The other positions take
        neither time nor memory for logits. Raises ValueError if T is more than sequence_len.
        """
        return self._logits(self._body(idx, None)[chosen])

    def _logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) from the input of lm_head (..., D)."""
        logits = self.lm_head(x)[..., : self.config.vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)

    @contextmanager
    def longer_context(self, tokens: int) -> Iterator[None]:
        """While active, the model accepts sequences of `tokens` tokens, if that is more than sequence_len.

        A context manager. Rotary positions continue past those of the training; attention windows stay as
        they are.
        """
        before = self.cos, self.sin
        if tokens > self.config.sequence_len:
            self.cos, self.sin = (table.to(self.cos) for table in rotary_tables(tokens, self.config.head_dim))
        try:
            yield
        finally:
            self.cos, self.sin = before

    def _body(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """The input of lm_head for the tokens idx (B, T): shape (B, T, D), in the compute dtype."""
        config, compute_dtype = self.config, self.compute_dtype
        starts = cache.lengths if cache else [0]
        end = max(starts) + idx.size(1)
        limit = min(self.cos.size(0), cache.max_len) if cache else self.cos.size(0)
        if end > limit:
            raise ValueError(f"{end} tokens do not fit: at most {limit} here")
        windows = config.windows()

        x = rms(self.transformer["wte"](idx))
        at = slice(starts[0], end) if min(starts) == max(starts) else self._positions(starts, idx.size(1))
        rotary = (self.cos[at].to(compute_dtype), self.sin[at].to(compute_dtype))
        before = cache.last_B1D if cache else torch.zeros_like(x[:, :1])
        previous = torch.cat((before, x[:, :-1]), dim=1)
        embedded = x
        x = x + self.smear_lambda * torch.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS])) * previous

        x0 = backout = x
        for layer, block in enumerate(self.transformer["h"].children()):
            apply = partial(self._layer, layer, block, idx, rotary, windows[layer], cache)
            is_training = cache is None and torch.is_grad_enabled()
            x = recomputed(apply, x0, x) if self.recompute and is_training else apply(x0, x)
            if layer == config.n_layer // 2:
                backout = x
        if cache:
            cache.advance(embedded[:, -1:], idx.size(1))

        return rms(x - self.backout_lambda * backout).to(compute_dtype)

    def _positions(self, starts: Sequence[int], count: int) -> Tensor:
        """Positions of `count` tokens after each of `starts`: (B, count)."""
        return torch.tensor(starts, device=self.device)[:, None] + torch.arange(count, device=self.device)

    def _layer(
        self,
        layer: int,
        block: nn.Module,
        idx: Tensor,
        rotary: Rotary,
        window: int,
        cache: Cache | None,
        x0: Tensor,
        x: Tensor,
    ) -> Tensor:
        """Apply layer number `layer` to the weighted sum of x and x0; returns (B, T, D).

        x: the residual stream, (B, T, D). x0: the input of the first layer, in x's shape. block: the layer.
        idx: token ids, (B, T), for the value embedding. rotary, window, cache: as for Attention.
        """
        ve = None
        if self.config.has_value_embedding(layer):
            ve = self.value_embeds[str(layer)](idx).to(rotary[0].dtype)
        x = self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * x0
        y: Tensor = block(x, ve, rotary, window, cache)
        return y

    def param_counts(self) -> dict[str, int]:
        """The number of parameters by group. Rows that pad the vocabulary are included.

        Keys: wte, value_embeds, lm_head, transformer_matrices, scalars (the smear gate included) and total.
        """
        counts = dict.fromkeys(("wte", "value_embeds", "lm_head", "transformer_matrices", "scalars"), 0)
        for name, p in self.named_parameters():
            part = name.removeprefix("transformer.").partition(".")[0]
            group = "transformer_matrices" if part == "h" else part if part in counts else "scalars"
            counts[group] += p.numel()
        return {**counts, "total": sum(counts.values())}

    def flops_per_token(self) -> int:
        """FLOPs per token, forward and backward: 6 per weight of a Linear, plus attention."""
        linear = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        keys = sum(min(window, self.config.sequence_len) for window in self.config.windows())
        return 6 * linear + 12 * self.config.n_embd * keys


def scaling_params(config: GPTConfig) -> int:
    """The number of parameters of the transformer matrices and lm_head. No parameter is allocated.

    Batch size, steps and rates of a run are derived from this number (trainer.optim.lr_schedule).
    """
    with torch.device("meta"):
        counts = GPT(config).param_counts()
    return counts["transformer_matrices"] + counts["lm_head"]
