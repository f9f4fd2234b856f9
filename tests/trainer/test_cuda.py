"""What a GPU computes: `make test-gpu`, on a machine with at least one. No other test needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from conftest import Start, losses, train_here
from golden_chat import GOLDEN, byte_tokenizer
from test_fine_tuning import base as base
from test_fine_tuning import chats as chats
from test_fine_tuning import fine_tune
from test_model import ODD_CONFIGS, model_of, tokens_for
from torch import Tensor

from trainer.chat.engine import Engine, Sampling, Tools, run
from trainer.model.gpt import GPT, GPTConfig
from trainer.model.loss import summed_loss
from trainer.optim.muon_adamw import build_optimizer

pytestmark = pytest.mark.gpu
EACH_GOLDEN = pytest.mark.parametrize(
    "golden", reference.GOLDEN, ids=lambda each: f"d{each['config']['n_layer']}"
)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def float32_products() -> None:
    """As a run sets it: products of float32 are computed in float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@EACH_GOLDEN
def test_upstream_trajectory(golden: dict[str, Any]) -> None:
    config = GPTConfig(**golden["config"])
    model = GPT(config)
    model.init_weights()
    reference.fill_by_formula(model)
    model.to("cuda")
    optimizer = build_optimizer(model, **golden["lrs"], weight_decay=golden["weight_decay"])
    weights = dict(model.named_parameters())
    for step, expected in enumerate(golden["steps"]):
        tokens = reference.tokens_by_formula(golden["batch"], config.sequence_len, config.vocab_size, step)
        loss = model(*(each.cuda() for each in tokens))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        assert loss.item() == pytest.approx(expected["loss"], abs=2e-5)
        norms = {name: weights[name].norm().item() for name in expected["param_norms_after"]}
        assert norms == pytest.approx(expected["param_norms_after"], rel=1e-4)


@pytest.mark.parametrize("config", ODD_CONFIGS, ids=str)
def test_logits_and_gradients_are_those_of_the_cpu(config: GPTConfig) -> None:
    """In float64, with grouped heads, short windows and targets that do not count."""
    idx, targets = tokens_for(config, batch=2), tokens_for(config, batch=2).roll(-1, dims=1)
    targets[:, ::5] = -1
    found: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        model = model_of(config).to(device)
        logits = model(idx.to(device))
        model(idx.to(device), targets.to(device)).backward()
        gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        found.append([each.detach().cpu() for each in (logits, *gradients)])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-9, atol=1e-12)


def test_the_loss_in_blocks_is_that_of_the_cpu() -> None:
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5000, 32, generator=draw), torch.randn(320, 32, generator=draw)
    targets = torch.randint(300, (5000,), generator=draw)
    targets[::7] = -1
    found = []
    for device in ("cpu", "cuda"):
        leaves = [each.double().to(device).requires_grad_() for each in (x, weight)]
        loss = summed_loss(*leaves, targets.to(device), 300)
        loss.backward()
        found.append([each.detach().cpu() for each in (loss, *(leaf.grad for leaf in leaves))])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-9, atol=1e-12)


def test_a_run_takes_the_gpu_by_itself(start: Start) -> None:
    (rank,) = start(1, dtype="auto", threads=0)
    code, output = rank.wait()
    assert code == 0, output
    assert "1 rank on cuda" in output
    assert "bfloat16" in output
    assert rank.outcome()["outcome"] == "finished"
    found = losses(rank.run_dir)
    assert found[-1] < found[0]


def test_a_run_in_float32_has_the_losses_of_the_cpu(data_dir: Path, tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        train_here(data_dir, tmp_path / device, device=device, num_iterations=20)
    gpu, cpu = losses(tmp_path / "cuda"), losses(tmp_path / "cpu")
    assert gpu[:5] == pytest.approx(cpu[:5], rel=1e-5)
    assert gpu == pytest.approx(cpu, rel=1e-3)


def test_a_gpu_gives_the_same_bits_again(data_dir: Path, tmp_path: Path) -> None:
    settings = {"device": "cuda", "num_iterations": 12, "save_every": 6}
    for name in ("one", "other"):
        train_here(data_dir, tmp_path / name, **settings)
    assert losses(tmp_path / "one") == losses(tmp_path / "other")


@pytest.mark.parametrize("then", ["cuda", "cpu"])
def test_a_run_resumes_on_the_gpu_and_on_the_cpu(start: Start, then: str) -> None:
    (whole,) = start(1, name="whole", device="cuda", num_iterations=12)
    (first,) = start(1, name="parts", device="cuda", num_iterations=12, save_every=6, faults=["fail 8 0"])
    assert whole.wait()[0] == 0
    assert first.wait()[0] != 0
    (second,) = start(1, name="parts", device=then, num_iterations=12)
    code, output = second.wait()
    assert code == 0, output
    assert "Resuming from the checkpoint of step 6" in output
    assert losses(second.run_dir)[-6:] == pytest.approx(losses(whole.run_dir)[-6:], rel=1e-6)


def test_two_ranks_and_one_gpu_are_refused(start: Start) -> None:
    pair = start(2, device="cuda", env=[{}, NO_GPU])
    for rank in pair:
        code, output = rank.wait()
        assert code == 2, output
        reason = rank.outcome()["reason"]
        assert "device is cuda, but" in reason
        assert "host-2" in reason


def test_a_pair_transfers_the_run_to_the_host_with_the_gpu(start: Start) -> None:
    """As tests/gpu_stand_in does it elsewhere; here the seconds are measured."""
    pair = start(2, depth=8, aspect_ratio=96, head_dim=64, sync="auto", num_iterations=2, env=[NO_GPU, {}])
    for rank in pair:
        code, output = rank.wait(400)
        assert code == 1, output
        outcome = rank.outcome()
        assert "train.yml transfers the run to host-2" in outcome["reason"]
        assert 0 < outcome["transfer"]["seconds"] < outcome["transfer"]["together"]


def test_more_memory_than_the_gpu_has_is_named(start: Start) -> None:
    (rank,) = start(1, device="cuda", env=[{"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.0001"}])
    code, output = rank.wait()
    assert code == 1, output
    assert "memory" in rank.outcome()["reason"], output


def test_generation_is_that_of_the_cpu() -> None:
    golden = GOLDEN["greedy"]
    model = GPT(GPTConfig(**GOLDEN["config"]))
    model.init_weights()
    reference.fill_by_formula(model)
    engine = Engine(model.to("cuda").eval(), Tools.of(byte_tokenizer()))
    sequence = engine.start(golden["prompt"], Sampling(temperature=0, max_tokens=golden["max_tokens"]))
    list(run(engine, sequence))
    assert sequence.ids == golden["result"]


def test_fine_tuning_has_the_losses_of_the_cpu(base: Path, chats: Path, tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        fine_tune(base, chats, tmp_path / device, device=device, dtype="float32", num_iterations=6)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)
