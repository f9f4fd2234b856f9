"""Training of one rank of an elastic run: the run continues without a restart when hosts leave and join.

In a change of the members, the ranks that stay and those that join connect again. In an orderly change they
continue from the last step. After a loss they continue from the newest complete copy of the state, by default
about a minute old at most; the steps after this copy are trained again, on the same rows. Each rank receives
the part of the state that it lacks (reshard.py).

With sync=local no copies are needed: each rank continues from its own parameters (trainer/sync/local.py).

With coordinator_failover, the first rank of the next host has the copies too. When the coordinator is lost,
the hosts elect another coordinator, set up their ranks again in the same processes, and continue from its
copy.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainer.checkpoint import storage
from trainer.checkpoint.storage import State, TrainState
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import RunFile
from trainer.distributed.process_group import PeerLost
from trainer.distributed.step_sync import StepReport
from trainer.elastic import failed_backward, prefetch, reshard
from trainer.elastic.candidacy import Candidacy
from trainer.elastic.keys import View
from trainer.elastic.setup import ElasticSetup, Inputs, Kept
from trainer.elastic.snapshot import Copy, Snapshots, held_of, state_of
from trainer.health.attempt import PARENT_SECONDS, Attempt
from trainer.host.logger import RunLogger, fields
from trainer.host.rank_env import RankEnv
from trainer.outcome import Retryable, RunEnd, Stopped, conclude
from trainer.sync.local import Local
from trainer.train import Trainer

# After a loss, the others may still compute the step, and notice the loss when they wait for its sums.
PATIENCE_STEPS = 2
# With coordinator_failover there is a checkpoint at least so often, unless save_minutes is 0.
COPY_MINUTES = 5.0
CALM_SECONDS = 600.0  # so long after a loss, copies are made more often
NO_FILE = -2  # instead of the last step in metrics.jsonl, on ranks that do not write the file


def train_elastic(
    make: Callable[[RankEnv], ElasticTrainer],
    run_file: RunFile,
    run_dir: Path,
    env: RankEnv,
    attempt: Attempt,
    log: RunLogger,
    tracker_uri: str,
) -> str:
    """Run one attempt at an elastic run on this rank; returns a sentence on the results of the finished run.

    With coordinator_failover, the hosts first elect a coordinator, and another one whenever it is lost.
    make: creates the trainer of this rank for its environment, which changes with the coordinator. env: the
    environment of this rank at launch. tracker_uri: address of the MLflow server; "" for none. run_file,
    run_dir, attempt, log: as for Trainer. Raises RunEnd if the attempt ends before the run is finished.
    """
    gc.freeze()  # what is imported: a collection would look through it again, for a fifth of a second
    if not (env.addresses and run_file.config.has_failover(len(env.addresses))):
        return make(env).run(tracker_uri)
    candidacy, last, is_silent = Candidacy(env, run_file, run_dir, log), None, False
    while True:
        env = candidacy.elect(is_silent)
        log.begin(env)
        attempt.begin_as(env)
        trainer = make(env)
        trainer.take_part(candidacy, last)
        try:
            return trainer.run(tracker_uri)
        except MembershipLost as error:
            if not trainer.has_trained:
                raise
            log.warning(f"{error} This rank takes part in the next election.", extra=fields("lost"))
        last, is_silent = trainer.end_term(), trainer.setup.joined.is_store_lost
        del trainer
        gc.collect()  # its groups have threads and sockets


class MembershipLost(Retryable):
    """Raised, with coordinator_failover, if this rank is no longer a member and a new election can help.

    The coordinator is lost or replaced, or continues without this rank.
    """


@dataclass
class LastTerm:
    """What a rank keeps of its last term, the time under one coordinator, for the trainer of the next term.

    Both trainers run in the same process. copy: the newest copy of the state on this rank, or None. kept:
    with sync=local, what this rank continues from; else None. inputs: data and measurements of this host.
    writer: writes `copy` or `kept` as a checkpoint, if this host has no newer checkpoint. train_state:
    progress of the run after the last completed step. ended: when training stopped, as time.monotonic().
    """

    copy: Copy | None
    kept: Kept | None
    inputs: Inputs
    writer: CheckpointWriter
    train_state: TrainState
    ended: float


class ElasticTrainer(Trainer):
    """Runs one attempt at an elastic run on this rank; with coordinator_failover, one term of the attempt.

    setup: sets up this rank, also after each change of the members. copies: copies of the state in memory.
    candidacy: the elections, with coordinator_failover; else None. has_trained: whether this trainer has
    completed a step.
    """

    setup_class = ElasticSetup
    setup: ElasticSetup
    copies: Snapshots
    candidacy: Candidacy | None = None
    has_trained = False
    _last_term: LastTerm | None = None
    _stopped_at = 0.0  # when training stopped for a change of the members, as time.monotonic()
    _lost_at = -math.inf  # when a member was lost, as time.monotonic()
    _patience = 60.0  # seconds for the members to notice a loss; before a step is measured

    def take_part(self, candidacy: Candidacy, last: LastTerm | None) -> None:
        """Prepare to train in the term of the elected coordinator. Only for runs with coordinator_failover.

        Call this before `run`. candidacy: the elections. last: what this process keeps of the last term, the
        time under one coordinator; None if it did not take part in one.
        """
        self.candidacy = self.setup.candidacy = candidacy
        self.setup.tracks_on_all_hosts = True
        self.setup.copies_to = candidacy.first_name  # eval.yml and others look there
        if last is None:
            return
        self._last_term, self.continues, self._lost_at = last, True, last.ended
        self.setup.take_over(last.inputs)
        # If this rank cannot join the others, the outcome and the run status show what it has trained before.
        self.reporter.train_state = last.train_state
        self.reporter.update(loss=last.train_state.loss)
        # A coordinator needs the whole state. Others may have trained since in a term that this host missed:
        # then the newest checkpoint counts.
        state, coordinates = last.copy or last.kept, self.env.is_coordinator
        is_newest = state is not None and state.term == candidacy.election.previous
        is_newest = is_newest and (last.copy is None or last.copy.is_whole)
        self.checkpoint_writer = last.writer
        self.setup.wait_for_checkpoint = last.writer.wait
        # Another rank compares the term of what it has kept, or the view of its copy, with the coordinator's.
        if is_newest or not coordinates:
            self.setup.copy, self.setup.kept, self.setup.held = last.copy, last.kept, held_of(last.copy)
        last.copy = last.kept = None

    def end_term(self) -> LastTerm:
        """End this trainer after MembershipLost; returns the state from which the next trainer continues.

        Starts to write the state as a checkpoint, if this host has no newer checkpoint, and releases memory.
        """
        if self.reporter.tracker:
            self.reporter.tracker.close("retryable", hurry=True)
        kept = None
        if self._is_local and isinstance(self.sync, Local):
            kept = Kept(self._meta_to_continue(), self.model, self.optimizer, self.sync)
        self._release()
        self.run_status.is_waiting = lambda: False  # a thread may still hold the run status
        copy, writer = self.copies.newest, self.checkpoint_writer
        saved = max((int(path.name[5:]) for path in storage.checkpoints(self.setup.checkpoints)), default=0)
        if copy and copy.step < saved:
            copy = None
        if self.env.is_host_leader and kept and kept.step > saved:
            writer.save(kept.state())
        elif self.env.is_host_leader and copy and copy.is_whole and copy.step > saved:
            writer.save_later(copy.step, copy.nbytes, copy.begin_assembly().result)

        def complete(end: RunEnd, seconds: float) -> RunEnd:
            writer.wait(seconds)
            return end

        self.attempt.before_end = complete
        return LastTerm(copy, kept, self.setup.inputs, writer, self.reporter.train_state, self._stopped_at)

    def _set_up(self) -> None:
        attempt, log = self.attempt, self.log  # a thread keeps the function, and must not keep this trainer
        self.setup.end_process = lambda end: attempt.end_process(end, log)
        super()._set_up()
        self.membership = self.setup.joined
        watchdog, grace = self.watchdog, self.config.local_grace
        late = (lambda: watchdog.delaying(grace)) if self._is_local else (lambda: [])
        self.checkpoint_writer.copies_last = self._is_local  # its tensors change if the run continues
        send_state = None
        if isinstance(self.sync, Local) and self.env.is_coordinator:
            send_state = partial(prefetch.send_state, sync=self.sync, optimizer=self.optimizer)
        self.membership.watch(watchdog.status_age, late, self.config.join_grace, send_state)

    def _begin(self) -> None:
        super()._begin()
        newest = self.copies.newest if hasattr(self, "copies") else self.setup.copy
        term = self.candidacy.election.term if self.candidacy else 0
        view, on_all = [term, self.setup.joined.view.generation], self.candidacy is not None
        self.copies = Snapshots(self.group, newest, self._holders(), view, on_all)
        self.setup.copy = None

    def _holders(self) -> list[int]:
        """The ranks that have copies of the whole state.

        They are the coordinator and, with coordinator_failover, the next rank that votes in elections.
        """
        numbers = self.setup.joined.view.numbers
        found = [rank for rank, number in enumerate(numbers) if number in self.env.voting]
        return found[: 2 if self.candidacy else 1]

    def train(self) -> bool:
        """Train to the last step, with changing members. Returns True if the run was stopped earlier."""
        self._saved_at = time.monotonic()
        self.run_status.lap()
        self._continue()
        if self._last_term:
            self._report_change(self._last_term.train_state.step, self._last_term.ended)
        elif not self.membership.is_first:
            self._report_members()
        while (step := self.reporter.train_state.step) < self.plan.num_iterations:
            lost = ""
            try:
                self.train_step(step)
                self.has_trained = True
                if self.stopping:
                    return True
                if self.summary.snapshot:
                    self._start_copy()
                self._save_copy()
                if self.summary.change and step + 1 < self.plan.num_iterations:
                    self._change_members(self._prepare_change())
            except PeerLost as error:
                lost = str(error)
            if lost:  # not above, where the traceback of the error still keeps the model of the failed step
                self._recover(lost)
        return False

    def _continue(self) -> None:
        """Read the batch of the next step; after a loss at this point, agree on the members again."""
        try:
            self._read_first_batch(self.reporter.train_state.step)
        except PeerLost as error:
            self._recover(str(error))

    def _read_first_batch(self, step: int) -> None:
        """Update metrics.jsonl to `step`, and read the batch of that step as in every run.

        Lines of steps that are trained again are deleted. With coordinator_failover each host has the file,
        and receives the lines that its file lacks.
        """
        tracker = self.reporter.tracker
        if tracker:
            tracker.drop_after(step)
        if self.candidacy:
            own = torch.tensor([tracker.last_step if tracker else NO_FILE])
            found = self.group.gather_int64(own).flatten().tolist()
            last = [each for each in found if each != NO_FILE]
            source = found.index(max(last))
            lines = tracker.lines_from(min(last)) if tracker and source == self.group.rank else b""
            size = int(self.group.gather_int64(torch.tensor([len(lines)])).max())
            sent = torch.zeros(size, dtype=torch.uint8)
            if lines:
                sent = torch.frombuffer(bytearray(lines), dtype=torch.uint8)
            self.group.broadcast_owned({source: sent} if size else {})
            if tracker and source != self.group.rank:
                tracker.take_lines(sent.numpy().tobytes())
        super()._read_first_batch(step)

    def _step_report(self, loss_sum: float, seconds: float, step: int) -> StepReport:
        report = super()._step_report(loss_sum, seconds, step)
        copies, wanted = self.copies, self.env.is_coordinator and self.group.world_size > 1
        wanted = wanted and not self._is_local
        is_calm = time.monotonic() - self._lost_at > CALM_SECONDS
        seconds = self.config.snapshot_seconds or copies.interval(is_calm)
        due = wanted and copies.age >= seconds and not copies.is_busy
        return dataclasses.replace(report, change=self.membership.wants_change, snapshot=due)

    def _start_copy(self) -> None:
        """Start to copy the state after this step to the ranks that hold copies."""
        step, meta = self.reporter.train_state.step, {}
        self.run_status.enter("checkpoint")
        if self.env.is_coordinator:
            meta = self.setup.checkpoint_meta(self.plan, self.reporter.train_state)
        self.copies.start(step, self.model, self.sync, self.optimizer, meta)
        if self.env.is_coordinator:
            pause, size = self.copies.pause, self.copies.megabytes
            text = f"Copying the state of step {step}, {size:,.0f} MB; training paused {pause:.2f} s for it."
            self.log.info(text, extra=fields("copy", step=step, pause=pause, megabytes=size))

    @property
    def save_minutes(self) -> float:
        """Minutes between checkpoints, as in every run; 0 if they are written from copies instead."""
        return 0.0 if self._saves_copies else super().save_minutes

    @property
    def _saves_copies(self) -> bool:
        """Whether checkpoints that are due by time are written from a copy of the state.

        True with coordinator_failover and several ranks, unless sync=local: if all ranks with the whole state
        are lost, the run continues from a checkpoint. A checkpoint that is written from a copy does not pause
        training, so it can be written every few minutes.
        """
        return self.candidacy is not None and self.group.world_size > 1 and not self._is_local

    @property
    def _is_local(self) -> bool:
        """Whether each rank continues from its own parameters after a change of the members."""
        return self.config.sync == "local"

    def _save_copy(self) -> None:
        """On the coordinator, write the newest complete copy of the state as a checkpoint, if one is due."""
        minutes, newest = min(self.config.save_minutes, COPY_MINUTES), self.copies.newest
        is_due = 0 < minutes <= (time.monotonic() - self._saved_at) / 60
        if not (is_due and newest and self._saves_copies and self.env.is_coordinator):
            return
        saved = self.reporter.train_state.checkpoint or "step_0"
        if newest.step > int(saved.rpartition("_")[2]) and not self.checkpoint_writer.busy:
            copy = self.copies.lend()
            self.checkpoint_writer.save_later(copy.step, copy.nbytes, copy.assemble)
            self._saved_at = time.monotonic()

    # -- changes of the members ------------------------------------------------------------------------

    def _recover(self, reason: str) -> None:
        """After a loss, leave the collectives, inform the other members, and continue with those that remain.

        reason: the cause of the loss, a sentence.
        """
        self.log.warning(reason, extra=fields("lost member", step=self.reporter.train_state.step))
        self.membership.break_off(reason)
        self._lost_at = time.monotonic()
        self._change_members()

    def _prepare_change(self) -> list[int]:
        """Before an orderly change, send the state of leaving ranks to the ranks that stay.

        Returns the ranks that leave. All ranks call it after the same step. If rank 0 leaves, a copy of the
        state is completed instead. With sync=local, no state is sent.
        """
        self._stopped_at = time.monotonic()
        self.run_status.enter("resume")
        membership, rank = self.membership, self.group.rank
        ends = membership.is_leaving or (rank == 0 and membership.is_superseded)
        leaving = self.group.gather_int64(torch.tensor([int(ends)])).flatten().nonzero().flatten().tolist()
        if self._is_local:
            return leaving
        if 0 in leaving:  # the next coordinator continues from a copy
            self._start_copy()
            self.copies.finish()
            self.group.gather_int64(torch.tensor([0]))  # until all have it: rank 0 may end now
            return leaving
        step, meta = self.reporter.train_state.step, {}
        if rank == 0:
            meta = self.setup.checkpoint_meta(self.plan, self.reporter.train_state)
        held = reshard.hold(rank, step, self.model, self.sync, self.optimizer, meta)
        self.setup.held = reshard.hand_over(self.group, held, leaving)
        return leaving

    def _change_members(self, leaving: Collection[int] | None = None) -> None:
        """Agree on the next members, connect them, and continue.

        leaving: in an orderly change, the ranks that leave; None after a loss.
        """
        before = self.reporter.train_state
        if leaving is None:
            self._stopped_at = time.monotonic()
        if self.reporter.durations:
            self._patience = PATIENCE_STEPS * max(self.reporter.durations)
        while True:
            self.setup.group.abandon()  # that of the last view, even if it was not connected completely
            self.copies.stop()
            self.checkpoint_copies.stop()
            if self.membership.is_leaving and (leaving is None or self.group.rank in leaving):
                self._leave()
            copy = self.copies.newest
            needs_copy = not self._is_local and (self.setup.held.step < 0 or self.setup.held.is_copy)
            if not self._is_local:
                self._release()
            if needs_copy:
                self.setup.held = reshard.Held()
                if copy and copy.is_whole:
                    copy.begin_assembly()  # while the members agree
            try:
                view = self._next_view(leaving)
                if needs_copy:
                    self.setup.held = held_of(copy)
                self.setup.connect_members(view, self._saved_state)
                self._begin()
                self.reporter.train_state.checkpoint = before.checkpoint
                self._read_first_batch(self.reporter.train_state.step)
                self.membership.end_join()
                break
            except PeerLost as error:
                self.membership.break_off(str(error))
            leaving = None
        self.setup.held = reshard.Held()
        self.run_status.lap()  # the seconds of the change are not those of the next step
        self._report_change(before.step, self._stopped_at)

    def _saved_state(self) -> State | None:
        """On the coordinator, the state to continue from if the members together lack a part of the state.

        None if there is no copy of the state. With sync=local, a State with only the meta.
        """
        if self._is_local:
            return State(self._meta_to_continue(), {}, {})
        return state_of(self.copies.newest)

    def _meta_to_continue(self) -> dict[str, Any]:
        """With sync=local, the content of meta.json from which this rank continues: that of its last step.

        After the last step of the run it is that of the step before: the last step is then trained again,
        because the evaluation and the checkpoint at the end follow it.
        """
        state = self.reporter.train_state
        state = dataclasses.replace(state, step=min(state.step, self.plan.num_iterations - 1))
        return self.setup.checkpoint_meta(self.plan, state)

    def _report_change(self, reached: int, stopped_at: float) -> None:
        """Report the members that train now, and the duration of the change.

        reached: the number of completed steps before the change. stopped_at: when training stopped, a time of
        time.monotonic().
        """
        step, seconds = self.reporter.train_state.step, time.monotonic() - stopped_at
        megabytes = self.group.bytes_sent / 1e6  # the group has been connected since
        self._report_members()
        again = f" {reached - step} step(s) are trained again." if reached > step else ""
        self.log.info(
            f"The ranks continue after step {step}, {seconds:.1f} s after they stopped; this rank has sent "
            f"{megabytes:,.1f} MB.{again}",
            extra=fields("members changed", step=step, reached=reached, seconds=seconds, megabytes=megabytes),
        )

    def _report_members(self) -> None:
        self.reporter.members(len({peer.host for peer in self.group.peers}), len(self.group.peers))

    def _next_view(self, leaving: Collection[int] | None) -> View:
        try:
            return self.membership.change(self._patience, leaving)
        except Retryable as error:
            if self.candidacy is None:
                raise
            if self.membership.is_leaving:  # the coordinator, on the same host, has left before this rank
                self._leave()
            self.watchdog.close()
            raise MembershipLost(str(error)) from None

    def _release(self) -> None:
        """Drop model, optimizer and sync mode, so that the next ones do not need memory beside them."""
        for owner in (self, self.setup):
            for name in ("model", "optimizer", "sync", "parameter_check"):
                if hasattr(owner, name):
                    delattr(owner, name)
        failed_backward.free()
        gc.collect()  # they refer to each other

    def _leave(self) -> NoReturn:
        """Allow the thread that received SIGTERM to end this process, and wait for that end.

        Call this when the other ranks can continue without this rank.
        """
        self.membership.left.set()
        while True:
            time.sleep(PARENT_SECONDS)

    # -- the end ---------------------------------------------------------------------------------------

    def _complete(self, end: RunEnd, seconds: float) -> RunEnd:
        """As in every run. On SIGTERM, also wait until the other ranks can continue without this rank."""
        until = time.monotonic() + seconds
        end = super()._complete(end, seconds)
        membership = self.setup.membership
        is_asked = isinstance(end, Stopped) and not self.stopping and math.isfinite(seconds)
        if membership and is_asked and membership.leave(max(0.0, until - time.monotonic())):
            self.attempt.left = "The other hosts continue the run without this one."
        return end

    def run(self, tracker_uri: str = "") -> str:
        outcome = "finished"
        try:
            reason = super().run(tracker_uri)
        except BaseException as error:  # also an interrupt from the keyboard
            outcome, reason, _ = conclude(error)
            raise
        finally:
            if self.setup.membership:
                self.setup.membership.stop()
                self.setup.membership.end(outcome, reason)
        return reason
