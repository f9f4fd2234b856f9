"""What torch keeps of a backward pass that failed, and that it is freed."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from trainer.elastic import failed_backward


class Hooked:
    """A model, of which a hook raises an error; the hook refers to the model, as in trainer/sync."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])
        self.layers[0].weight.register_hook(partial(self.on_gradient, 0))
        self.layers[2].weight.register_hook(partial(self.on_gradient, 2))

    def on_gradient(self, layer: int, gradient: Tensor) -> Tensor:
        if layer:
            raise RuntimeError("Connection closed by peer")
        return gradient

    def loss(self) -> Tensor:
        """Of two branches, so that several nodes are ready at once."""
        first, second, third, fourth, last = self.layers
        hidden = first(torch.ones(2, 4))
        return torch.as_tensor(last(second(hidden).relu() + third(hidden) * fourth(hidden)).sum())


def fail() -> list[weakref.ref[nn.Parameter]]:
    """The parameters of a model whose backward pass has failed."""
    model = Hooked()
    with pytest.raises(RuntimeError, match="Connection closed"):
        model.loss().backward()
    return [weakref.ref(parameter) for parameter in model.layers.parameters()]


def alive(parameters: list[weakref.ref[nn.Parameter]]) -> int:
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


def test_the_model_of_a_failed_backward_pass_is_freed() -> None:
    parameters = fail()
    assert alive(parameters) > 0, "torch frees it by itself now: failed_backward is no longer needed"
    failed_backward.free()
    assert alive(parameters) == 0
