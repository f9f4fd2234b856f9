"""A training, from loading to its outcome: the loop as one would write it on a blackboard.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint import storage
from trainer.checkpoint.rank_state import keep_own
from trainer.checkpoint.writer import Saver
from trainer.config import RunConfig, RunFile
from trainer.data.files import is_full
from trainer.data.loader import Batch, rank_rows, read_batch
from trainer.distributed.digest import ParameterCheck, compare_batches
from trainer.distributed.process_group import UNMEASURED_TIMEOUT, PeerLost
from trainer.distributed.step_sync import Agreement, Told, Words
from trainer.eval import sample
from trainer.eval.bits_per_byte import evaluate
from trainer.health.attempt import Attempt
from trainer.health.report import where
from trainer.health.run_status import Heartbeat
from trainer.health.watchdog import Watchdog
from trainer.host.logger import Voice
from trainer.host.rank_env import Place
from trainer.optim import lr_schedule
from trainer.outcome import Final, LeftToOne, Retryable, RunEnd, Stopped, conclude
from trainer.placement.batch_split import Balancer, Change
from trainer.placement.decide import names_of
from trainer.run_plan import describe
from trainer.setup import Beginning, Ready
from trainer.tracking.reporter import Report
from trainer.tracking.tags import facts_of
from trainer.tracking.tracker import Tracker

# Of a collective, once steps are measured. The watchdog speaks long before and ends what is dead; this ends
# a wait for ranks that live and do not come.
TIMEOUT_STEPS = 20
WRITE_LOOK_SECONDS = 2.0  # between looks of all ranks whether the last checkpoint is written


class Run:
    """One attempt at a run on this rank. `go` raises RunEnd, or returns the sentence it ended with."""

    beginning = Beginning

    def __init__(
        self, run_file: RunFile, data_dir: Path, run_dir: Path, place: Place, attempt: Attempt, say: Voice
    ) -> None:
        self.run_file = run_file
        self.config: RunConfig = run_file.config
        self.data_dir, self.run_dir = data_dir, run_dir
        self.place, self.attempt, self.say = place, attempt, say
        self.heartbeat = Heartbeat(run_dir, place, run_file.run_id)
        self.watchdog = Watchdog(self.heartbeat, place, run_dir, attempt, say)
        self.stops = False  # whether the ranks have agreed on a stop
        self.report = Report(self.heartbeat, attempt, say, place.speaks_for_host)
        self.stop_file = run_dir / "stop"
        self.timeout = UNMEASURED_TIMEOUT
        self.saver = Saver(run_dir / "checkpoints", data_dir / "tokenizer", self.config.keep_checkpoints, say)
        attempt.before_end = self._complete

    def go(self, tracker_uri: str = "") -> str:
        """Load, meet, resume, train, conclude."""
        self.attempt.state(run_id=self.run_file.run_id)
        self.heartbeat.start()
        self.watchdog.start()
        if self.place.coordinates:
            self.stop_file.unlink(missing_ok=True)  # asked of an earlier attempt
        way = self.beginning(
            self.run_file, self.data_dir, self.run_dir, self.place, self.heartbeat, self.watchdog, self.say
        )
        try:
            self._take(way.ready())
        except LeftToOne as end:  # in the outcome also where another rank's word comes first
            self.attempt.state(alone=end.alone)
            raise
        if self.place.coordinates:
            rows, sizes = self.data.info.train_rows, self.ready.micro_batches
            self.say(describe(self.plan, self.config, self.model, rows, sizes), event="plan")
            if self.report.progress.step:  # the last text of an earlier attempt, until there is a newer one
                self.attempt.state(sample=sample.last(self.run_dir))
            self.report.tracker = self._make_tracker(tracker_uri)
            self.attempt.at_end(self.report.tracker.close)

        stopped = self._loop()
        self.report.compare()
        self._part()
        if stopped:
            raise self._stopped()
        return self.report.done()

    def _stopped(self) -> Stopped:
        progress = self.report.progress
        return Stopped(
            f"Stopped as asked after {progress.step} of {self.plan.num_iterations} steps; the checkpoint "
            f"is {progress.checkpoint or 'on rank 0'}."
        )

    def _take(self, ready: Ready) -> None:
        self.ready, self.plan, self.data, self.group = ready, ready.plan, ready.data, ready.group
        self.model, self.optimizer, self.sync = ready.model, ready.optimizer, ready.sync
        self.agreement = Agreement(self.group, self.plan.rows_per_step)
        self.check = ParameterCheck(self.group, self.model, self.run_dir)
        self._compared_at = 0  # the step after which the parameters were compared
        self.report.begin(ready.plan, ready.progress)
        self.report.prediction = ready.arrangement.prediction
        self._next: Batch
        self.proposed: Change | None = None
        self.balancer: Balancer | None = None
        if self.place.coordinates and not self.run_file.fixed_shares:
            self.balancer = Balancer(self.plan.shares, names_of(self.group.peers))
        self.report.checkpoint(self.run_dir)
        self.watchdog.evaluation_steps = self.config.eval_tokens / ready.plan.total_batch_size

    def _make_tracker(self, uri: str) -> Tracker:
        if self.config.tracker == "none":
            uri = ""
        elif not uri:
            self.say("No tracker address was given (--tracker-uri): metrics.jsonl alone keeps the figures.")
        facts = facts_of(
            self.run_file,
            self.ready.config_digest,
            self.plan,
            self.model,
            self.data.info,
            self.data.hashes,
            self.hosts,
            self.ready.facts_by_rank,
            self.ready.arrangement.tags(),
        )
        return Tracker(self.run_dir, self.report.progress.step, facts, uri, self.say)

    @property
    def hosts(self) -> list[str]:
        """The ranks' hosts, in their order."""
        return [peer.host for peer in self.group.peers]

    # -- the loop --------------------------------------------------------------------------------------

    def _loop(self) -> bool:
        """Train to the end; returns True when somebody asked for a stop and the run has saved."""
        config, report, last = self.config, self.report, self.plan.num_iterations
        self._saved_at = time.monotonic()
        self.heartbeat.lap()
        if self.run_file.by_speed:
            report.shares(self.plan.shares)
        self._read_first(report.progress.step)
        for step in range(report.progress.step, last):
            self._begin_step(step)
            sent, started = self.group.bytes_sent, time.monotonic()

            self.heartbeat.enter("data")
            idx_BT, targets_BT, active = self._batch(step)
            self.sync.begin_step(active)
            computing = time.monotonic()
            loss_sum = self._accumulate(idx_BT, targets_BT)
            computed = time.monotonic() - computing

            self.heartbeat.enter("sync")
            agreeing = self.agreement.start(self._words(loss_sum, computed, step + 1))
            self.sync.reduce_gradients(self.plan.total_batch_size, idx_BT.numel())

            self.heartbeat.enter("optimizer")
            rate, lr = self._set_rates(step)
            waited = self.group.seconds_waited
            self.sync.step()
            self.heartbeat.move("optimizer", "sync", self.group.seconds_waited - waited)

            self.heartbeat.enter("sync")
            self.sync.hand_out()
            ends = step + 1 == last
            if ends:
                self._meet_at_last()
            told = self.agreement.finish(agreeing)
            loss = self._mean_loss(told, step + 1)
            compare_batches(self.group, told.batches, step + 2)
            if _due(step + 1, config.digest_every) or step + 1 == self.check.again_at:
                with self.sync.agreed():
                    self._compare_parameters(step + 1)

            seconds = time.monotonic() - started
            report.step(loss, rate, lr, seconds, self.group.bytes_sent - sent)
            self._share_anew(told, seconds)
            self._note_checkpoint()
            if report.measured:
                self._set_pace()

            self.stops = told.stop and not ends
            evaluates = ends or (_due(step + 1, config.eval_every) and not told.stop)
            samples = ends or _due(step + 1, config.sample_every)
            saves = ends or told.save or told.stop
            if evaluates or samples or saves:
                with self.sync.agreed():
                    best = evaluates and self._evaluate() and self._saves_on_the_way
                    if samples and self.place.coordinates:
                        self._write_sample()
                    if saves or best:
                        self._save(last=ends or told.stop)
            if self.stops:
                return True
        return False

    def _begin_step(self, step: int) -> None:
        """Nothing; a rehearsal measures there."""

    def _batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's slice of the step's rows: inputs and targets, (rows, T) each; all ranks' active rows.

        What the next step needs is read as well, for ranks to compare it before they train on it.
        """
        batch = self._next
        if step + 1 < self.plan.num_iterations:
            self._next = self._read(step + 1)
        mine = rank_rows(batch.tokens, self.plan.shares, self.place.rank)
        tokens = torch.from_numpy(mine.astype(np.int64)).to(self.ready.numerics.device)
        return tokens[:, :-1], tokens[:, 1:], torch.from_numpy(batch.active).to(tokens.device)

    def _read(self, step: int) -> Batch:
        return read_batch(self.data.train, self.config.seed, step, self.plan.rows_per_step)

    def _read_first(self, step: int) -> None:
        """Read the batch of an attempt's first step, which no step report comes before."""
        self.heartbeat.enter("data")
        self._next = self._read(step)
        checksums = self.group.gather_int64(torch.tensor([self._next.checksum]))
        compare_batches(self.group, checksums.flatten().tolist(), step + 1)

    def _accumulate(self, idx_BT: Tensor, targets_BT: Tensor) -> float:
        """Add up gradients of summed token losses over micro-batches; returns the sum of the losses."""
        # Read once, so that a GPU need not wait for the host after each micro-batch.
        total = torch.zeros((), dtype=torch.float64, device=idx_BT.device)
        size = self.ready.micro_batches[self.place.rank]
        batches = list(zip(idx_BT.split(size), targets_BT.split(size), strict=True))
        for number, (idx, targets) in enumerate(batches, start=1):
            self.heartbeat.enter("forward")
            loss = self.model(idx, targets, loss_reduction="sum")
            self.heartbeat.enter("backward")
            with self.sync.last_backward() if number == len(batches) else nullcontext():
                loss.backward()
            total += loss.detach()
        return total.item()

    def _meet_at_last(self) -> None:
        """Ranks that train by themselves come to the parameters that the run ends with."""
        self.sync.finish()

    def _words(self, loss_sum: float, seconds: float, step: int) -> Words:
        """What this rank has to say of step `step`, counted from 1; rank 0's wishes with it."""
        rows = self.plan.shares[self.place.rank]
        if not self.place.coordinates:
            return Words(loss_sum, seconds, rows, batch=self._next.checksum)
        shares = tuple(self.proposed.shares) if self.proposed else ()
        return Words(loss_sum, seconds, rows, *self._wishes(step), shares, self._next.checksum)

    def _mean_loss(self, told: Told, step: int) -> float:
        """Over all ranks.

        A loss that is not a number, or a checkpoint that could not be written, ends the run on all ranks.
        """
        loss = told.loss_sum / self.plan.total_batch_size
        if told.trouble:
            self.group.agree(self.saver.problem)
        if not math.isfinite(loss):
            raise Final(
                f"The loss of step {step} is {loss}: the run has diverged. Lower the rates "
                "(matrix_lr, embedding_lr) or go back to an earlier checkpoint."
            )
        return loss

    def _share_anew(self, told: Told, step_seconds: float) -> None:
        """Take the shares that rank 0 has sent, from the next step on; it looks for others that would pay."""
        if told.shares:
            self.plan = dataclasses.replace(self.plan, shares=told.shares)
            self.report.shares(told.shares, self.proposed.reason if self.proposed else "")
            self.proposed = None
        if self.balancer is None:
            return
        if told.shares:
            self.balancer.take(told.shares)
        elif self.proposed is None:
            self.balancer.note(told.seconds, step_seconds)
            change = self.balancer.propose()
            if self.run_file.by_speed:
                self.proposed = change
            elif change:
                self.balancer = None  # said once
                self.say(f"Uneven hosts: shares=auto would pay ({change.reason}).", event="shares")

    def _wishes(self, step: int) -> tuple[bool, bool, bool]:
        """Stop, save, trouble: what rank 0 wants of all at the end of step `step`, counted from 1."""
        minutes = (time.monotonic() - self._saved_at) / 60
        by_time = 0 < self.config.save_minutes <= minutes and not self.saver.busy
        save = by_time or _due(step, self.config.save_every) or self.saver.wants_again
        return self.stop_file.exists(), save, self.saver.problem is not None

    @property
    def _saves_on_the_way(self) -> bool:
        return bool(self.config.save_every or self.config.save_minutes)

    def _set_rates(self, step: int) -> tuple[float, float]:
        """Set the rates of a step; returns what all are multiplied by, and what Muon's is then."""
        config, n = self.config, self.plan.num_iterations
        rate = lr_schedule.lr_multiplier(
            step, n, config.warmup_steps, config.warmdown_ratio, config.final_lr_frac
        )
        momentum = lr_schedule.muon_momentum(step, n, config.warmdown_ratio)
        self.optimizer.set_schedule(rate, momentum, lr_schedule.muon_weight_decay(step, n))
        return rate, config.matrix_lr * self.plan.scales.lr * rate

    # -- beside the loop -------------------------------------------------------------------------------

    def _set_pace(self) -> None:
        """Some steps are measured: from now on a collective that takes far longer has failed."""
        if self.place.coordinates:
            self.report.expected_time()
        longest = timedelta(seconds=TIMEOUT_STEPS * max(self.report.durations))
        self.timeout = max(UNMEASURED_TIMEOUT, longest)
        self.group.set_timeout(self.timeout)

    @contextmanager
    def _unhurried(self, phase: str) -> Iterator[None]:
        """In `phase`, ranks may wait for one another longer than a step would let them."""
        self.heartbeat.enter(phase)
        self.group.set_timeout(UNMEASURED_TIMEOUT)
        yield
        self.group.set_timeout(self.timeout)

    def _evaluate(self) -> bool:
        """Evaluate; returns whether no evaluation of this run was better."""
        with self._unhurried("evaluate"):
            bpb, loss = evaluate(
                self.model,
                self.data.val,
                torch.from_numpy(self.data.tokenizer.token_bytes),
                self.config.eval_tokens,
                self.ready.micro_batches[self.place.rank],
                self.group,
                self.plan.shares,
            )
        return self.report.evaluation(bpb, loss)

    def _compare_parameters(self, step: int) -> None:
        """Compare the parameters of all ranks after `step`, once."""
        if self._compared_at == step:
            return
        self._compared_at = step
        found = self.check(step)
        if found and self.place.coordinates:
            self.say(f"warning: {found}", event="digest", level="warning")

    def _save(self, last: bool) -> None:
        """Gather what is shared out; rank 0 writes it, in the background unless it is the `last` one.

        What ranks do not agree on gets into no checkpoint.
        """
        with self._unhurried("checkpoint"):
            if self.config.digest_every:
                self._compare_parameters(self.report.progress.step)
            optim = storage.gather_optimizer(self.group, self.sync, self.optimizer)
            own = self._keep_own()
            if self.place.coordinates:
                meta = self.ready.checkpoint_meta(self.run_file, self.plan, self.report.progress)
                state = storage.State(meta | own, dict(self.model.state_dict()), optim)
                self.saver.save(state, last)
                self._saved_at = time.monotonic()
            if last:
                self._await_last()
        self._note_checkpoint()

    def _await_last(self) -> None:
        """Wait on all ranks for rank 0's disk, in short collectives: a long one would time out."""
        writing = True
        while writing:
            self.saver.wait(WRITE_LOOK_SECONDS)
            writing = bool(self.group.gather_int64(torch.tensor([int(self.saver.busy)])).any())
        self.group.agree(self.saver.problem)

    def _keep_own(self) -> dict[str, Any]:
        """Where ranks differ, each keeps what it has on its own host; the hashes go into meta.json."""
        own = self.sync.own_state()
        if not own:
            return {}
        step, rank, sha256 = self.report.progress.step, self.place.rank, ""
        optim = {} if self.place.coordinates else self.optimizer.state_dict()
        try:
            sha256 = keep_own(self.run_dir, step, rank, own, optim, self.config.keep_checkpoints)
        except OSError as error:
            self.say(
                f"warning: rank {rank}'s own state cannot be kept ({error.strerror}): going on from here, it "
                "would take the coordinator's.",
                level="warning",
            )
        return {"own_sha256": [sha.decode() for sha in self.group.gather_bytes(sha256.encode())]}

    def _note_checkpoint(self) -> None:
        """Outcome and heartbeat name the newest checkpoint that is whole on the disk."""
        if self.saver.saved is not None:
            path = self.saver.saved.relative_to(self.run_dir).as_posix()
            if path != self.report.progress.checkpoint:
                self.report.progress.checkpoint = path
                self.report.checkpoint(self.run_dir)
        self.report.warn(self.saver.shortage)
        self.report.stand()

    def _write_sample(self) -> None:
        """Continue a prompt; the other ranks wait, if they must, in their next collective."""
        self.heartbeat.enter("evaluate")
        try:
            self.report.sample(sample.write(self.model, self.data.tokenizer, self.run_dir))
        except OSError as error:
            if not is_full(error):
                raise
            self.say("warning: the disk has no room for a sample of text.", level="warning")

    def _part(self) -> None:
        self.heartbeat.enter("done")
        self.group.close()

    @contextmanager
    def telling_where(self) -> Iterator[None]:
        """Find out why a peer was lost, and where; tell the others an end; complete a checkpoint."""
        try:
            try:
                yield
            except PeerLost as error:
                end = self._why(error)
                self.watchdog.ends(end)
                raise self._complete(end, math.inf) from None
        except Exception as error:
            outcome, reason, _ = conclude(error)
            self.watchdog.ends({"final": Final, "stopped": Stopped}.get(outcome, Retryable)(reason))
            raise
        finally:
            self._complete_write()

    def _why(self, error: PeerLost) -> RunEnd:
        place = where(self.heartbeat.told())
        end = self.watchdog.why(error)
        return Retryable(f"In {place}: {end}") if end.outcome == "retryable" else end

    def _complete(self, end: RunEnd, seconds: float) -> RunEnd:
        """Wait for a checkpoint that is being written; returns how the attempt ends then.

        A stop that all ranks have agreed on stays one, though a peer is lost while they save.
        """
        self._complete_write(seconds)
        return self._stopped() if self.stops and end.outcome == "retryable" else end

    def _complete_write(self, seconds: float = math.inf) -> None:
        """Wait for a checkpoint that is being written, as long as a slow disk takes, or `seconds`."""
        self.saver.wait(seconds)
        self._note_checkpoint()


def _due(step: int, every: int) -> bool:
    """Whether something done every so many steps is due after `step` of them; 0: never."""
    return bool(every) and step % every == 0


def train(
    run_file: RunFile,
    data_dir: Path,
    run_dir: Path,
    place: Place,
    attempt: Attempt,
    say: Voice,
    tracker_uri: str = "",
) -> str:
    """Train; returns the closing sentence or raises RunEnd, ConfigError or DataError with it."""
    run = Run(run_file, data_dir, run_dir, place, attempt, say)
    try:
        with run.telling_where():
            return run.go(tracker_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))
    finally:
        run.watchdog.stop()
