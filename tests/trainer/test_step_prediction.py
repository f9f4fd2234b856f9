"""The prediction of a step from a smaller model: what is scaled, what is sent, and what is advised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.bench import step_prediction
from trainer.bench.step_prediction import Operations, predict, sample_speed, sampled_shape
from trainer.config import RunConfig
from trainer.data import VOCAB_SIZE
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW
from trainer.placement.cost_model import payload
from trainer.placement.decide import step_work
from trainer.placement.microbenchmark import Link, Speed
from trainer.run_plan import make_plan

CONFIG = RunConfig()
PLAN = make_plan(CONFIG, VOCAB_SIZE, 2)
HOSTS = ["tower", "laptop"]
MEGABIT = 125_000.0  # bytes per second


def test_the_sampled_model_has_the_width_and_fits_the_rate_of_the_host() -> None:
    fast, slow, slowest = (sampled_shape(PLAN.model, rate) for rate in (1e15, 75e9, 1.0))
    assert fast == replace(PLAN.model, n_layer=2)
    assert slowest == replace(PLAN.model, n_layer=2, sequence_len=step_prediction.LEAST_TOKENS)
    assert slowest.sequence_len < slow.sequence_len < fast.sequence_len


def test_times_are_scaled_by_counted_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host whose times are exactly in proportion to the operations, the sample gives the true times."""
    plan = make_plan(RunConfig(depth=4, sequence_len=256), 512, 1)

    def of_host(model: GPT, optimizer: MuonAdamW, batch_size: int) -> Speed:
        assert (batch_size, model.compute_dtype) == (1, torch.bfloat16)
        assert model.config.n_layer == 2
        done = Operations.of(model, optimizer)
        return Speed(done.row * 1e-9, done.muon * 2e-9, done.adamw * 3e-9)

    monkeypatch.setattr(step_prediction, "measure_speed", of_host)
    found = sample_speed(plan.model, torch.bfloat16, 1e15)
    whole = Operations.of(*step_prediction._build(plan.model, "meta"))
    assert found.row == pytest.approx(whole.row * 1e-9)
    assert found.muon == pytest.approx(whole.muon * 2e-9)
    assert found.adamw == pytest.approx(whole.adamw * 3e-9)


def test_a_small_model_is_really_measured() -> None:
    plan = make_plan(RunConfig(depth=2, sequence_len=64, total_batch_size=64), 512, 1)
    found = sample_speed(plan.model, torch.float32, 1e15)
    assert min(found.row, found.muon, found.adamw) > 0


def predicted(mbit: float, config: RunConfig = CONFIG, row: float = 3.0) -> dict:
    plan = make_plan(config, VOCAB_SIZE, 2)
    speeds = [Speed(row=row, muon=1.5, adamw=0.1)] * 2
    return predict(config, plan, speeds, Link(mbit * MEGABIT, 1e-3), HOSTS)


def test_over_a_slow_link_the_network_is_most_of_a_dense_step_and_little_of_a_local_one() -> None:
    """503 MB at 100 Mbit/s; the bytes are those of test_payload.py."""
    found = predicted(100)
    seconds = {mode: figures["network_s"] for mode, figures in found["modes"].items()}
    assert seconds["dense"] == pytest.approx(40.3, abs=0.1)
    # Matrices, lm_head, and at most 2,048 active rows of 2,560 values for the 2 rows of data of each rank.
    model, optimizer = step_prediction._build(PLAN.model, "meta")
    work = step_work(model, optimizer, CONFIG.device_batch_size, lambda rows: 1024 * rows)
    for mode in ("exact", "fast"):
        assert seconds[mode] == pytest.approx(payload(mode, work, 4, 2) / (100 * MEGABIT), abs=0.01)
    assert seconds["local"] < seconds["fast"] / 20
    dense = found["modes"]["dense"]
    assert dense["step_s"] == pytest.approx(2 * 3.0 + dense["network_s"] + 1.5 / 2 + 0.1, rel=0.02)
    assert found["baseline"] == {"host": "tower", "step_s": pytest.approx(4 * 3.0 + 1.5 + 0.1)}
    assert (found["sync"], found["depth"], found["total_batch_size"]) == ("dense", 8, 4096)
    assert predicted(100, replace(CONFIG, sync="auto"))["sync"] == "exact"
    assert predicted(100, replace(CONFIG, sync="auto", sync_allow="fast"))["sync"] == "fast"


def test_settings_are_advised_only_where_they_make_a_step_faster() -> None:
    slow = predicted(100)["advice"]
    assert (slow[0], slow[-1]) == ("sync=exact", "sync=local")
    (batch,) = (each for each in slow if each.startswith("total_batch_size="))
    rows = int(batch.partition("=")[2]) // PLAN.model.sequence_len
    larger = predicted(100, replace(CONFIG, sync="exact", total_batch_size=rows * PLAN.model.sequence_len))
    assert larger["modes"]["exact"]["step_s"] < larger["baseline"]["step_s"]
    fast = predicted(100_000)
    assert fast["advice"] == [], "no mode is faster by more than the noise"
    automatic = predicted(100, replace(CONFIG, sync="auto"))
    assert (automatic["sync"], "sync=exact" in automatic["advice"]) == ("exact", False)
