"""Reports the figures of a run to the run status, the outcome, the tracker and the log."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.storage import TrainState
from trainer.formatting import counted, duration
from trainer.health.attempt import Attempt
from trainer.health.run_status import STEP_PHASES, RunStatus
from trainer.host.logger import RunLogger, fields
from trainer.placement.cost_model import Prediction
from trainer.run_plan import Plan
from trainer.tracking.tracker import Tracker

LINE_EVERY_SECONDS = 0.5
MEASURED_STEPS = 3  # after which the remaining time is logged and collectives get their time-out
RECENT_STEPS = 50
SMOOTHING = 0.1  # weight of the newest step in the average share of sync, and in that of the loss


class StepCost(NamedTuple):
    """Constants of a run from which its FLOPs, the FLOP rate and the passes over the dataset are computed.

    flops_per_token: FLOPs of forward and backward for one token. gemm_rate: sum of the GEMM rates of all
    ranks in FLOP/s; None if the rate of a rank was not measured. train_rows: number of rows of the training
    data.
    """

    flops_per_token: int
    gemm_rate: float | None
    train_rows: int


class Reporter:
    """Reports the figures of an attempt on this rank to run status, outcome, tracker and log.

    plan, cost: plan and step cost of the run; set by `begin`. train_state: the progress of the run.
    tracker: the tracker of this rank: rank 0 has one; with coordinator_failover the first rank of each
        host; else None.
    is_main: whether this is rank 0.
    durations: seconds of each step of this attempt; of an elastic run, since its members last changed.
    prediction: the predicted step time, with which `compare` and `done` compare the measured one; or None.
    """

    plan: Plan
    cost: StepCost

    def __init__(self, run_status: RunStatus, attempt: Attempt, log: RunLogger, routine: bool = True) -> None:
        """Prepare to report for this rank.

        run_status, attempt, log: run status, attempt and logger of the rank. routine: whether this rank logs
        steps; one rank per host does so.
        """
        self.run_status, self.attempt, self.log, self.routine = run_status, attempt, log, routine
        self.tracker: Tracker | None = None
        self.is_main = False
        self.train_state = TrainState()
        self.durations: list[float] = []  # seconds of this attempt's steps
        self.sync_share: float | None = None  # of a step's seconds, smoothed
        self.warning: str | None = None
        self.prediction: Prediction | None = None
        self._logged_at = -LINE_EVERY_SECONDS

    @property
    def measured(self) -> bool:
        """Whether exactly MEASURED_STEPS steps are done: the time-out of collectives is set at that step."""
        return len(self.durations) == MEASURED_STEPS

    @property
    def typical(self) -> float:
        """Mean seconds of a step, over the last RECENT_STEPS steps.

        The first of `durations` is left out if there are others.
        """
        return sum(self._recent) / len(self._recent)

    @property
    def median(self) -> float:
        """Median seconds of the same steps as in `typical`."""
        return statistics.median(self._recent)

    @property
    def _recent(self) -> list[float]:
        return self.durations[1:][-RECENT_STEPS:] or self.durations

    @property
    def expected(self) -> float:
        """Expected seconds that all remaining steps take together."""
        return (self.plan.num_iterations - self.train_state.step) * self.typical

    def begin(self, plan: Plan, train_state: TrainState, cost: StepCost) -> None:
        """Set the fields plan, train_state and cost after the setup, and report them."""
        self.plan, self.train_state, self.cost = plan, train_state, cost
        self.attempt.update(num_iterations=plan.num_iterations)
        # Without the loss, which shows that this attempt has made a step.
        self.run_status.update(
            step=train_state.step, val_bpb=train_state.val_bpb, num_iterations=plan.num_iterations
        )
        self.update()

    def update(self, **figures: Any) -> None:
        """Copy step, losses and checkpoint from the train state to the outcome.

        figures: more figures, for the run status. If there are any, the run status also gets the step.
        """
        train_state = self.train_state
        self.attempt.update(
            step=train_state.step,
            first_loss=train_state.first_loss,
            loss=train_state.loss,
            val_bpb=train_state.val_bpb,
            checkpoint=train_state.checkpoint,
        )
        if figures:
            self.run_status.update(step=train_state.step, **figures)

    def step(self, loss: float, rate: float, lr: float, seconds: float, sent: int) -> None:
        """Report a finished step.

        loss: training loss in nats per token. rate: multiplier of the learning rates. lr: learning rate of
        Muon. seconds: duration of the step. sent: bytes that this rank sent in the step.
        """
        train_state, last = self.train_state, self.plan.num_iterations
        self.durations.append(seconds)
        train_state.step += 1
        train_state.loss = loss
        train_state.first_loss = loss if train_state.first_loss is None else train_state.first_loss
        phases = self.run_status.lap()
        split = {f"{name}_s": phases.get(name, 0.0) for name in STEP_PHASES}
        average = self.plan.total_batch_size / self.typical
        figures = {
            "loss": loss,
            "smooth_loss": self._smooth_loss(loss),
            "lr": lr,
            "lr_multiplier": rate,
            "tok_per_s": self.plan.total_batch_size / seconds,
            "step_seconds": seconds,
            **split,
            "bytes_sent": sent,
            **self._progress(seconds),
        }
        share = split["sync_s"] / seconds
        before = share if self.sync_share is None else self.sync_share
        self.sync_share = before + SMOOTHING * (share - before)
        self.update(
            loss=loss,
            tok_per_s=figures["tok_per_s"],
            tok_per_s_average=average,
            step_seconds=self.median,
            eta_seconds=self.expected,
            sync_share=round(self.sync_share, 3),
        )
        self.attempt.update(tok_per_s=average)
        if self.tracker is not None:
            self.tracker.step(train_state.step, figures)
        edge = len(self.durations) == 1 or train_state.step == last
        if self.routine and (edge or time.monotonic() - self._logged_at >= LINE_EVERY_SECONDS):
            self._logged_at = time.monotonic()
            self.log.info(
                f"step {train_state.step}/{last} loss {loss:.4f} lr {rate:.2f} "
                f"{figures['tok_per_s']:,.0f} tok/s {seconds:.2f} s "
                f"(data {split['data_s']:.2f} fwd {split['forward_s']:.2f} bwd {split['backward_s']:.2f} "
                f"sync {split['sync_s']:.2f} opt {split['optimizer_s']:.2f}) eta {duration(self.expected)}",
                extra=fields("step", step=train_state.step, **figures, eta_seconds=self.expected),
            )

    def _smooth_loss(self, loss: float) -> float:
        """The moving average of the loss, as nanochat logs it: corrected for its start at 0.

        A run whose checkpoint has no average starts with `loss`.
        """
        state = self.train_state
        total = 1 - (1 - SMOOTHING) ** state.step  # weight of all steps so far
        before = state.smooth_loss
        state.smooth_loss = loss * total if before is None else before + SMOOTHING * (loss - before)
        return state.smooth_loss / total

    def _progress(self, seconds: float) -> dict[str, float]:
        """Add the `seconds` of a step to the training time; returns FLOPs, time, epochs so far, and mfu.

        mfu: the percentage of the GEMM rate of all ranks that the step reached; missing if it is unknown.
        """
        state, plan, cost = self.train_state, self.plan, self.cost
        state.training_seconds += seconds
        flops = cost.flops_per_token * plan.total_batch_size
        figures = {
            "total_training_flops": float(flops * state.step),
            "total_training_time": state.training_seconds,
            "epoch": state.step * plan.rows_per_step / cost.train_rows,
        }
        return figures | ({"mfu": 100 * flops / seconds / cost.gemm_rate} if cost.gemm_rate else {})

    def checkpoint(self, run_dir: Path) -> None:
        """Report the newest checkpoint in the run status: its step, path and time."""
        path = self.train_state.checkpoint
        if path is None:
            return
        with contextlib.suppress(OSError, ValueError):
            written = (run_dir / path).stat().st_mtime
            step = int(path.rpartition("_")[2])
            self.run_status.update(checkpoint={"step": step, "time": written, "path": path})

    def warn(self, sentence: str | None) -> None:
        """Set the warning in the run status; None removes it."""
        if sentence != self.warning:
            self.warning = sentence
            self.run_status.update(warning=sentence)

    def expected_time(self) -> None:
        """Log the expected seconds of the remaining steps, and the time of day at which they are done."""
        left, seconds = self.plan.num_iterations - self.train_state.step, self.expected
        if not left:
            return
        at = time.strftime("%a %H:%M", time.localtime(time.time() + seconds))
        self.log.info(f"About {duration(seconds)} for the {counted(left, 'step')} left, until {at}.")

    def evaluation(self, bpb: float, loss: float) -> bool:
        """Report an evaluation. bpb: bits per byte. loss: nats per token.

        Returns whether bpb is the best so far.
        """
        train_state = self.train_state
        train_state.val_bpb, train_state.val_bpb_step = bpb, train_state.step
        is_best = train_state.best_val_bpb is None or bpb < train_state.best_val_bpb
        if is_best:
            train_state.best_val_bpb = bpb
        self.update(val_bpb=bpb)
        figures = {"val_bpb": bpb, "val_loss": loss}
        if self.tracker is not None:
            self.tracker.step(train_state.step, figures)
        if self.is_main:
            self.log.info(
                f"step {train_state.step}: {bpb:.4f} bits per byte, validation loss {loss:.4f}",
                extra=fields("evaluation", step=train_state.step, **figures),
            )
        return is_best

    def core(self, metric: float, table: str, text: str) -> None:
        """Report an evaluation of CORE to tracker and log.

        metric: the CORE metric. table: the results of its tasks as CSV, which become a file. text: text for
        the log.
        """
        step = self.train_state.step
        if self.tracker is not None:
            self.tracker.step(step, {"core_metric": metric})
            self.tracker.core(step, table)
        if self.is_main:
            self.log.info(f"step {step}: {text}", extra=fields("core", step=step, core_metric=metric))

    def sample(self, text: str) -> None:
        """Report a sample of generated text to outcome, tracker and log."""
        self.attempt.update(sample=text)
        if self.tracker is not None:
            self.tracker.sample(self.train_state.step, text)
        visible = "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text)
        self.log.info(f"sample: {visible}", extra=fields("sample", step=self.train_state.step, sample=text))

    def shares(self, shares: Sequence[int], reason: str = "") -> None:
        """Report the batch split. shares: rows per rank.

        reason: why the batch split has changed; rank 0 logs this. If it is "", nothing is logged.
        """
        self.run_status.update(shares=list(shares))
        if self.tracker is None:
            return
        rows = {f"rows.{rank}": float(share) for rank, share in enumerate(shares)}
        self.tracker.step(self.train_state.step, rows)
        if reason and self.is_main:
            step = self.train_state.step
            self.log.info(
                f"step {step}: new batch split: {reason}",
                extra=fields("shares", step=step, shares=list(shares)),
            )

    def members(self, hosts: int, ranks: int) -> None:
        """Report the members of an elastic run after a change, and clear `durations`.

        hosts: the number of hosts. ranks: the number of ranks.
        """
        self.durations.clear()
        if self.tracker is not None:
            self.tracker.step(self.train_state.step, {"hosts": float(hosts), "ranks": float(ranks)})

    def compare(self) -> None:
        """Report predicted and measured seconds of a step to the tracker."""
        if self.tracker is not None and self.prediction is not None and self.durations:
            figures = {"predicted_step_seconds": self.prediction.step_seconds}
            self.tracker.step(self.train_state.step, {**figures, "measured_step_seconds": self.median})

    def done(self) -> str:
        """The closing sentence of a finished run."""
        steps = self.plan.num_iterations
        what = f"All {steps} steps" if steps > 1 else "The only step"
        figures = (self.train_state.loss, self.train_state.val_bpb)
        loss, bpb = ("unknown" if figure is None else f"{figure:.4f}" for figure in figures)
        closing = f"{what} done: loss {loss}, {bpb} bits per byte."
        if self.prediction is not None and self.durations:
            closing += f" {self.prediction.against(self.median)}"
        return closing
