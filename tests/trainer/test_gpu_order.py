"""What is done otherwise on a GPU, as far as a CPU can show it: the order of rows, reading the loss."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from trainer.model.gpt import GPT, GPTConfig
from trainer.sync.buckets import add_only_active_rows, add_rows_deterministically
from trainer.train import Trainer

CONFIG = GPTConfig.from_depth(2, 300, 32, aspect_ratio=16, head_dim=16)


def gradients(model: nn.Module, idx: Tensor, times: int) -> dict[str, Tensor]:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(times):
        model(idx[:, :-1], idx[:, 1:], loss_reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_rows_added_in_order_make_the_same_gradient() -> None:
    """Tokens that occur once, many times and never, in two micro-batches."""
    torch.manual_seed(1)
    model = GPT(CONFIG).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.1)
    idx = torch.randint(0, 40, (3, 33))
    expected = {name: gradient.clone() for name, gradient in gradients(model, idx, 2).items()}
    add_only_active_rows(model)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for table in tables:
        add_rows_deterministically(table)
    found = gradients(model, idx, 2)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert not gradient.is_sparse
        assert torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-14), name
    assert all(table.grad is not None and table.grad[:40].any() for table in tables)


def test_rows_are_put_in_order_where_a_device_would_not() -> None:
    """A CPU adds them one after another by itself, and faster."""
    for device, hooks in (("cpu", 0), ("meta", 1)):
        with torch.device(device):
            model = GPT(CONFIG)
        add_only_active_rows(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                assert module.sparse
                assert len(module.weight._backward_hooks or ()) == hooks


def test_the_loss_is_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is, to the bit, the sum of the micro-batches' losses in double precision."""
    model = GPT(CONFIG)
    model.init_weights()
    run = SimpleNamespace(
        setup=SimpleNamespace(micro_batches=[1]),
        group=SimpleNamespace(rank=0),
        run_status=SimpleNamespace(enter=lambda phase: None),
        sync=SimpleNamespace(last_backward=nullcontext),
        model=model,
    )
    idx = torch.randint(300, (5, 33))
    expected = sum(model(row[None, :-1], row[None, 1:], loss_reduction="sum").item() for row in idx)
    reads, item = [], Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda tensor: reads.append(1) or item(tensor))
    batch = SimpleNamespace(idx=idx[:, :-1], targets=idx[:, 1:], n_targets=idx[:, 1:].numel())
    assert Trainer.forward_backward(run, batch) == expected  # type: ignore[arg-type]
    assert len(reads) == 1
