"""Predict the seconds of a step of a run from a short measurement, before the run and without its data.

    plan = make_plan(config, VOCAB_SIZE, len(hosts))
    speed = sample_speed(plan.model, torch.float32, flops_rate=75e9)       # on every host at the same time
    print(predict(config, plan, [speed, ...], link, hosts))

A model of the run's width and vocabulary with fewer layers and shorter rows is timed, and its times are
scaled by counted operations. The loss and lm_head are a larger part of the smaller model, so that the result
is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trainer.config import NEAR_MODES, SYNC_MODES, RunConfig
from trainer.model.gpt import GPT, GPTConfig
from trainer.optim.muon_adamw import MuonAdamW, build_optimizer
from trainer.placement.cost_model import BETTER, CostModel, choose_mode
from trainer.placement.decide import step_work
from trainer.placement.microbenchmark import Link, Speed, measure_speed
from trainer.run_plan import Plan
from trainer.sync.fragment import Outer

SAMPLED_LAYERS = 2  # one with a value embedding, one without
SAMPLED_SECONDS = 0.8  # the most that a sampled row may take at the GEMM rate of this host
LEAST_TOKENS = 64  # of a sampled row


@dataclass(frozen=True)
class Operations:
    """The operations of a step, one field for each field of Speed. Measured seconds are scaled with them.

    row: FLOPs of forward and backward of one row. muon: FLOPs of Muon's updates. adamw: number of parameters
    that AdamW updates.
    """

    row: int
    muon: int
    adamw: int

    @classmethod
    def of(cls, model: GPT, optimizer: MuonAdamW) -> Operations:
        """The operations of a step of `model` with `optimizer`."""
        matrices = optimizer.muon_parameters()
        by_muon = sum(matrix.parameter.numel() for matrix in matrices)
        return cls(
            row=model.flops_per_token() * model.config.sequence_len,
            muon=sum(matrix.flops for matrix in matrices),
            adamw=sum(parameter.numel() for parameter in model.parameters()) - by_muon,
        )


def _build(shape: GPTConfig, device: str) -> tuple[GPT, MuonAdamW]:
    """A model of `shape` on `device`, and its optimizer with all rates 0. Device "meta" takes no memory."""
    with torch.device(device):
        model = GPT(shape)
        return model, build_optimizer(model, 0.0, 0.0, 0.0, 0.0, 0.0)


def sampled_shape(shape: GPTConfig, flops_rate: float) -> GPTConfig:
    """The shape of a smaller model to time, with the width and vocabulary of `shape`.

    The context is halved until a row takes at most SAMPLED_SECONDS or has LEAST_TOKENS tokens. flops_rate:
    the GEMM rate of this host in FLOP/s.
    """
    sampled = replace(shape, n_layer=min(SAMPLED_LAYERS, shape.n_layer))
    while sampled.sequence_len > LEAST_TOKENS:
        if Operations.of(*_build(sampled, "meta")).row <= SAMPLED_SECONDS * flops_rate:
            break
        sampled = replace(sampled, sequence_len=max(LEAST_TOKENS, sampled.sequence_len // 2))
    return sampled


def sample_speed(shape: GPTConfig, compute_dtype: torch.dtype, flops_rate: float) -> Speed:
    """The predicted Speed of this host for a model of `shape`, from timing a smaller model.

    compute_dtype: number format of the GEMMs. flops_rate: the GEMM rate of this host in FLOP/s.
    """
    model, optimizer = _build(sampled_shape(shape, flops_rate), "cpu")
    model.compute_dtype = optimizer.compute_dtype = compute_dtype
    timed = measure_speed(model, optimizer, batch_size=1)
    done, whole = Operations.of(model, optimizer), Operations.of(*_build(shape, "meta"))
    return Speed(
        row=timed.row * whole.row / done.row,
        muon=timed.muon * whole.muon / done.muon,
        adamw=timed.adamw * whole.adamw / done.adamw,
    )


def predict(
    config: RunConfig, plan: Plan, speeds: Sequence[Speed], link: Link, hosts: Sequence[str]
) -> dict[str, Any]:
    """The predicted step of a run, as JSON values.

    config, plan: settings and plan of the run. speeds: the Speed of each rank. link: the link between the
    ranks. hosts: the host name of each rank. The result has the keys
    depth, total_batch_size: settings of the run; total_batch_size is in tokens.
    sync: the sync mode that the run would use.
    modes: {sync mode: {"step_s": seconds of a step, "network_s": seconds of the transfers in it, including
        those that computation hides}}.
    baseline: the single-host baseline, {"host": name of the host, "step_s": seconds of a step}.
    speeds: for each rank the fields of its Speed, as a dict.
    advice: settings that make the run faster, such as "sync=exact", the least change first. A
        total_batch_size there is the smallest multiple of the run's value with which a step is faster than
        the single-host baseline.
    Transfers are predicted as if all tokens of a step were different: the most that a step can send.
    """
    model, optimizer = _build(plan.model, "meta")
    length, tokens = plan.model.sequence_len, plan.model.vocab_size
    work = step_work(model, optimizer, config.device_batch_size, lambda rows: min(rows * length, tokens))
    equal, automatic = [1] * len(speeds), config.sync == "auto"
    cost_model = CostModel(speeds, link, work, hosts, equal, automatic, Outer.of(config))
    rows = plan.rows_per_step
    best = choose_mode(cost_model, rows, config.auto_modes)
    mode = best if config.sync == "auto" else config.sync
    seconds, rank = cost_model.single_host(rows)
    return {
        "depth": config.depth,
        "total_batch_size": plan.total_batch_size,
        "sync": mode,
        "modes": {
            each: {
                "network_s": round(cost_model.network(each, rows), 3),
                "step_s": round(cost_model.step(each, rows), 3),
            }
            for each in SYNC_MODES
        },
        "baseline": {"host": hosts[rank], "step_s": round(seconds, 3)},
        "speeds": [asdict(speed) for speed in speeds],
        "advice": _advice(cost_model, rows, length, mode, best),
    }


def _advice(cost_model: CostModel, rows: int, length: int, mode: str, best: str) -> list[str]:
    """Settings that make the run faster, such as "sync=exact" (see advice in `predict`).

    rows: rows of a step. length: tokens of a row. mode: the sync mode of the run. best: the sync mode that
    sync=auto chooses.
    """
    advice, fastest = [], mode
    if cost_model.step(best, rows) < (1 - BETTER) * cost_model.step(mode, rows):
        advice, fastest = [f"sync={best}"], best
    if cost_model.step(fastest, rows) > cost_model.single_host(rows)[0]:
        pays_from = cost_model.pays_from(fastest, rows)
        advice += [f"total_batch_size={pays_from * length}"] if pays_from else []
    for other in (*NEAR_MODES, "local"):
        if cost_model.step(other, rows) < (1 - BETTER) * cost_model.step(fastest, rows):
            advice.append(f"sync={other}")
            fastest = other
    return advice
