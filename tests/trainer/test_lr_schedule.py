"""Schedules at their corners, and the published scales."""

from __future__ import annotations

import pytest

from trainer.model.gpt import GPTConfig, scaling_params
from trainer.optim.lr_schedule import (
    REFERENCE_DEPTH,
    auto_batch_size,
    batch_scales,
    lr_multiplier,
    muon_momentum,
    muon_weight_decay,
    steps_for_ratio,
)

S_8, S_12 = (scaling_params(GPTConfig.from_depth(depth, 32_768)) for depth in (8, REFERENCE_DEPTH))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1 / 40),
        (38, 39 / 40),
        (39, 1.0),
        (40, 1.0),
        (350, 1.0),
        (351, 1 - 0.95 / 650),
        (675, 0.525),
        (999, 0.05 + 0.95 / 650),
        (1000, 0.05),
        (1001, 0.05),
    ],
)
def test_lr_multiplier_at_its_corners(step: int, expected: float) -> None:
    assert lr_multiplier(step, 1000) == pytest.approx(expected, abs=1e-12)


def test_lr_multiplier_without_ramps() -> None:
    assert [lr_multiplier(step, 10, warmup_steps=0, warmdown_ratio=0.0) for step in (0, 5, 10)] == [1.0] * 3
    assert lr_multiplier(0, 4, warmup_steps=0, warmdown_ratio=1.0, final_lr_frac=0.0) == 1.0
    assert lr_multiplier(3, 4, warmup_steps=0, warmdown_ratio=1.0, final_lr_frac=0.0) == pytest.approx(0.25)


def test_the_warmup_goes_first_in_a_short_run() -> None:
    assert lr_multiplier(19, 20) == pytest.approx(0.5)
    assert lr_multiplier(39, 60) == 1.0
    assert lr_multiplier(40, 60) == pytest.approx(1 - 0.95 * 19 / 39)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.85), (200, 0.91), (399, 0.9697), (400, 0.97), (1750, 0.97), (3375, 0.935), (5000, 0.90)],
)
def test_muon_momentum_at_its_corners(step: int, expected: float) -> None:
    assert muon_momentum(step, 5000) == pytest.approx(expected, abs=1e-12)


def test_muon_momentum_without_a_warmdown_and_in_a_short_run() -> None:
    assert muon_momentum(500, 500, warmdown_ratio=0.0) == pytest.approx(0.97)
    assert muon_momentum(100, 100) == pytest.approx(0.88)


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (25, 0.8535533906), (50, 0.5), (100, 0.0)])
def test_muon_weight_decay_is_half_a_cosine(step: int, expected: float) -> None:
    assert muon_weight_decay(step, 100) == pytest.approx(expected, abs=1e-9)


def test_scales_of_d8_at_4096_tokens() -> None:
    scales = batch_scales(4096, S_8, S_12)
    assert scales.lr == pytest.approx(0.0884, abs=5e-5)
    assert 0.28 * scales.weight_decay == pytest.approx(0.064965, abs=5e-7)


def test_the_reference_is_its_own_scale() -> None:
    assert batch_scales(2**19, S_12, S_12) == (1.0, 1.0)
    assert auto_batch_size(S_12, S_12) == 2**19


def test_auto_batch_and_horizon_of_d8() -> None:
    assert auto_batch_size(S_8, S_12) == 262_144
    assert steps_for_ratio(12.0, S_8, 262_144) == 12 * 41_943_232 // 262_144
    assert steps_for_ratio(0.001, S_8, 262_144) == 1
