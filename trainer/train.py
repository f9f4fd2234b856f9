"""Training of one rank: setup, steps, evaluation, checkpoints, end. `Trainer.train_step` has the algorithm.

python -m trainer train --data-dir data --run-dir runs/mine --depth 4 --num-iterations 100
torchrun --nproc-per-node 2 -m trainer train --run-file run.json --data-dir data --run-dir runs/mine
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from trainer.checkpoint.copies import CheckpointCopies
from trainer.checkpoint.exchange import gather_optimizer
from trainer.checkpoint.rank_state import save_rank_states
from trainer.checkpoint.storage import State
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import RunFile
from trainer.data.files import is_full
from trainer.data.loader import Batch, read_batch
from trainer.distributed.digest import ParameterCheck, compare_batches
from trainer.distributed.process_group import UNMEASURED_TIMEOUT, PeerLost
from trainer.distributed.step_sync import StepReport, StepSummary, StepSync
from trainer.eval import core_in_run, sample
from trainer.eval.bits_per_byte import evaluate
from trainer.health.attempt import Attempt
from trainer.health.run_status import RunStatus
from trainer.health.watchdog import Watchdog
from trainer.host.logger import RunLogger, fields
from trainer.host.memory import return_freed_memory
from trainer.host.rank_env import RankEnv
from trainer.optim import lr_schedule
from trainer.outcome import Final, Retryable, RunEnd, Stopped, TransferToHost, conclude
from trainer.placement.batch_split import Balancer
from trainer.placement.decide import rank_names
from trainer.rank_batch import RankBatch, rank_batch
from trainer.setup import RunSetup
from trainer.stages import SFT
from trainer.tracking.reporter import Reporter

COMPUTING = ("forward", "backward")  # phases whose seconds a rank reports as its own
# The time-out of a collective, once steps are measured. The watchdog reports and ends lost ranks long before;
# this ends the wait for ranks that run and do not join the collective.
TIMEOUT_STEPS = 20


class Trainer:
    """Runs one attempt at a run on this rank. `run` returns a sentence on the result, or raises RunEnd.

    run_file: content of run.json. data_dir, run_dir: data and run directory.
    env, attempt, log: environment, attempt and logger of this rank.
    from_checkpoint: on rank 0, the checkpoint that a run of stage sft begins with; else None.
    """

    setup_class = RunSetup
    continues = False  # whether another trainer has trained in this attempt before

    def __init__(
        self,
        run_file: RunFile,
        data_dir: Path,
        run_dir: Path,
        env: RankEnv,
        attempt: Attempt,
        log: RunLogger,
        from_checkpoint: Path | None = None,
    ) -> None:
        self.run_file, self.config, self.run_dir = run_file, run_file.config, run_dir
        self.env, self.attempt, self.log = env, attempt, log
        self.run_status = RunStatus(run_dir, env, run_file.run_id)
        self.watchdog = Watchdog(self.run_status, env, run_dir, attempt, log)
        self.setup = self.setup_class(run_file, data_dir, run_dir, env, self.run_status, self.watchdog, log)
        self.setup.from_checkpoint, self.stopping = from_checkpoint, False
        self.reporter = Reporter(self.run_status, attempt, log, env.is_host_leader)
        self.stop_file, self.timeout = run_dir / "stop", UNMEASURED_TIMEOUT
        self.checkpoint_writer = CheckpointWriter(
            run_dir / "checkpoints", data_dir / "tokenizer", self.config.keep_checkpoints, log.info
        )
        attempt.before_end = self._complete

    def _run(self, tracker_uri: str) -> str:
        """Set up this rank, train, and close the process group; returns a sentence on the result."""
        self.attempt.update(run_id=self.run_file.run_id)
        self.run_status.start()
        self.watchdog.start()
        if self.env.is_coordinator and not self.continues:
            self.stop_file.unlink(missing_ok=True)  # it was meant for an earlier attempt
        try:
            self._set_up()
        except TransferToHost as end:  # in the outcome even if that of another rank is written first
            self.attempt.update(transfer=end.transfer)
            raise
        if self.env.is_coordinator:
            if not self.continues:
                self.log.info(self.setup.describe(), extra=fields("plan"))
            if self.reporter.train_state.step:  # the sample of an earlier attempt, until there is a new one
                self.attempt.update(sample=sample.last(self.run_dir))
            self.reporter.is_main = True
        if self.env.is_coordinator or (self.setup.tracks_on_all_hosts and self.env.is_host_leader):
            self.reporter.tracker = self.setup.open_tracker(tracker_uri)
            self.attempt.at_end(self.reporter.tracker.close)

        stopped = self.train()
        self.reporter.compare()
        self.run_status.enter("done")
        self.group.close()
        if stopped:
            raise self._stopped()
        return self.reporter.done()

    def _set_up(self) -> None:
        setup = self.setup
        setup.run()
        self._begin()

    def _begin(self) -> None:
        """Take plan, data, group, model, optimizer and sync mode from the setup, and prepare the steps."""
        setup = self.setup
        self.plan, self.data, self.group = setup.plan, setup.data, setup.group
        self.model, self.optimizer, self.sync = setup.model, setup.optimizer, setup.sync
        self.sync.optimizing = partial(self.run_status.during, "optimizer")
        self.step_sync = StepSync(self.group, self.plan.rows_per_step)
        self.parameter_check = ParameterCheck(self.group, self.model, self.run_dir)
        self.reporter.begin(setup.plan, setup.train_state, setup.step_cost())
        self.reporter.prediction = setup.placement.prediction
        self.checkpoint_copies = CheckpointCopies(
            self.group,
            setup.checkpoints,
            self.config,
            self.log.info,
            self.run_status.begin_stage_again,
            setup.copies_to,
        )
        self._next_batch: Batch
        self.balancer: Balancer | None = None
        if self.env.is_coordinator and not self.run_file.fixed_shares:
            self.balancer = Balancer(self.plan.shares, rank_names(self.group.peers))
        self.reporter.checkpoint(self.run_dir)
        self.watchdog.evaluation_steps = self.config.eval_tokens / self.plan.total_batch_size

    # -- steps -----------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train to the last step. Returns True if a person has stopped the run before the last step.

        A stopped run has saved a checkpoint.
        """
        first = self.reporter.train_state.step
        return_freed_memory()
        self._saved_at = time.monotonic()
        self.run_status.lap()
        if self.run_file.by_speed:
            self.reporter.shares(self.plan.shares)
        self._read_first_batch(first)
        for step in range(first, self.plan.num_iterations):
            self.train_step(step)
            if self.stopping:
                return True
        return False

    def train_step(self, step: int) -> None:
        """Train one step, counted from 0; then log it, and evaluate, sample and save if these are due."""
        is_last = step + 1 == self.plan.num_iterations
        bytes_before, started = self.group.bytes_sent, time.monotonic()

        # Batch: this rank's rows of the global batch.
        self.run_status.enter("data")
        batch = self._batch(step)

        # Forward and backward. exact and fast already step the last layers during backward.
        lr_multiplier, lr = self._set_rates(step)
        self.sync.begin_step(batch.active, batch.active_by_rank)
        before = self.run_status.seconds_in(*COMPUTING)  # above 0 after a step that ended as a rank was lost
        loss_sum = self.forward_backward(batch)
        compute_seconds = self.run_status.seconds_in(*COMPUTING) - before

        # Gradient sync: start the sums, each on its owner rank, some only in self.sync.step(); none in local.
        self.run_status.enter("sync")
        pending = self.step_sync.start(self._step_report(loss_sum, compute_seconds, step + 1))
        self.sync.reduce_gradients(batch.n_targets, batch.n_targets_of_rank)

        # Optimizer step: the parameters that this rank owns, and those that all ranks step.
        self.run_status.enter("optimizer")
        self.sync.step()  # its waits are in the phase sync

        # Parameter broadcast: every rank has the same bytes again, except in the mode local.
        self.run_status.enter("sync")
        self.sync.broadcast()
        if is_last:
            self._finish_sync()
        summary = self.step_sync.finish(pending)
        loss = self._mean_loss(summary, batch.n_targets, step + 1)
        self._check_ranks(summary, step + 1)
        if summary.copy:
            self.checkpoint_copies.start(self.reporter.train_state.checkpoint)

        # Logging.
        seconds = time.monotonic() - started
        self.reporter.step(loss, lr_multiplier, lr, seconds, self.group.bytes_sent - bytes_before)
        self._update_split(summary, seconds)
        self._report_checkpoint()
        if self.reporter.measured:
            self._set_timeout()

        # Evaluation, sample and checkpoint.
        self.summary, self.stopping = summary, summary.stop and not is_last
        self._evaluate_and_save(summary, step + 1, is_last)

    def _batch(self, step: int) -> RankBatch:
        """The batch of this rank in `step`, counted from 0. Also reads the global batch of the next step."""
        batch = self._next_batch  # the next one is read too: ranks compare it before they train on it
        if step + 1 < self.plan.num_iterations:
            self._next_batch = self._read(step + 1)
        return rank_batch(batch, self.plan.shares, self.group.rank, self.setup.numerics.device)

    def _read(self, step: int) -> Batch:
        return read_batch(self.data.train, self.config.seed, step, self.plan.rows_per_step)

    def _read_first_batch(self, step: int) -> None:
        """Read the global batch of the attempt's first step, and compare it with that of the other ranks.

        Later batches are compared in the step reports. step: the first step, counted from 0. Raises Retryable
        if the batches differ.
        """
        self.run_status.enter("data")
        self._next_batch = self._read(step)
        checksums = self.group.gather_int64(torch.tensor([self._next_batch.checksum]))
        compare_batches(self.group, checksums.flatten().tolist(), step + 1)

    def forward_backward(self, batch: RankBatch) -> float:
        """Accumulate the gradients of this rank's rows, `batch`; returns the sum of their losses in nats."""
        # Read once at the end, so that a GPU does not wait for the host after each micro-batch.
        total = torch.zeros((), dtype=torch.float64, device=batch.idx.device)
        size = self.setup.micro_batches[self.group.rank]
        batches = list(zip(batch.idx.split(size), batch.targets.split(size), strict=True))
        for number, (idx, targets) in enumerate(batches, start=1):
            self.run_status.enter("forward")
            loss = self.model(idx, targets, loss_reduction="sum")
            self.run_status.enter("backward")
            with self.sync.last_backward(batch.n_targets) if number == len(batches) else nullcontext():
                loss.backward()
            total += loss.detach()
        return total.item()

    def _set_rates(self, step: int) -> tuple[float, float]:
        """Set learning rates, Muon's momentum and Muon's weight decay for `step`, counted from 0.

        Returns (multiplier of all learning rates, learning rate of Muon).
        """
        config, n = self.config, self.plan.num_iterations
        rates = config.warmup_steps, config.warmdown_ratio, config.final_lr_frac
        multiplier = config.init_lr_frac * lr_schedule.lr_multiplier(step, n, *rates)
        base, sft = lr_schedule.muon_momentum, lr_schedule.sft_muon_momentum
        momentum = sft(step) if config.stage == SFT else base(step, n, config.warmdown_ratio)
        self.optimizer.set_schedule(multiplier, momentum, lr_schedule.muon_weight_decay(step, n))
        return multiplier, config.matrix_lr * self.plan.scales.lr * multiplier

    def _finish_sync(self) -> None:
        """After the last step, make the parameters equal on all ranks. Only sync=local sends data here."""
        self.sync.finish()

    def _evaluate_and_save(self, summary: StepSummary, step: int, is_last: bool) -> None:
        """After `step`, counted from 1: evaluate, write a sample and save a checkpoint, each if it is due."""
        config = self.config
        evaluates = is_last or (_due(step, config.eval_every) and not summary.stop)
        scores_last = is_last and config.core_metric_every > 0
        scores = scores_last or (_due(step, config.core_metric_every) and not summary.stop)
        samples = is_last or _due(step, config.sample_every)
        saves = is_last or summary.save or summary.stop
        if not (evaluates or scores or samples or saves):
            return
        with self.sync.shared_parameters():
            saves_best = bool(config.save_every or config.save_minutes)
            best = evaluates and self._evaluate() and saves_best
            if scores:
                self._evaluate_core()
            if samples and self.env.is_coordinator:
                self._write_sample()
            if saves or best:
                self._save(last=is_last or summary.stop)
        return_freed_memory()

    # -- what ranks exchange at the end of a step --------------------------------------------------------

    def _step_report(self, loss_sum: float, seconds: float, step: int) -> StepReport:
        """The report of this rank on `step`, counted from 1. Rank 0 adds requests: stop, save, new split."""
        rows, checksum = self.plan.shares[self.group.rank], self._next_batch.checksum
        if not self.env.is_coordinator:
            return StepReport(loss_sum, seconds, rows, next_batch=checksum)
        proposed = self.balancer.proposed if self.balancer else None
        minutes = (time.monotonic() - self._saved_at) / 60
        by_time = 0 < self.save_minutes <= minutes and not self.checkpoint_writer.busy
        return StepReport(
            loss_sum,
            seconds,
            rows,
            stop=os.path.lexists(self.stop_file),
            save=by_time or _due(step, self.config.save_every) or self.checkpoint_writer.wants_retry,
            failed_save=self.checkpoint_writer.problem is not None,
            copy=self.checkpoint_copies.is_due(self.reporter.train_state.checkpoint),
            shares=tuple(proposed.shares) if proposed else (),
            next_batch=checksum,
        )

    @property
    def save_minutes(self) -> float:
        """Minutes between two checkpoints that are saved by time; 0: no checkpoint is saved by time."""
        return self.config.save_minutes

    def _mean_loss(self, summary: StepSummary, n_targets: int, step: int) -> float:
        """The mean loss per target over all ranks. Raises Final if it is not finite or a save has failed."""
        loss = summary.loss_sum / n_targets
        if summary.failed_save:
            self.group.raise_problems(self.checkpoint_writer.problem)
        if not math.isfinite(loss):
            raise Final(
                f"The loss of step {step} is {loss}: the run has diverged. The learning rates of a run "
                "cannot be changed. Start a new run with lower ones (matrix_lr is "
                f"{self.config.matrix_lr:g}, embedding_lr is {self.config.embedding_lr:g}): with the "
                "playbooks -e run_id=NAME -e matrix_lr=RATE -e embedding_lr=RATE, by hand another --run-dir, "
                "--matrix-lr and --embedding-lr."
            )
        return loss

    def _check_ranks(self, summary: StepSummary, step: int) -> None:
        """Compare the batches of all ranks for step + 1, and their parameters if that is due after `step`.

        step: counted from 1. Raises Retryable if the batches differ, Final if the parameters differ.
        """
        compare_batches(self.group, summary.next_batches, step + 1)
        if _due(step, self.config.digest_every) or step == self.parameter_check.recheck_at:
            with self.sync.shared_parameters():
                self._compare_parameters(step)

    def _compare_parameters(self, step: int) -> None:
        """Compare the parameters of all ranks after `step`. Raises Final if they differ."""
        found = self.parameter_check(step)
        if found and self.env.is_coordinator:
            self.log.warning(f"warning: {found}", extra=fields("digest"))

    def _update_split(self, summary: StepSummary, step_seconds: float) -> None:
        """Use the batch split in `summary`, if rank 0 has sent one. On rank 0, also look for a faster one."""
        proposed = self.balancer.proposed if self.balancer else None
        if summary.shares:
            self.plan = dataclasses.replace(self.plan, shares=summary.shares)
            self.reporter.shares(summary.shares, proposed.reason if proposed else "")
        if self.balancer is None:
            return
        self.balancer.update(summary.shares, summary.seconds, step_seconds)
        if self.balancer.proposed and not self.run_file.by_speed:
            reason = self.balancer.proposed.reason
            self.balancer = None  # reported once
            self.log.info(
                f"The ranks compute at different speeds. With shares=auto a step would be shorter: {reason}. "
                "To use it, stop the run, then start it with shares=auto: with the playbooks -e shares=auto, "
                "by hand --shares auto.",
                extra=fields("shares"),
            )

    # -- time-outs, evaluation, checkpoints --------------------------------------------------------------

    def _set_timeout(self) -> None:
        """Set the time-out of collectives: TIMEOUT_STEPS times the longest step, at least 10 minutes."""
        if self.env.is_coordinator:
            self.reporter.expected_time()
        self.timeout = max(
            UNMEASURED_TIMEOUT, timedelta(seconds=TIMEOUT_STEPS * max(self.reporter.durations))
        )
        self.group.set_timeout(self.timeout)

    @contextmanager
    def _long_phase(self, phase: str) -> Iterator[None]:
        """Context manager: enters `phase`; collectives time out after twice an evaluation at the earliest.

        The duration of an evaluation is estimated from the longest step.
        """
        self.run_status.enter(phase)
        evaluation = self.watchdog.evaluation_steps * max(self.reporter.durations, default=0.0)
        self.group.set_timeout(max(self.timeout, timedelta(seconds=2 * evaluation)))
        yield
        self.group.set_timeout(self.timeout)

    def _evaluate(self) -> bool:
        """Evaluate on the validation split and report it; returns whether the result is the best so far."""
        with self._long_phase("evaluate"):
            bpb, loss = evaluate(
                self.model,
                self.data.val,
                torch.from_numpy(self.data.tokenizer.token_bytes),
                self.config.eval_tokens,
                self.setup.micro_batches[self.group.rank],
                self.group,
                self.plan.shares,
            )
        return self.reporter.evaluation(bpb, loss)

    def _evaluate_core(self) -> None:
        """Evaluate CORE on all ranks and report it, unless the run is stopped meanwhile."""
        setup, stop = self.setup, lambda: self.env.is_coordinator and os.path.lexists(self.stop_file)
        assert setup.core is not None
        watched = self.run_status, self.watchdog, stop
        with self._long_phase("evaluate"):
            result = core_in_run.evaluate(
                self.model, self.data.tokenizer, setup.core, self.group, self.plan.shares, *watched
            )
        if result:
            with self._without_room("the table of CORE was not written"):
                self.reporter.core(result.metric, result.to_csv(), result.describe())

    def _write_sample(self) -> None:
        """On rank 0, generate a sample of text and report it. Other ranks wait in their next collective."""
        self.run_status.enter("evaluate")
        with self._without_room("no sample was written"):
            text = sample.write(self.model, self.data.tokenizer, self.run_dir, self.config.stage)
            self.reporter.sample(text)

    @contextmanager
    def _without_room(self, lost: str) -> Iterator[None]:
        """Context manager: if the disk is full, log a warning instead of raising OSError.

        lost: a clause for the warning that names the missing result, such as "no sample was written".
        """
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            self.log.warning(f"warning: The disk of {self.run_dir} is full: {lost}.")

    def _save(self, last: bool) -> None:
        """Save a checkpoint on rank 0, in the background unless `last`. Raises Final if parameters differ."""
        step, group = self.reporter.train_state.step, self.group
        with self._long_phase("checkpoint"):
            if self.config.digest_every:
                self._compare_parameters(step)
            optim = gather_optimizer(group, self.sync, self.optimizer, self.checkpoint_writer.room)
            keep, warn = self.config.keep_checkpoints, self.log.warning
            hashes = save_rank_states(group, self.sync, self.optimizer, self.run_dir, step, keep, warn)
            if self.env.is_coordinator:
                meta = self.setup.checkpoint_meta(self.plan, self.reporter.train_state)
                state = State(meta | hashes, dict(self.model.state_dict()), optim)
                self.checkpoint_writer.save(state, last)
                self._saved_at = time.monotonic()
            if last:
                self.checkpoint_writer.wait_on_all_ranks(group)
                self._report_checkpoint()
                if not self.stopping:  # a person waits for that; the next attempt makes the copy
                    self.checkpoint_copies.finish(self.reporter.train_state.checkpoint)
        self._report_checkpoint()

    def _report_checkpoint(self) -> None:
        """Report the newest completely written checkpoint and a shortage of disk space.

        The outcome and the run status get the checkpoint; the run status gets the shortage as a warning.
        """
        writer, state = self.checkpoint_writer, self.reporter.train_state
        # Another rank may have written one of its own, when an elastic run lost its coordinator.
        if writer.saved is not None and self.env.is_coordinator:
            path = writer.saved.relative_to(self.run_dir).as_posix()
            if path != state.checkpoint:
                state.checkpoint = path
                self.reporter.checkpoint(self.run_dir)
                return_freed_memory()
        self.reporter.warn(writer.shortage)
        self.reporter.update()

    # -- the end ---------------------------------------------------------------------------------------

    def _stopped(self) -> Stopped:
        state = self.reporter.train_state
        saved = f"the checkpoint is {state.checkpoint or 'on rank 0'}"
        if self.env.is_coordinator and state.checkpoint != f"checkpoints/step_{state.step:06d}":
            newest = f"the newest checkpoint is {state.checkpoint}" if state.checkpoint else "no other exists"
            saved = f"a checkpoint of this step could not be saved, and {newest}"
        return Stopped(f"Stopped on request after {state.step} of {self.plan.num_iterations} steps; {saved}.")

    def run(self, tracker_uri: str = "") -> str:
        """Run the attempt; returns a sentence on the result after the last step.

        Raises RunEnd, ConfigError or DataError if the attempt ends otherwise; if a peer is lost, the RunEnd
        explains the loss. The other ranks get the outcome and reason of an exception. In all cases `run`
        completes a checkpoint that is being written, and stops the watchdog.
        tracker_uri: address of the MLflow server; "" for no server.
        """
        try:
            try:
                return self._run(tracker_uri)
            except PeerLost as error:
                position = self.run_status.record().position
                end = self.watchdog.explain(error)
                if end.outcome == "retryable":
                    end = Retryable(f"In {position}: {end}")
                self.watchdog.announce_end(end.outcome, str(end))
                raise self._complete(end, math.inf) from None
        except Exception as error:
            outcome, reason, _ = conclude(error)
            self.watchdog.announce_end(outcome, reason)
            raise
        finally:
            try:
                self._complete_write()
            finally:
                self.watchdog.stop()

    def _complete(self, end: RunEnd, seconds: float) -> RunEnd:
        """Wait at most `seconds` for a checkpoint that is being written; returns the end of the attempt.

        This is Stopped if `end` is retryable and a person has stopped the run, else `end`.
        """
        self._complete_write(seconds)
        return self._stopped() if self.stopping and end.outcome == "retryable" else end

    def _complete_write(self, seconds: float = math.inf) -> None:
        """Wait at most `seconds` for a checkpoint that is being written, and report the newest one."""
        self.checkpoint_writer.wait(seconds)
        self._report_checkpoint()


def _due(step: int, every: int) -> bool:
    """Whether an action with the period `every` (in steps; 0: never) is due after `step`, counted from 1."""
    return bool(every) and step % every == 0
