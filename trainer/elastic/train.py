"""Training of one rank of an elastic run: it continues when hosts leave and join, without a restart.

After a step, the members that stay and those that join connect again and continue from a copy of the state
on the coordinator. In an orderly change the copy is of that step, so nothing is lost. After a loss it is the
newest one, at most `snapshot_seconds` old; the steps since then are trained again, on the same rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import NoReturn, Self

import torch

from trainer.config import RunFile
from trainer.distributed.process_group import PeerLost
from trainer.distributed.step_sync import StepReport
from trainer.elastic.candidacy import Candidacy
from trainer.elastic.setup import ElasticSetup
from trainer.elastic.snapshot import Snapshots, state_of
from trainer.health.attempt import PARENT_SECONDS, Attempt
from trainer.host.logger import RunLogger, fields
from trainer.host.rank_env import RankEnv
from trainer.outcome import RunEnd, Stopped, conclude
from trainer.train import Trainer

# After a loss, the others may still compute the step, and notice the loss when they wait for its sums.
PATIENCE_STEPS = 2
POLL_SECONDS = 0.05
# With coordinator_failover there is a checkpoint at least so often, unless save_minutes is 0.
COPY_MINUTES = 5.0


class ElasticTrainer(Trainer):
    """Runs one attempt at an elastic run on this rank.

    setup: sets up this rank, after each change of the members too. copies: copies of the state in the memory
    of the coordinator. candidacy: the elections, with coordinator_failover; else None.
    """

    setup_class = ElasticSetup
    setup: ElasticSetup
    copies: Snapshots
    candidacy: Candidacy | None = None
    _asks_to_save = False
    _patience = 60.0  # seconds for the members to notice a loss; before a step is measured

    @classmethod
    def create(
        cls,
        run_file: RunFile,
        data_dir: Path,
        run_dir: Path,
        env: RankEnv,
        attempt: Attempt,
        log: RunLogger,
        from_checkpoint: Path | None = None,
    ) -> Self:
        """The trainer of this rank.

        With coordinator_failover, first waits until the hosts have elected a coordinator. Arguments: as for
        Trainer.
        """
        candidacy = None
        if env.addresses and run_file.config.has_failover(len(env.addresses), env.local_world_size):
            candidacy = Candidacy(env, run_file, run_dir, log)
            env = candidacy.elect()
            log.begin(env)
            attempt.begin_as(env)
        trainer = super().create(run_file, data_dir, run_dir, env, attempt, log, from_checkpoint)
        trainer.setup.end_process = lambda end: attempt.end_process(end, log)
        trainer.candidacy = trainer.setup.candidacy = candidacy
        if candidacy:
            trainer.setup.tracks_on_all_hosts = True
            trainer.setup.copies_to = candidacy.first_name  # eval.yml and others look there
        return trainer

    def _set_up(self) -> None:
        super()._set_up()
        self.membership = self.setup.joined
        self.membership.watch(self.watchdog.status_age)

    def _begin(self) -> None:
        super()._begin()
        newest = self.copies.newest if hasattr(self, "copies") else None
        self.copies = Snapshots(self.group, newest)

    def train(self) -> bool:
        """Train to the last step, with changing members. Returns True if the run was stopped before it."""
        self._saved_at = time.monotonic()
        self.run_status.lap()
        self._continue()
        while (step := self.reporter.train_state.step) < self.plan.num_iterations:
            try:
                self.train_step(step)
                if self.stopping:
                    return True
                if self.summary.change or self.summary.snapshot:
                    self._start_copy()
                self._save_copy()
                if self.summary.change:
                    self.copies.finish()
                    self._change_members()
            except PeerLost as error:
                self._recover(str(error))
        return False

    def _continue(self) -> None:
        """Read the batch of the next step; after a loss at this point, agree on the members again."""
        try:
            self._read_first_batch(self.reporter.train_state.step)
        except PeerLost as error:
            self._recover(str(error))

    def _read_first_batch(self, step: int) -> None:
        """As in every run; with coordinator_failover the hosts first complete their metrics.jsonl."""
        tracker = self.reporter.tracker
        if self.candidacy and tracker:
            last = self.group.gather_int64(torch.tensor([tracker.last_step])).flatten().tolist()
            source = last.index(max(last))
            lines = tracker.lines_after(min(last)) if source == self.group.rank else b""
            tracker.add_lines(self.group.gather_bytes(lines)[source], step)
        super()._read_first_batch(step)

    def _step_report(self, loss_sum: float, seconds: float, step: int) -> StepReport:
        report = super()._step_report(loss_sum, seconds, step)
        copies, wanted = self.copies, self.env.is_coordinator and self.group.world_size > 1
        due = wanted and copies.age >= self.config.snapshot_seconds and not copies.is_busy
        save, self._asks_to_save = report.save or self._asks_to_save, False
        return dataclasses.replace(report, change=self.membership.wants_change, snapshot=due, save=save)

    def _start_copy(self) -> None:
        """Start to copy the state after this step to the coordinator."""
        step, meta = self.reporter.train_state.step, {}
        self.run_status.enter("checkpoint")
        if self.env.is_coordinator:
            meta = self.setup.checkpoint_meta(self.plan, self.reporter.train_state)
        self.copies.start(self.model.state_dict(), self.sync, self.optimizer, meta)
        if self.env.is_coordinator:
            pause, size = self.copies.pause, self.copies.megabytes
            text = f"Copying the state of step {step}, {size:,.0f} MB; training paused {pause:.2f} s for it."
            self.log.info(text, extra=fields("copy", step=step, pause=pause, megabytes=size))

    @property
    def save_minutes(self) -> float:
        """As in every run; where copies are saved instead, 0."""
        return 0.0 if self._saves_copies else super().save_minutes

    @property
    def _saves_copies(self) -> bool:
        """Whether checkpoints that are due by time are written from a copy of the state.

        So it is in a run with failover: with its coordinator the steps since the newest checkpoint are lost.
        Such a checkpoint does not pause the training, so that there can be one every few minutes.
        """
        return self.candidacy is not None and self.group.world_size > 1

    def _save_copy(self) -> None:
        """On the coordinator, write the newest complete copy of the state as a checkpoint, if one is due."""
        minutes, copy = min(self.config.save_minutes, COPY_MINUTES), self.copies.newest
        is_due = 0 < minutes <= (time.monotonic() - self._saved_at) / 60
        if not (is_due and copy and self._saves_copies and self.env.is_coordinator):
            return
        newest = self.reporter.train_state.checkpoint or "step_0"
        state = None if self.checkpoint_writer.busy else state_of(copy)
        if state and state.step > int(newest.rpartition("_")[2]):
            self.checkpoint_writer.save(state)
            self._saved_at = time.monotonic()

    # -- changes of the members ------------------------------------------------------------------------

    def _recover(self, reason: str) -> None:
        """After a loss: leave the collectives, tell the others, and continue with those that are left."""
        self.log.warning(reason, extra=fields("lost member", step=self.reporter.train_state.step))
        self.membership.break_off(reason)
        self._change_members()

    def _change_members(self) -> None:
        """Agree on the next members, connect them, and continue from the snapshot."""
        began, before = time.monotonic(), self.reporter.train_state
        self._patience = PATIENCE_STEPS * max(self.reporter.durations, default=self._patience)
        reached = before.step
        while True:
            self.copies.stop()
            self.setup.group.abandon()  # that of the last view, even if it was not connected completely
            self.checkpoint_copies.stop()
            if self.membership.is_leaving:
                self._leave()
            try:
                view = self.membership.change(self._patience)
                self._release()
                self.setup.connect_members(view, state_of(self.copies.newest))
                self._begin()
                self.reporter.train_state.checkpoint = before.checkpoint
                self._read_first_batch(self.reporter.train_state.step)
                break
            except PeerLost as error:
                self.membership.break_off(str(error))
        step, seconds = self.reporter.train_state.step, time.monotonic() - began
        self.reporter.members(len({peer.host for peer in self.group.peers}), len(self.group.peers))
        again = f" {reached - step} step(s) are trained again." if reached > step else ""
        self.log.info(
            f"The ranks continue after step {step}, {seconds:.1f} s after they stopped.{again}",
            extra=fields("members changed", step=step, reached=reached, seconds=seconds),
        )

    def _release(self) -> None:
        """Drop model, optimizer and sync mode, so that the next ones do not need memory beside them."""
        for owner in (self, self.setup):
            for name in ("model", "optimizer", "sync", "parameter_check"):
                if hasattr(owner, name):
                    delattr(owner, name)

    def _leave(self) -> NoReturn:
        """The others have the state of this rank. The thread that received SIGTERM ends the process."""
        self.membership.left.set()
        while True:
            time.sleep(PARENT_SECONDS)

    # -- the end ---------------------------------------------------------------------------------------

    def _complete(self, end: RunEnd, seconds: float) -> RunEnd:
        """On SIGTERM, end after the current step; the others continue. Otherwise as in every run."""
        end = super()._complete(end, seconds)
        membership = self.setup.membership
        is_asked = isinstance(end, Stopped) and not self.stopping and math.isfinite(seconds)
        if membership and is_asked and (membership.leave(seconds) or self._hand_over(seconds)):
            self.attempt.left = "The other hosts continue the run without this one."
        return end

    def _hand_over(self, seconds: float) -> bool:
        """On the coordinator of a run with failover: save and copy a checkpoint, from which others continue.

        Called on the thread that received SIGTERM. Returns whether that was done within `seconds`.
        """
        if self.candidacy is None or not self.env.is_coordinator or self.group.world_size == 1:
            return False
        began, step = time.monotonic(), self.reporter.train_state.step
        self._asks_to_save = True
        while time.monotonic() - began < seconds:
            newest = self.reporter.train_state.checkpoint
            if newest and int(newest.rpartition("_")[2]) > step and self.checkpoint_copies.has_copy(newest):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def run(self, tracker_uri: str = "") -> str:
        outcome = "finished"
        try:
            reason = super().run(tracker_uri)
        except Exception as error:
            outcome, reason, _ = conclude(error)
            raise
        finally:
            if self.setup.membership:
                self.setup.membership.stop()
                self.setup.membership.end(outcome, reason)
        return reason
