"""An evaluation of CORE between two steps of a run. The watchdog times it; a stop of the run ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.data.tokenizer import Tokenizer
from trainer.distributed.process_group import Collectives
from trainer.eval.core import BlockProgress, CoreResult, StoppedEvaluationError, evaluate_core
from trainer.eval.core_bundle import Bundle
from trainer.health.run_status import RunStatus
from trainer.health.watchdog import Watchdog
from trainer.model.gpt import GPT


def evaluate(
    model: GPT,
    tokenizer: Tokenizer,
    bundle: Bundle,
    group: Collectives,
    shares: Sequence[int],
    run_status: RunStatus,
    watchdog: Watchdog,
    should_stop: Callable[[], bool],
) -> CoreResult | None:
    """Evaluate CORE on all ranks, between two steps. A collective call.

    shares: rows per rank in a training step; the ranks divide the items in the same proportions. run_status,
    watchdog: those of this rank. should_stop: called after each block of items; returns whether to stop the
    evaluation. If it returns True on a rank, all ranks return None. The watchdog times each block separately.
    Its time limit for a block is at least the time of training steps with as many tokens.
    """
    before = watchdog.evaluation_steps
    slowest = min(shares) * model.config.sequence_len  # tokens of a step on one rank

    def begin_block(progress: BlockProgress) -> None:
        run_status.begin_stage_again()
        watchdog.evaluation_steps = max(before, progress.block_tokens / slowest)

    try:
        return evaluate_core(
            model, tokenizer, bundle, group, on_block=begin_block, shares=shares, should_stop=should_stop
        )
    except StoppedEvaluationError:
        return None
    finally:
        watchdog.evaluation_steps = before
