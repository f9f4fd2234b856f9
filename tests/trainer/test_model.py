"""The model against upstream's figures and against the plain version in reference.py."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from trainer.model.attention import window_mask
from trainer.model.gpt import GPT, GPTConfig, scaling_params
from trainer.model.kv_cache import KVCache

# Grouped heads, a vocabulary off the multiple of 64, windows shorter than T; one layer; no short window.
ODD_CONFIGS = [
    GPTConfig(136, 70, n_layer=4, n_head=6, n_kv_head=2, n_embd=48, window_pattern="SSSL"),
    GPTConfig(132, 65, n_layer=3, n_head=3, n_kv_head=1, n_embd=30, window_pattern="S"),
    GPTConfig(40, 64, n_layer=1, n_head=2, n_kv_head=2, n_embd=32, window_pattern="S"),
    GPTConfig(33, 10, n_layer=2, n_head=1, n_kv_head=1, n_embd=24, window_pattern="L"),
]


def model_of(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """A model with every weight at work, the ones that start at zero too."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(1)
    model.init_weights(generator)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model.to(dtype)


def tokens_for(config: GPTConfig, batch: int = 1, length: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(config.vocab_size, (batch, length or config.sequence_len), generator=generator)


def test_the_origin_of_the_upstream_figures_is_recorded() -> None:
    """Upstream's commit, the cases and the script's description are those of this very file."""
    folder = Path(__file__).parent
    origin = json.loads((folder / "golden.origin.json").read_text())
    assert origin["sha256"] == hashlib.sha256((folder / "golden.json").read_bytes()).hexdigest()
    assert origin["upstream"]["commit"]
    assert len(origin["script"]) > 1
    assert origin["cases"] == [
        {
            "model": golden["config"],
            "batch": golden["batch"],
            "rates": golden["lrs"],
            "weight_decay": golden["weight_decay"],
            "steps": len(golden["steps"]),
        }
        for golden in reference.GOLDEN
    ]


@pytest.mark.parametrize("golden", reference.GOLDEN, ids=lambda golden: f"d{golden['config']['n_layer']}")
def test_upstream_figures(golden: dict[str, Any]) -> None:
    config = GPTConfig(**golden["config"])
    model = GPT(config)
    model.init_weights()
    reference.fill_by_formula(model)
    assert model.param_counts() == golden["params"]
    assert model.flops_per_token() == golden["flops_per_token"]
    assert config.windows() == golden["windows"]

    idx, targets = reference.tokens_by_formula(
        golden["batch"], config.sequence_len, config.vocab_size, step=0
    )
    logits = model(idx)
    torch.testing.assert_close(logits[0, -1, :8], torch.tensor(golden["logits_sample"]), atol=2e-5, rtol=0)
    assert logits.abs().mean().item() == pytest.approx(golden["logits_abs_mean"], rel=1e-4)
    loss = model(idx, targets)
    loss.backward()
    first = golden["steps"][0]
    assert loss.item() == pytest.approx(first["loss"], abs=2e-5)
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(first["grad_norms"], rel=1e-4)


def test_d8_costs_what_is_published() -> None:
    config = GPTConfig.from_depth(8, vocab_size=32_768)
    assert config == GPTConfig(1024, 32_768, 8, 4, 4, 512, "SSSL")
    with torch.device("meta"):
        model = GPT(config)
    assert model.param_counts() == {
        "wte": 16_777_216,
        "value_embeds": 67_108_864,
        "lm_head": 16_777_216,
        "transformer_matrices": 25_166_016,
        "scalars": 42,
        "total": 125_829_354,
    }
    assert model.flops_per_token() == 273_679_632
    assert scaling_params(config) == 25_166_016 + 16_777_216


def test_from_depth_raises_the_width_to_whole_heads() -> None:
    config = GPTConfig.from_depth(5, vocab_size=100, aspect_ratio=40, head_dim=64, n_kv_head=2)
    assert (config.n_embd, config.n_head, config.n_kv_head) == (256, 4, 2)
    assert config.padded_vocab_size == 128


@pytest.mark.parametrize("config", ODD_CONFIGS, ids=str)
def test_logits_and_gradients_match_the_plain_version(config: GPTConfig) -> None:
    model = model_of(config)
    idx = tokens_for(config, batch=2)
    targets = tokens_for(config, batch=2).roll(-1, dims=1)
    targets[:, ::5] = -1
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = [reference.logits_of_row(row, weights, config) for row in idx]
    torch.testing.assert_close(model(idx), torch.stack(logits), rtol=1e-6, atol=1e-6)

    loss = torch.stack([reference.mean_loss(*pair) for pair in zip(logits, targets, strict=True)]).mean()
    loss.backward()
    got = model(idx, targets)
    got.backward()
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(loss.item(), rel=1e-7)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.grad, weights[name].grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize(
    ("n_query", "n_key", "window"), [(9, 9, 3), (9, 9, 7), (1, 9, 4), (4, 9, 9), (1, 1, 5)]
)
def test_window_mask_is_the_loop(n_query: int, n_key: int, window: int) -> None:
    mask = window_mask(n_query, n_key, window, torch.device("cpu"))
    if mask is None:
        mask = torch.ones(n_query, n_key, dtype=torch.bool).tril()
    seen = [row.nonzero().flatten().tolist() for row in mask]
    assert seen == [reference.visible(query, window) for query in range(n_key - n_query, n_key)]


def test_a_window_that_covers_the_rows_needs_no_mask() -> None:
    assert window_mask(9, 9, 8, torch.device("cpu")) is None
    assert window_mask(9, 9, 7, torch.device("cpu")) is not None


def test_shorter_rows_are_the_start_of_longer_ones() -> None:
    config = ODD_CONFIGS[0]
    model, idx = model_of(config), tokens_for(config)
    full = model(idx)
    for length in (1, 2, 129, 135):
        torch.testing.assert_close(model(idx[:, :length]), full[:, :length], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", ODD_CONFIGS, ids=str)
def test_a_cache_changes_nothing_but_the_work(config: GPTConfig) -> None:
    model, idx = model_of(config), tokens_for(config, batch=2)
    cache = KVCache(config, batch_size=2, max_len=config.sequence_len, dtype=torch.float64)
    sizes = [7, 1, 1, 12, *[1] * (config.sequence_len - 21)]
    with torch.inference_mode():
        pieces = [model(piece, cache=cache) for piece in idx.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(idx), rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match=f"{config.sequence_len + 1} tokens do not fit"):
            model(idx[:, :1], cache=cache)


def test_loss_reductions_agree_and_ignored_targets_do_not_count() -> None:
    config = ODD_CONFIGS[2]
    model, idx = model_of(config), tokens_for(config, batch=2)
    targets = idx.roll(-1, dims=1)
    targets[0, 3:9] = -1
    each = model(idx, targets, loss_reduction="none")
    assert each.shape == (idx.numel(),)
    assert each[3:9].eq(0).all()
    torch.testing.assert_close(model(idx, targets, loss_reduction="sum"), each.sum())
    torch.testing.assert_close(model(idx, targets), each.sum() / (idx.numel() - 6))


def test_logits_are_float32_below_float64() -> None:
    config = ODD_CONFIGS[2]
    idx = tokens_for(config)
    assert model_of(config, torch.float32)(idx).dtype == torch.float32
    assert model_of(config, torch.bfloat16)(idx).dtype == torch.float32
    assert model_of(config)(idx).abs().max() <= 15


@pytest.mark.parametrize("config", ODD_CONFIGS, ids=str)
def test_bfloat16_products_stay_near_float32(config: GPTConfig) -> None:
    """Weights and gradients remain float32, the loss moves by 1 % and gradients keep their direction."""
    model = model_of(config, torch.float32)
    idx, targets = tokens_for(config, batch=2), tokens_for(config, batch=2).roll(-1, dims=1)
    assert model.compute_dtype == torch.float32
    exact = model(idx, targets)
    exact.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.compute_dtype = torch.bfloat16
    near = model(idx, targets)
    near.backward()
    assert near.dtype == torch.float32
    assert near.item() != exact.item()
    assert near.item() == pytest.approx(exact.item(), rel=0.01)
    for name, p in model.named_parameters():
        grad, wanted = p.grad, gradients[name]
        assert grad is not None
        assert wanted is not None
        assert p.dtype == grad.dtype == torch.float32
        if wanted.numel() > 8:  # a scalar's gradient is a sum of which little is left
            assert torch.cosine_similarity(grad.flatten(), wanted.flatten(), dim=0) > 0.98, name


def test_a_cache_holds_what_bfloat16_computes() -> None:
    config = ODD_CONFIGS[0]
    model, idx = model_of(config, torch.float32), tokens_for(config)[:, :20]
    model.compute_dtype = torch.bfloat16
    cache = KVCache(config, 1, config.sequence_len, model.compute_dtype, model.device)
    with torch.inference_mode():
        pieces = [model(piece, cache=cache) for piece in idx.split([7, 1, 12], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(idx), rtol=0.02, atol=0.1)
    assert cache.k_LBHTE.dtype == torch.bfloat16


def test_nothing_is_left_on_the_cpu() -> None:
    """The meta device stands in for a GPU: an operation on tensors of two devices fails on it as there."""
    config = ODD_CONFIGS[0]
    model = GPT(config).to("meta")
    model.compute_dtype = torch.bfloat16
    idx = torch.zeros(2, config.sequence_len, dtype=torch.long, device="meta")
    model(idx, idx).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
    cache = KVCache(config, 2, config.sequence_len, model.compute_dtype, model.device)
    with torch.no_grad():
        assert model(idx[:, :130], cache=cache).is_meta
        assert model(idx[:, :1], cache=cache).is_meta
    with pytest.raises(RuntimeError, match="device"):
        model(idx, torch.zeros(2, config.sequence_len, dtype=torch.long))


def test_too_long_rows_are_refused() -> None:
    config = ODD_CONFIGS[3]
    idx = torch.zeros(1, config.sequence_len + 1, dtype=torch.long)
    with pytest.raises(ValueError, match="34 tokens do not fit: at most 33"):
        model_of(config)(idx)


def test_init_weights_draws_the_published_distributions() -> None:
    config = GPTConfig(256, 512, n_layer=4, n_head=2, n_kv_head=2, n_embd=256)
    model = GPT(config)
    model.init_weights(torch.Generator().manual_seed(3))
    weights = model.state_dict()
    s = math.sqrt(3 / 256)
    assert weights["transformer.wte.weight"].std().item() == pytest.approx(0.8, rel=0.01)
    assert weights["lm_head.weight"].std().item() == pytest.approx(0.001, rel=0.01)
    for name, (low, high) in {
        "transformer.h.0.attn.c_q.weight": (-s, s),
        "transformer.h.1.attn.c_k.weight": (-s, s),
        "transformer.h.2.attn.c_v.weight": (-s, s),
        "value_embeds.1.weight": (-s, s),
        "transformer.h.3.mlp.c_fc.weight": (-0.4 * s, 0.4 * s),
        "transformer.h.3.attn.ve_gate.weight": (0.0, 0.02),
        "smear_gate.weight": (0.0, 0.02),
    }.items():
        assert low <= weights[name].min() < low + 0.2 * (high - low), name
        assert high >= weights[name].max() > high - 0.2 * (high - low), name
    for layer in range(4):
        assert not weights[f"transformer.h.{layer}.attn.c_proj.weight"].any()
        assert not weights[f"transformer.h.{layer}.mlp.c_proj.weight"].any()
    torch.testing.assert_close(
        weights["resid_lambdas"], torch.tensor([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    )
    torch.testing.assert_close(weights["x0_lambdas"], torch.tensor([0.20, 0.15, 0.10, 0.05]))
    assert weights["smear_lambda"].tolist() == [0.0]
    assert weights["backout_lambda"].item() == pytest.approx(0.2)

    again = GPT(config)
    again.init_weights(torch.Generator().manual_seed(3))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())


def test_state_dict_has_the_names_checkpoints_are_exchanged_by() -> None:
    with torch.device("meta"):
        names = set(GPT(GPTConfig(n_layer=2)).state_dict())
    blocks = {
        f"transformer.h.{i}.{part}.weight"
        for i in range(2)
        for part in ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert names == blocks | {
        "transformer.wte.weight",
        "transformer.h.1.attn.ve_gate.weight",
        "lm_head.weight",
        "resid_lambdas",
        "x0_lambdas",
        "smear_gate.weight",
        "smear_lambda",
        "backout_lambda",
        "value_embeds.1.weight",
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_layer": 0}, "n_layer must be at least 1"),
        ({"n_embd": 16, "n_head": 1, "n_kv_head": 1}, "n_embd must be at least 24"),
        ({"n_embd": 500, "n_head": 3, "n_kv_head": 3}, "does not make 3 heads"),
        ({"n_kv_head": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
        ({"window_pattern": "SXL"}, "made of S and L, not 'SXL'"),
        ({"window_pattern": ""}, "made of S and L, not ''"),
    ],
)
def test_impossible_shapes_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GPTConfig(**change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recomputed_layers_give_the_same_bits(dtype: torch.dtype) -> None:
    """Over two micro-batches, as autograd adds them up."""
    torch.manual_seed(1)
    model = GPT(GPTConfig.from_depth(4, 300, 160, aspect_ratio=16, head_dim=16)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    idx = torch.randint(300, (4, 161))
    found = []
    for model.recompute in (False, True):
        model.zero_grad()
        losses = []
        for part in idx.split(2):
            loss = model(part[:, :-1], part[:, 1:], loss_reduction="sum")
            loss.backward()
            losses.append(loss.item())
        found.append((losses, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (one, kept), (two, again) = found
    assert one == two
    for name, gradient in kept.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, again[name]), name


def test_recomputed_layers_keep_less() -> None:
    """Autograd keeps two tensors a layer instead of dozens."""
    model = GPT(GPTConfig.from_depth(4, 300, 160, aspect_ratio=16, head_dim=16))
    model.init_weights()
    idx = torch.randint(300, (2, 161))
    kept = []
    for model.recompute in (False, True):
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(idx[:, :-1], idx[:, 1:])
        weights = {p.data_ptr() for p in model.parameters()}
        kept.append(sum(size for pointer, size in sizes.items() if pointer not in weights))
        del loss
    assert kept[1] < kept[0] / 3
