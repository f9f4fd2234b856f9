"""Plain versions of the model and the optimizers, written to be read against their definitions.

Loops instead of masks and fused kernels: one row, one position at a time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.gpt import GPTConfig

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden.json").read_text())
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def fill_by_formula(model: nn.Module) -> None:
    """Set a freshly initialised model's weights to amplitude * sin(0.37 i + phase), as golden.json's were."""
    amplitudes = {"wte": 0.8, "lm_head": 0.02, "value_embeds": 0.05, "gate": 0.02}
    for name, p in model.named_parameters():
        if name in ("resid_lambdas", "x0_lambdas", "backout_lambda"):
            continue
        if name == "smear_lambda":
            p.data.fill_(0.3)
            continue
        amplitude = next((a for part, a in amplitudes.items() if part in name), 0.05)
        phase = sum((k + 1) * byte for k, byte in enumerate(name.encode())) % 1000 / 1000
        i = torch.arange(p.numel(), dtype=torch.float64)
        p.data.copy_((amplitude * torch.sin(0.37 * i + phase)).view_as(p))


def tokens_by_formula(batch: int, length: int, vocab_size: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (batch, length) of a step of golden.json."""
    i = torch.arange(batch * (length + 1))
    tokens = ((31 * i * i + 17 * i + 101 * step) % vocab_size).view(batch, length + 1)
    return tokens[:, :-1], tokens[:, 1:]


def rms(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps)


def rotate(heads: Tensor, position: int) -> Tensor:
    """The vectors (H, E) of one position, turned by its angles."""
    half = heads.size(1) // 2
    angles = [position / 100_000 ** (2 * i / heads.size(1)) for i in range(half)]
    cos = torch.tensor([math.cos(angle) for angle in angles], dtype=heads.dtype)
    sin = torch.tensor([math.sin(angle) for angle in angles], dtype=heads.dtype)
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat([a * cos + b * sin, -a * sin + b * cos], dim=1)


def visible(query: int, window: int) -> list[int]:
    """The keys a query sees."""
    return [key for key in range(query + 1) if query - key <= window]


def window_of(config: GPTConfig, layer: int) -> int:
    letter = config.window_pattern[layer % len(config.window_pattern)]
    if letter == "L" or layer == config.n_layer - 1:
        return config.sequence_len
    return math.ceil(config.sequence_len / 4 / 128) * 128


def attention(x: Tensor, tokens: Tensor, W: dict[str, Tensor], config: GPTConfig, layer: int) -> Tensor:
    """One row x (T, D) through a layer's attention."""
    T, E, at = x.size(0), config.head_dim, f"transformer.h.{layer}.attn"
    q, k, v = (
        (x @ W[f"{at}.{name}.weight"].T).view(T, heads, E)
        for name, heads in (("c_q", config.n_head), ("c_k", config.n_kv_head), ("c_v", config.n_kv_head))
    )
    if f"value_embeds.{layer}.weight" in W:
        gate = 3 * torch.sigmoid(x[:, :12] @ W[f"{at}.ve_gate.weight"].T)
        v = v + gate[:, :, None] * W[f"value_embeds.{layer}.weight"][tokens].view(T, -1, E)
    q = torch.stack([1.2 * rms(rotate(q[t], t)) for t in range(T)])
    k = torch.stack([1.2 * rms(rotate(k[t], t)) for t in range(T)])
    kv_head = [head // (config.n_head // config.n_kv_head) for head in range(config.n_head)]
    k, v = k[:, kv_head], v[:, kv_head]
    out = []
    for t in range(T):
        seen = visible(t, window_of(config, layer))
        scores = torch.einsum("he,khe->hk", q[t], k[seen]) / math.sqrt(E)
        out.append(torch.einsum("hk,khe->he", torch.softmax(scores, dim=1), v[seen]).flatten())
    return torch.stack(out) @ W[f"{at}.c_proj.weight"].T


def logits_of_row(tokens: Tensor, W: dict[str, Tensor], config: GPTConfig) -> Tensor:
    """Logits (T, V) of one row of tokens (T), from weights by name."""
    embedded = rms(W["transformer.wte.weight"][tokens])
    rows = [embedded[0]]
    for t in range(1, len(tokens)):
        gate = torch.sigmoid(W["smear_gate.weight"][0] @ embedded[t, :24])
        rows.append(embedded[t] + W["smear_lambda"] * gate * embedded[t - 1])
    x = x0 = backout = torch.stack(rows)
    for layer in range(config.n_layer):
        mlp = f"transformer.h.{layer}.mlp"
        x = W["resid_lambdas"][layer] * x + W["x0_lambdas"][layer] * x0
        x = x + attention(rms(x), tokens, W, config, layer)
        hidden = torch.clamp(rms(x) @ W[f"{mlp}.c_fc.weight"].T, min=0) ** 2
        x = x + hidden @ W[f"{mlp}.c_proj.weight"].T
        if layer == config.n_layer // 2:
            backout = x
    x = rms(x - W["backout_lambda"] * backout)
    return 15 * torch.tanh((x @ W["lm_head.weight"].T)[:, : config.vocab_size] / 15)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of one row over the targets that are not -1."""
    losses = [
        -torch.log_softmax(row, dim=0)[t] for row, t in zip(logits, targets.tolist(), strict=True) if t >= 0
    ]
    return torch.stack(losses).mean()


def muon_step(
    p: Tensor,
    G: Tensor,
    buffer: Tensor,
    second: Tensor,
    lr: float,
    momentum: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One Muon step of a matrix: its new value, momentum buffer and second moment (a vector)."""
    rows, cols = p.shape
    buffer = momentum * buffer + (1 - momentum) * G
    g = (1 - momentum) * G + momentum * buffer
    mean_norm = math.sqrt(g.square().sum()) / math.sqrt(rows)
    g = torch.stack([row * mean_norm / max(math.sqrt(row.square().sum()), 1e-6) for row in g])
    X = g / (1.01 * math.sqrt(g.square().sum()) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        if rows <= cols:
            A = X @ X.T
            X = a * X + (b * A + c * (A @ A)) @ X
        else:
            A = X.T @ X
            X = a * X + X @ (b * A + c * (A @ A))
    X = X * math.sqrt(min(rows, cols)) / max(math.sqrt(X.square().sum()), 1e-6)
    before = math.sqrt(X.square().sum())
    if rows >= cols:
        second = 0.9 * second + 0.1 * X.square().mean(dim=1)
        X = X / torch.sqrt(second.clamp(min=1e-10))[:, None]
    else:
        second = 0.9 * second + 0.1 * X.square().mean(dim=0)
        X = X / torch.sqrt(second.clamp(min=1e-10))[None, :]
    X = X * before / max(math.sqrt(X.square().sum()), 1e-10)
    lr = lr * math.sqrt(max(1.0, rows / cols))
    shrink = torch.where(X * p >= 0, decay * p, torch.zeros_like(p))
    return p - lr * X - lr * shrink, buffer, second


def adamw_step(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Step number `step`, from 1, of AdamW: the new value and both moments."""
    beta1, beta2 = betas
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1**step) * m / (torch.sqrt(v / (1 - beta2**step)) + 1e-10)
    return p, m, v
