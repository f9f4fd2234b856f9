"""Schedules of learning rates and of Muon's momentum and weight decay; scaling with batch and model size.

"Scaling parameters" are the transformer matrices plus lm_head (`trainer.model.gpt.scaling_params`). The base
rates were tuned on a model of depth 12. The "reference model" is a model of this depth with the vocabulary,
aspect_ratio and head_dim of the run's own model.
"""

from __future__ import annotations

from math import cos, log2, pi, sqrt
from typing import NamedTuple

REFERENCE_DEPTH = 12
REFERENCE_BATCH_SIZE = 2**19  # tokens a step that suit the reference model
BATCH_EXPONENT = 0.383  # the best batch grows as tokens ** 0.383: Power Lines, arXiv 2505.13738

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP_STEPS = 400
SFT_MOMENTUM_PEAK = 0.95
SFT_MOMENTUM_WARMUP_STEPS = 300


class BatchScales(NamedTuple):
    """Factors of the base learning rates and of Muon's weight decay.

    lr: factor of all learning rates, except those of the parameters smear_gate, smear_lambda and
    backout_lambda. weight_decay: factor of Muon's weight decay.
    """

    lr: float
    weight_decay: float


def batch_scales(total_batch_size: int, scaling_params: int, reference_params: int) -> BatchScales:
    """The factors for a batch of `total_batch_size` tokens.

    scaling_params, reference_params: number of scaling parameters of this model and of the reference model.
    Learning rates grow with the square root of the batch size. Muon's weight decay has the same factor, and
    is divided by the number of tokens of the whole run (arXiv 2405.13698), relative to that of the reference
    model. This number is taken as proportional to the scaling parameters.
    """
    lr = sqrt(total_batch_size / REFERENCE_BATCH_SIZE)
    return BatchScales(lr=lr, weight_decay=lr * reference_params / scaling_params)


def auto_batch_size(scaling_params: int, reference_params: int) -> int:
    """The tokens of a step if total_batch_size is auto: the power of two nearest to the model's best batch.

    scaling_params, reference_params: number of scaling parameters of this model and of the reference model.
    The best batch grows with the number of tokens of the whole run (arXiv 2505.13738). Runs of both models
    are taken to have equally many tokens per scaling parameter, so only the ratio of the two numbers matters.
    """
    best = REFERENCE_BATCH_SIZE * (scaling_params / reference_params) ** BATCH_EXPONENT
    return int(2 ** round(log2(best)))


def steps_for_ratio(target_param_data_ratio: float, scaling_params: int, total_batch_size: int) -> int:
    """The number of steps, 1 or more, of a run whose length is set by target_param_data_ratio.

    target_param_data_ratio: the number of tokens of the run for each scaling parameter. scaling_params: the
    number of scaling parameters. total_batch_size: the number of tokens of a step.
    """
    return max(1, int(target_param_data_ratio * scaling_params) // total_batch_size)


def lr_multiplier(
    step: int,
    num_iterations: int,
    warmup_steps: int = 40,
    warmdown_ratio: float = 0.65,
    final_lr_frac: float = 0.05,
) -> float:
    """The factor of every learning rate at `step`, counted from 0: rises to 1, stays at 1, falls at the end.

    num_iterations: the number of steps of the run.
    warmup_steps: the number of steps at the start in which the factor rises linearly to 1.
    warmdown_ratio: the share of the steps, at the end of the run, in which the factor falls linearly.
    final_lr_frac: the factor at the end of the fall, at step `num_iterations`, one after the last step.
    In a run so short that rise and fall overlap, the rise takes precedence.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 1.0 - (1.0 - final_lr_frac) * _warmdown(step, num_iterations, warmdown_ratio)


def describe_extension(
    step: int,
    before: int,
    now: int,
    warmup_steps: int = 40,
    warmdown_ratio: float = 0.65,
    final_lr_frac: float = 0.05,
) -> str:
    """A message on how the learning rates change if a run is extended from `before` to `now` steps.

    step: the number of completed steps. warmup_steps, warmdown_ratio, final_lr_frac: see `lr_multiplier`.
    """

    def rate(step: int, num_iterations: int) -> float:
        return lr_multiplier(step, num_iterations, warmup_steps, warmdown_ratio, final_lr_frac)

    full_before, full_now = (n - round(warmdown_ratio * n) + 1 for n in (before, now))
    sentence = f"The run is extended from {before:,} to {now:,} steps."
    if not round(warmdown_ratio * now):
        return sentence + " Its learning rates do not fall at the end."
    sentence += f" The learning rates fall after step {full_now:,} instead of step {full_before:,}."
    if step:
        sentence += (
            f" Step {step + 1:,} has {rate(step, now):.2f} times the full learning rates; step {step:,} had "
            f"{rate(step - 1, before):.2f} times."
        )
    if step > max(full_before, warmup_steps):
        sentence += (
            f" The {step - full_before:,} steps that were already trained at lower rates are not repeated."
        )
    return sentence


def muon_momentum(step: int, num_iterations: int, warmdown_ratio: float = 0.65) -> float:
    """Muon's momentum at `step`, counted from 0, of a run of `num_iterations` steps.

    The momentum rises from 0.85 to 0.97 in 400 steps and stays there. In the steps at the end in which the
    learning rates fall (the share `warmdown_ratio` of all steps), it falls to 0.90.
    """
    if step < MOMENTUM_WARMUP_STEPS:
        return MOMENTUM_START + (MOMENTUM_PEAK - MOMENTUM_START) * step / MOMENTUM_WARMUP_STEPS
    return MOMENTUM_PEAK - (MOMENTUM_PEAK - MOMENTUM_END) * _warmdown(step, num_iterations, warmdown_ratio)


def sft_muon_momentum(step: int) -> float:
    """Muon's momentum at `step`, counted from 0, of a run of stage sft.

    It rises from 0.85 to 0.95 in 300 steps and stays there.
    """
    done = min(1.0, step / SFT_MOMENTUM_WARMUP_STEPS)
    return MOMENTUM_START + (SFT_MOMENTUM_PEAK - MOMENTUM_START) * done


def muon_weight_decay(step: int, num_iterations: int) -> float:
    """The factor of Muon's weight decay at `step` of `num_iterations`: half a cosine, from 1 to 0."""
    return 0.5 * (1.0 + cos(pi * step / num_iterations))


def _warmdown(step: int, num_iterations: int, warmdown_ratio: float) -> float:
    """The completed fraction of the warm-down, the final fall of the learning rates, at `step`: 0 to 1."""
    warmdown_steps = round(warmdown_ratio * num_iterations)
    start = num_iterations - warmdown_steps
    if step <= start:
        return 0.0
    return min(1.0, (step - start) / warmdown_steps)
