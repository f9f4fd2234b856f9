"""Values derived from settings, vocabulary size and number of ranks: model shape, batch, steps, scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.config import ConfigError, RunConfig
from trainer.data.loader import equal_split
from trainer.formatting import counted, render_table
from trainer.model.gpt import GPT, GPTConfig, scaling_params
from trainer.optim.lr_schedule import (
    REFERENCE_DEPTH,
    BatchScales,
    auto_batch_size,
    batch_scales,
    steps_for_ratio,
)
from trainer.optim.muon_adamw import width_scale
from trainer.stages import SFT


@dataclass(frozen=True)
class Plan:
    """The values that follow from a run's settings, the vocabulary and the number of ranks.

    model: the shape of the model. scaling_params: number of parameters of transformer matrices and lm_head.
    total_batch_size: number of tokens of a step. num_iterations: number of steps of the run.
    scales: factors of the learning rates and weight decay.
    shares: rows of a step, by rank.
    """

    model: GPTConfig
    scaling_params: int
    total_batch_size: int
    num_iterations: int
    scales: BatchScales
    shares: list[int]

    @property
    def rows_per_step(self) -> int:
        """Rows of a step, over all ranks."""
        return sum(self.shares)


def make_plan(
    config: RunConfig, vocab_size: int, world_size: int, shares: Sequence[int] = (), train_rows: int = 0
) -> Plan:
    """Derive the plan of a run.

    config: settings of the run. vocab_size: number of tokens of the tokenizer. world_size: number of ranks.
    shares: rows per rank; empty for an equal split. train_rows: rows of the training data, used only by a run
    of stage sft whose length is an epoch. Raises ConfigError if a step has fewer rows than ranks, or if
    `shares` do not add up to the rows of a step.
    """
    model = GPTConfig.from_depth(
        config.depth,
        vocab_size,
        config.sequence_len,
        config.aspect_ratio,
        config.head_dim,
        config.n_kv_head,
        config.window_pattern,
    )
    size = scaling_params(model)
    reference = GPTConfig.from_depth(
        REFERENCE_DEPTH, vocab_size, config.sequence_len, config.aspect_ratio, config.head_dim
    )
    reference_size = scaling_params(reference)
    batch = config.total_batch_size or auto_batch_size(size, reference_size)
    rows = max(1, round(batch / config.sequence_len))
    if rows < world_size:
        raise ConfigError(
            f"total_batch_size {batch} is {rows} row(s) of {config.sequence_len} tokens, too few for "
            f"{world_size} ranks: use {world_size * config.sequence_len} or more, or fewer ranks."
        )
    if shares and (len(shares) != world_size or sum(shares) != rows):
        raise ConfigError(
            f"shares is {','.join(map(str, shares))}: it must be {world_size} number(s), one a rank, that "
            f"add up to the {rows} rows of a step."
        )
    batch = rows * config.sequence_len
    return Plan(
        model=model,
        scaling_params=size,
        total_batch_size=batch,
        num_iterations=_horizon(config, model, size, batch, math.ceil(train_rows / rows)),
        scales=batch_scales(batch, size, reference_size),
        shares=list(shares) or equal_split(rows, world_size),
    )


def _horizon(config: RunConfig, model: GPTConfig, size: int, batch: int, epoch: int) -> int:
    """The number of steps of a run: num_iterations, else from target_flops, else the default of the stage.

    This default is `epoch` in stage sft, else it follows from target_param_data_ratio. size: number of
    scaling parameters. batch: tokens of a step. epoch: steps of one epoch.
    """
    if config.num_iterations:
        return config.num_iterations
    if config.target_flops:
        with torch.device("meta"):
            flops = GPT(model).flops_per_token()
        return max(1, round(config.target_flops / (flops * batch)))
    if config.stage == SFT:
        return max(1, epoch)
    return steps_for_ratio(config.target_param_data_ratio, size, batch)


def describe_plan(
    plan: Plan, config: RunConfig, model: GPT, train_rows: int, micro_batches: Sequence[int]
) -> str:
    """A summary of the run as text: shape of the model, parameters, steps, tokens, FLOPs and scales.

    Rank 0 logs it before the first step of an attempt. plan, config, model: plan, settings and model of the
    run. train_rows: rows of the training data. micro_batches: rows of a micro-batch, by rank.
    """
    tokens = plan.total_batch_size * plan.num_iterations
    flops = model.flops_per_token()
    counts = model.param_counts()
    ratio = tokens / plan.scaling_params
    epochs = tokens / (train_rows * config.sequence_len)
    accumulation = [math.ceil(share / size) for share, size in zip(plan.shares, micro_batches, strict=True)]
    shape = plan.model
    text = [
        f"depth {shape.n_layer}: width {shape.n_embd}, {counted(shape.n_head, 'head')} of {shape.head_dim} "
        f"({shape.n_kv_head} key/value), context {shape.sequence_len}, vocabulary {shape.vocab_size:,}",
        render_table([["parameters", ""], *([name, f"{count:>13,}"] for name, count in counts.items())]),
        f"{counted(plan.num_iterations, 'step')} of {plan.total_batch_size:,} tokens = {tokens:,} tokens; "
        f"{_by_rank(plan.shares, 'row')} a rank in {_by_rank(accumulation, 'micro-batch')}",
        f"{flops:,} FLOPs per token, {flops * tokens:.4g} in all",
        f"{ratio:.3g} tokens per scaling parameter (transformer matrices and lm_head)",
        f"scales: learning rates {plan.scales.lr:.4f}, Muon's weight decay "
        f"{config.weight_decay * plan.scales.weight_decay:.6f}, "
        f"AdamW's width {width_scale(shape.n_embd):.6f}",
    ]
    if config.sync == "local" and len(plan.shares) > 1:
        own = _by_rank([rows * shape.sequence_len for rows in plan.shares], "token")
        text.append(
            f"local: each rank trains by itself on {own} a step; "
            f"a sync round after every {counted(config.local_steps, 'step')}"
        )
    if config.stage == SFT:
        text.append(f"sft: fine-tunes {config.parent}; {epochs:.2f} epochs of {counted(train_rows, 'row')}")
        return "\n".join(text)
    if ratio < config.target_param_data_ratio / 2:
        wanted = steps_for_ratio(config.target_param_data_ratio, plan.scaling_params, plan.total_batch_size)
        text.append(
            f"warning: the model will be undertrained; {config.target_param_data_ratio:g} tokens per "
            f"scaling parameter would take {wanted:,} steps"
        )
    if epochs > 1:
        text.append(
            f"the data have {train_rows * config.sequence_len:,} tokens, so the run reads them {epochs:.1f} "
            "times; more text would give a better model"
        )
    return "\n".join(text)


def _by_rank(numbers: Sequence[int], noun: str) -> str:
    """The number of each rank as text: "2 rows" if all are equal, else "3/2/2 rows"."""
    text = counted(max(numbers), noun)
    return text if len(set(numbers)) == 1 else "/".join(map(str, numbers)) + text.lstrip("0123456789,")
