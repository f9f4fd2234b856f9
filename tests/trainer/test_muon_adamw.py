"""Muon and AdamW against upstream's figures and the plain versions in reference.py, and shared out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch

from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import (
    MuonAdamW,
    build_optimizer,
    orthogonalize,
    polar_express_flops,
    width_scale,
)

# Two value embeddings and gates, so that every shape of matrix comes more than once, the 2 x 12 gates too.
CONFIG = GPTConfig(32, 70, n_layer=4, n_head=4, n_kv_head=2, n_embd=32, window_pattern="SL")
RATES = {
    "unembedding_lr": 0.004,
    "embedding_lr": 0.2,
    "matrix_lr": 0.02,
    "scalar_lr": 0.5,
    "weight_decay": 0.1,
}


def model_of(dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(CONFIG)
    model.init_weights(torch.Generator().manual_seed(1))
    return model.to(dtype)


def backward(model: GPT, step: int) -> float:
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(CONFIG.vocab_size, (2, CONFIG.sequence_len + 1), generator=generator)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item()


def give_random_gradients(model: GPT, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator) * 10.0 ** -(step % 3)


def build(model: GPT) -> MuonAdamW:
    return build_optimizer(model, **RATES)


def assert_same_bits(one: GPT, other: GPT) -> None:
    weights = other.state_dict()
    unequal = [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, weights[name])]
    assert unequal == []


@pytest.mark.parametrize("golden", reference.GOLDEN, ids=lambda golden: f"d{golden['config']['n_layer']}")
def test_upstream_trajectory(golden: dict[str, Any]) -> None:
    config = GPTConfig(**golden["config"])
    model = GPT(config)
    model.init_weights()
    reference.fill_by_formula(model)
    optimizer = build_optimizer(model, **golden["lrs"], weight_decay=golden["weight_decay"])
    weights = dict(model.named_parameters())
    for step, expected in enumerate(golden["steps"]):
        loss = model(
            *reference.tokens_by_formula(golden["batch"], config.sequence_len, config.vocab_size, step)
        )
        loss.backward()
        optimizer.step()
        model.zero_grad()
        assert loss.item() == pytest.approx(expected["loss"], abs=2e-5)
        norms = {name: weights[name].norm().item() for name in expected["param_norms_after"]}
        assert norms == pytest.approx(expected["param_norms_after"], rel=1e-4)


def test_every_parameter_is_in_one_group_with_its_rates() -> None:
    model = model_of()
    optimizer = build(model)
    names = {p: name for name, p in model.named_parameters()}
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names) == len(groups)
    width = math.sqrt(768 / 32)
    for name, lr, betas, decay in [
        ("lm_head.weight", 0.004 * width, (0.8, 0.96), 0.01),
        ("transformer.wte.weight", 0.2 * width, (0.8, 0.995), 0.001),
        ("value_embeds.1.weight", 0.1 * width, (0.8, 0.995), 0.01),
        ("resid_lambdas", 0.005, (0.8, 0.95), 0.05),
        ("x0_lambdas", 0.5, (0.96, 0.95), 0.0),
        ("smear_gate.weight", 0.2, (0.8, 0.95), 0.0),
        ("smear_lambda", 0.2, (0.8, 0.95), 0.0),
        ("backout_lambda", 0.2, (0.8, 0.95), 0.0),
    ]:
        group = groups[name]
        assert group["kind"] == "adamw"
        assert group["lr"] == group["initial_lr"] == pytest.approx(lr)
        assert (group["betas"], group["eps"], group["weight_decay"]) == (betas, 1e-10, decay)
    for name, group in groups.items():
        assert (group["kind"] == "muon") == name.startswith("transformer.h.")
    for group in optimizer.param_groups:
        if group["kind"] == "muon":
            assert group["lr"] == group["initial_lr"] == 0.02
            assert (group["momentum"], group["weight_decay"]) == (0.95, 0.1)
            assert len({p.shape for p in group["params"]}) == 1


def test_width_scale_of_d8() -> None:
    assert width_scale(512) == pytest.approx(1.224745, abs=5e-7)


def test_set_schedule_reaches_every_group() -> None:
    optimizer = build(model_of())
    optimizer.set_schedule(lr_multiplier=0.5, momentum=0.9, weight_decay_multiplier=0.25)
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5 * group["initial_lr"]
        if group["kind"] == "muon":
            assert (group["momentum"], group["weight_decay"]) == (0.9, 0.025)
    adamw_decay = [group["weight_decay"] for group in optimizer.param_groups if group["kind"] == "adamw"]
    assert adamw_decay == [0.01, 0.001, 0.01, 0.05, 0.0, 0.0, 0.0]


def test_muon_matches_the_plain_version() -> None:
    """Square, tall, wide and 2 x 12 matrices, over steps with changing momentum and decay."""
    model = model_of(torch.float64)
    optimizer = build(model)
    plain = {}
    for name, p, _ in optimizer.muon_parameters():
        axis = max(p.shape)
        zeros = torch.zeros_like(p.detach())
        plain[name] = (p.detach().clone(), zeros, torch.zeros(axis, dtype=p.dtype))
    assert {tuple(p.shape) for _, p, _ in optimizer.muon_parameters()} >= {
        (32, 32),
        (16, 32),
        (128, 32),
        (2, 12),
    }
    for step, momentum in enumerate((0.85, 0.9, 0.97)):
        give_random_gradients(model, step)
        optimizer.set_schedule(1.0 / (step + 1), momentum, 1.0 - 0.3 * step)
        optimizer.step()
        for name, p, _ in optimizer.muon_parameters():
            rates = {"lr": 0.02 / (step + 1), "momentum": momentum, "decay": 0.1 * (1.0 - 0.3 * step)}
            assert p.grad is not None
            plain[name] = reference.muon_step(*plain[name][:1], p.grad, *plain[name][1:], **rates)
            torch.testing.assert_close(p.detach(), plain[name][0], rtol=1e-9, atol=1e-11)


def test_adamw_matches_its_formula() -> None:
    model = model_of(torch.float64)
    optimizer = build(model)
    names = {p: name for name, p in model.named_parameters()}
    groups = [group for group in optimizer.param_groups if group["kind"] == "adamw"]
    plain = {
        names[p]: (p.detach().clone(), torch.zeros_like(p.detach()), torch.zeros_like(p.detach()))
        for group in groups
        for p in group["params"]
    }
    for step in range(3):
        give_random_gradients(model, step)
        optimizer.set_schedule(1.0 / (step + 1), 0.95, 1.0)
        optimizer.step()
        for group in groups:
            for p in group["params"]:
                value, m, v = plain[names[p]]
                rates = (group["initial_lr"] / (step + 1), group["betas"], group["weight_decay"])
                plain[names[p]] = reference.adamw_step(value, p.grad, m, v, step + 1, *rates)
                torch.testing.assert_close(p.detach(), plain[names[p]][0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40), (1, 5), (5, 1)])
def test_orthogonalize_gives_near_equal_singular_values(shape: tuple[int, int]) -> None:
    G = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    X = orthogonalize(G)
    assert X.norm().item() == pytest.approx(math.sqrt(min(shape)))
    values = torch.linalg.svdvals(X)
    assert values.max() < 1.6
    assert values.min() > 0.4


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (2, 12)])
def test_orthogonalize_in_bfloat16_stays_near(shape: tuple[int, int]) -> None:
    G = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    exact, near = orthogonalize(G), orthogonalize(G, torch.bfloat16)
    assert near.dtype == torch.float32
    assert 0 < (near - exact).norm() < 0.02 * exact.norm()
    assert near.norm().item() == pytest.approx(min(shape) ** 0.5, rel=1e-5)
    assert not orthogonalize(torch.zeros(shape), torch.bfloat16).any()


def test_only_owned_matrices_depend_on_the_compute_dtype() -> None:
    """What AdamW steps is replicated on every rank: it must be bitwise the same in every format."""
    wide, narrow = model_of(), model_of()
    optimizers = build(wide), build(narrow)
    optimizers[1].compute_dtype = torch.bfloat16
    for step in range(3):
        for model, optimizer in zip((wide, narrow), optimizers, strict=True):
            give_random_gradients(model, step)
            optimizer.step()
    owned = {matrix.name for matrix in optimizers[0].muon_parameters()}
    for (name, one), other in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert other.dtype == torch.float32
        if name in owned:
            assert not torch.equal(one, other), name
            torch.testing.assert_close(one, other, rtol=0, atol=0.01)
        else:
            assert torch.equal(one, other), name


def test_bfloat16_learns_as_float32_does() -> None:
    """40 steps on two rows: the loss falls to a tenth of its start, and on the way as fast, to 1 %.

    Not from weights of zero, where the scalars' gradients are rounding alone and AdamW steps by it.
    """
    means = []
    for dtype in (torch.float32, torch.bfloat16):
        model, generator = model_of(), torch.Generator().manual_seed(1)
        for name, p in model.named_parameters():
            if "c_proj" in name:
                torch.nn.init.uniform_(p, -0.1, 0.1, generator=generator)
        optimizer = build(model)
        model.compute_dtype = optimizer.compute_dtype = dtype
        curve = []
        for _ in range(40):
            curve.append(backward(model, step=0))
            optimizer.step()
        assert curve[-1] < curve[0] / 10
        means.append(sum(curve) / len(curve))
    assert means[0] != means[1]
    assert means[1] == pytest.approx(means[0], rel=0.01)


def test_zero_gradients_at_the_first_step() -> None:
    """From real initial weights most block gradients are exactly zero, and nothing may divide by them."""
    model = model_of()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model)
    losses = [backward(model, 0)]
    zero = [name for name, p, _ in optimizer.muon_parameters() if p.grad is not None and not p.grad.any()]
    assert "transformer.h.0.attn.c_q.weight" in zero
    assert len(zero) > len(optimizer.muon_parameters()) / 2
    optimizer.step()
    weights = dict(model.named_parameters())
    for name in zero:
        rows, cols = weights[name].shape
        decay = 1 - 0.02 * math.sqrt(max(1.0, rows / cols)) * 0.1
        torch.testing.assert_close(weights[name].detach(), before[name] * decay)
    optimizer.set_schedule(lr_multiplier=0.05, momentum=0.85, weight_decay_multiplier=1.0)
    for _ in range(8):
        losses.append(backward(model, 0))
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1] < losses[0] - 0.5


def test_halves_stepped_apart_have_the_bits_of_the_whole() -> None:
    whole, apart = model_of(), model_of()
    optimizer, shared = build(whole), build(apart)
    matrices = [matrix.parameter for matrix in shared.muon_parameters()]
    for step in range(3):
        for model in (whole, apart):
            give_random_gradients(model, step)
        optimizer.step()
        shared.step_muon(matrices[1::2])
        shared.step_adamw()
        shared.step_muon(reversed(matrices[::2]))
    assert_same_bits(whole, apart)


def test_an_owner_leaves_the_matrices_of_others_alone() -> None:
    model = model_of()
    optimizer = build(model)
    give_random_gradients(model, 0)
    mine, *others = optimizer.muon_parameters()
    before = {matrix.name: matrix.parameter.detach().clone() for matrix in others}
    optimizer.step_muon([mine.parameter])
    assert all(torch.equal(matrix.parameter, before[matrix.name]) for matrix in others)
    assert list(optimizer.state_dict()) == [mine.name]


def test_muon_update_is_what_a_step_takes_away() -> None:
    model, twin = model_of(), model_of()
    optimizer, other = build(model), build(twin)
    for each in (model, twin):
        give_random_gradients(each, 0)
    optimizer.step_muon()
    for _, p, _ in other.muon_parameters():
        p.data.sub_(other.muon_update(p))
    assert_same_bits(model, twin)


def test_matrices_come_in_the_models_order_with_their_cost() -> None:
    model = model_of()
    matrices = build(model).muon_parameters()
    assert [m.name for m in matrices] == [
        n for n, _ in model.named_parameters() if n.startswith("transformer.h.")
    ]
    assert all(m.flops == polar_express_flops(*m.parameter.shape) for m in matrices)
    for dtype, flops in ((torch.bfloat16, 322e9), (torch.float32, 236e9)):
        square, long = polar_express_flops(512, 512, dtype), polar_express_flops(2048, 512, dtype)
        assert 8 * (4 * square + 2 * long) == pytest.approx(flops, rel=2e-3)


def test_state_from_two_owners_continues_bitwise_in_one_process() -> None:
    """What each owner saved, put together by name, is the state of the run, whoever takes it up."""
    whole = model_of()
    optimizer = build(whole)
    halves = [model_of(), model_of()]
    owners = [build(half) for half in halves]
    for step in range(2):
        give_random_gradients(whole, step)
        optimizer.step()
        for rank, (half, owner) in enumerate(zip(halves, owners, strict=True)):
            give_random_gradients(half, step)
            owner.step_adamw()
            owner.step_muon([matrix.parameter for matrix in owner.muon_parameters()[rank::2]])
    gathered = {**owners[0].state_dict(), **owners[1].state_dict()}

    resumed = GPT(CONFIG)
    resumed.load_state_dict(whole.state_dict())
    second = build(resumed)
    second.load_state_dict(gathered)
    assert gathered["lm_head.weight"]["exp_avg"] is not second.state_dict()["lm_head.weight"]["exp_avg"]
    for step in range(2, 4):
        for model, each in ((whole, optimizer), (resumed, second)):
            give_random_gradients(model, step)
            each.step()
    assert_same_bits(whole, resumed)


def test_loading_replaces_what_was_there() -> None:
    model = model_of()
    optimizer = build(model)
    give_random_gradients(model, 0)
    optimizer.step()
    assert set(optimizer.state_dict()) == {name for name, _ in model.named_parameters()}
    optimizer.load_state_dict({})
    assert optimizer.state_dict() == {}


def test_foreign_state_gets_a_sentence() -> None:
    model = model_of()
    optimizer = build(model)
    give_random_gradients(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"holds transformer\.h\.9, which this model does not have"):
        optimizer.load_state_dict({"transformer.h.9": {}})
    with pytest.raises(ValueError, match=r"state of lm_head\.weight does not fit its shape \(128, 32\)"):
        optimizer.load_state_dict({"lm_head.weight": state["resid_lambdas"]})
    assert optimizer.state_dict().keys() == state.keys()
