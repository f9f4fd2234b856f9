"""Setup of a rank of an elastic run, at its start and after each change of the members."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import compatibility, exchange, storage
from trainer.checkpoint.storage import State, TrainState
from trainer.config import ConfigError
from trainer.data.dataset import Dataset
from trainer.data.loader import equal_split
from trainer.distributed.consistency import Record
from trainer.distributed.process_group import CPU, Collectives, Peer, PeerLost
from trainer.elastic import prefetch, reshard
from trainer.elastic.candidacy import Candidacy
from trainer.elastic.keys import View
from trainer.elastic.membership import Membership, lost_store
from trainer.elastic.snapshot import Copy, state_of
from trainer.eval.core_bundle import Bundle
from trainer.host.logger import fields
from trainer.host.numerics import Numerics, Options
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW
from trainer.outcome import Retryable
from trainer.placement import decide
from trainer.placement.batch_split import split_rows
from trainer.placement.decide import Placement
from trainer.run_plan import Plan
from trainer.setup import RunSetup
from trainer.sync.local import Local

CONNECT_TIMEOUT = timedelta(seconds=1.5)  # Gloo gives up connecting after five times that


@dataclass
class Kept:
    """The state of a rank with sync=local, kept when the coordinator is lost, to continue under the next one.

    meta: content of meta.json for a checkpoint of the rank's last step. model, optimizer, sync: of this rank.
    """

    meta: dict[str, Any]
    model: GPT
    optimizer: MuonAdamW
    sync: Local

    def state(self) -> State:
        """The state that all ranks have in common, in the form of a checkpoint; no unfinished sync round.

        Its tensors are those of the model, the optimizer and the sync mode, not copies.
        """
        optim = {name: dict(tensors) for name, tensors in self.optimizer.state_dict().items()}
        exchange.add_common_state(optim, self.sync.state_without_rounds())
        with self.sync.shared_parameters():
            return State(dict(self.meta), dict(self.model.state_dict()), optim)

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return int(self.meta["step"])

    @property
    def term(self) -> int:
        """The number of the last term in which this rank was a member."""
        return int(self.meta["terms"][-1][0])


@dataclass(frozen=True)
class Inputs:
    """The data and measurements of this host that a setup passes to the next setup in the same process.

    To read the data again would take 0.7 s per GB, and longer from a disk, because its sha256 is verified.
    The fields are attributes of RunSetup. data: rows and tokenizer. core: the CORE bundle; None if CORE is
    not evaluated. options: the devices on which this rank can compute.
    """

    data: Dataset
    core: Bundle | None
    options: Options


class ElasticSetup(RunSetup):
    """Sets up a rank of an elastic run, whose ranks agree on the members of the run before they connect.

    Set before `run`, besides the attributes of RunSetup:
    end_process: function that ends this process from another thread than the training thread. It must be set.
    candidacy: the elections, with coordinator_failover; else None.
    held: in a change of the members and after an election, what this rank has of the state from which the
        members continue.
    copy: after an election, the copy of the state in the memory of this rank; else None. `run` sets it to
        None if the run does not continue from it.
    kept: with sync=local, what this rank continues from after an election; else None. `run` sets it to None.
    wait_for_checkpoint: after an election, function that waits until this process has written the state of
        the last term as a checkpoint; else None.
    Set by `run`:
    membership: the members as this rank sees them, once the rendezvous store is open; None before.
    terms: a list [term, step after which the term began] for each term of the run. It exists only with
        coordinator_failover.
    """

    membership: Membership | None = None
    end_process: Callable[[Retryable], None]
    candidacy: Candidacy | None = None
    copy: Copy | None = None
    kept: Kept | None = None
    wait_for_checkpoint: Callable[[], object] | None = None
    terms: list[list[int]]
    held = reshard.Held()
    _offers: Sequence[reshard.Held] = ()  # what each member has, if that is the whole state
    _is_new = True  # whether this rank has not taken part yet
    _kept_term: int | None = None  # term of what this rank has kept, until the coordinator's is known

    @property
    def inputs(self) -> Inputs:
        """What `run` has read and measured on this host."""
        assert self.options is not None
        return Inputs(self.data, self.core, self.options)

    def take_over(self, inputs: Inputs) -> None:
        """Use the inputs of the last setup in this process. Call it before `run`."""
        self.data, self.core, self.options = inputs.data, inputs.core, inputs.options

    def open_data(self) -> Dataset:
        return self.data if hasattr(self, "data") else super().open_data()

    def _open_store(self) -> dist.Store:
        self.membership = Membership(
            self.env, self.run_file.run_id, self.log, self.end_process, self.candidacy
        )
        return self.membership.store

    def _find_ranks(self, record: Record) -> list[Record]:
        """Join the run; returns the records of its members. The coordinator has compared them."""
        if self.config.sync == "local" and not (self.env.is_coordinator or self.kept or record.problem):
            self._fetch()
        continues = self.env.is_coordinator and (self.copy or self.kept)
        kind = "cpu" if continues else ""
        try:
            view = self.joined.join(record, self.config.min_hosts, self.watchdog.is_alive, kind)
        except RuntimeError as error:
            raise lost_store(error) from None
        return [member.record for member in view.members]

    def _load_and_check(self, options: Options) -> list[Record]:
        self.numerics = options.cpu
        return super()._load_and_check(options)

    def _fetch(self) -> None:
        """With sync=local, receive the shared state while the others train, before this rank joins them."""
        try:
            store = self.joined.fetch()
        except RuntimeError as error:
            raise lost_store(error) from None
        if store is None:
            return
        self._build()
        self.placement, self.group = Placement("local", tuple(self.plan.shares)), Collectives(RankEnv(), [])
        self.sync = self.make_sync()
        assert isinstance(self.sync, Local)
        try:
            megabytes = prefetch.receive_state(store, self.sync, self.optimizer)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self.log.warning(
                f"This rank did not receive the shared state in advance ({reason}). It receives the state "
                "when it joins, and the other ranks wait meanwhile. No action is needed."
            )
            return
        self._is_new = False
        self.log.info(f"Received {megabytes:,.0f} MB from the coordinator; joining the run.")

    def _decide_kind(self, kind: str) -> str:
        return self.joined.decide_kind(kind)

    @property
    def joined(self) -> Membership:
        """The attribute `membership`. Use it only when the rendezvous store is open."""
        assert self.membership is not None
        return self.membership

    def _begin(self, records: list[Record], gpu: Numerics | None) -> None:
        kept, self.kept = self.kept, None
        if self.joined.is_first:
            del kept
            self.copy, self.held = None, reshard.Held()
            self.plan = dataclasses.replace(self.plan, shares=self._shares_of(self.joined.view))
            super()._begin(records, gpu)
            self._is_new = False
            return
        # This rank joins a run that trains, or continues one from its memory.
        meta = kept.meta if kept else {}
        if kept:
            self.model, self.optimizer, self.sync = kept.model, kept.optimizer, kept.sync
            self._is_new, self._kept_term = False, kept.term
            del kept
        try:
            self.connect_members(
                self.joined.view, lambda: State(meta, {}, {}) if meta else state_of(self.copy)
            )
        except PeerLost as error:
            raise PeerLost(self.joined.why_broken_off() or str(error)) from None
        if self.held.step < 0:  # the run does not continue from this copy
            self.copy = None
        self.held = reshard.Held()
        if self.env.is_coordinator and (self.copy or meta):
            step = self.train_state.step
            text = f"Continuing from the copy of step {step} in the memory of this host."
            self.log.info(text, extra=fields("continued", step=step))

    def _resume(self, state: State) -> None:
        if isinstance(self.sync, Local) and not self.joined.is_first:
            self._regroup(self.sync, state)
        elif self._offers:
            optim = reshard.reshard(self.group, self._offers, self.held, self.model, self.sync)
            self.optimizer.load_state_dict(optim, assign=not self.held.is_copy)
            self.sync.load(state.step, {}, {})
            self.train_state = TrainState.from_meta(state.meta)
        else:
            super()._resume(state)
        if self.candidacy:
            term, terms = self.candidacy.election.term, list(state.meta.get("terms", []))
            began = [term, self.train_state.step]
            self.terms = terms if terms and terms[-1][0] == term else [*terms, began]
            self._set_aside_replaced()

    def _regroup(self, sync: Local, state: State) -> None:
        """With sync=local, send the shared state to new ranks; the others continue from their own parameters.

        state: its meta is that of the last step of rank 0; it has no tensors.
        """
        if self._kept_term not in (None, int((state.meta.get("terms") or [[0]])[-1][0])):
            self._is_new = True
            self.log.info(
                "The other ranks have trained under a coordinator that was elected while this rank was away. "
                "This rank continues from their state. No action is needed."
            )
        self._kept_term = None
        is_new = self.group.gather_int64(torch.tensor([int(self._is_new)])).flatten().tolist()
        step = sync.regroup(self.group, state.step, self._is_new, self.plan.num_iterations - 1)
        exchange.send_optimizer(self.group, self.optimizer, [rank for rank, new in enumerate(is_new) if new])
        self._is_new = False
        self.train_state = dataclasses.replace(TrainState.from_meta(state.meta), step=step)

    def checkpoint_meta(self, plan: Plan, state: TrainState) -> dict[str, Any]:
        meta = super().checkpoint_meta(plan, state)
        return meta | ({"terms": self.terms} if self.candidacy else {})

    def _set_aside_replaced(self) -> None:
        """Rename the checkpoints of this host whose steps were trained again after a later election."""
        for path in storage.checkpoints(self.checkpoints):
            with contextlib.suppress(ConfigError, FileNotFoundError):  # another rank may have renamed it
                terms = storage.read_meta(path, files=()).get("terms") or [[0, 0]]
                began = [step for term, step in self.terms if term > terms[-1][0]]
                aside = path.with_name(f"replaced_{path.name}")
                if began and int(path.name[5:]) > began[0] and not aside.exists():
                    path.rename(aside)
                    self.log.warning(
                        f"{path.name} of this host is not continued: after an election the hosts have "
                        f"continued from step {began[0]}. It is kept as {aside.name}."
                    )

    def _connect(self, records: list[Record]) -> None:
        self._connect_view(self.joined.view)
        if self.wait_for_checkpoint:  # the newest one of all hosts is looked for next
            self.wait_for_checkpoint()

    def connect_members(self, view: View, saved_state: Callable[[], State | None]) -> None:
        """Connect the members of `view`, and set up model, optimizer and sync mode from a state of the run.

        If the members together have the whole state (their attributes `held`), each receives what it lacks.
        Otherwise rank 0 sends the result of `saved_state` to all, or the state of its newest checkpoint if
        the result is None; with sync=local, only new ranks receive the state. The rows of a step are split
        equally, or in proportion to the fixed shares of the members. Raises PeerLost if a member is lost
        meanwhile.
        """
        self.run_status.enter("resume")
        self._connect_view(view)
        self.plan = dataclasses.replace(self.plan, shares=self._shares_of(view))
        if not hasattr(self, "model"):
            self._build()
        state = self._offer_held() if self.config.sync != "local" else None
        if self.env.is_coordinator:
            state = state or saved_state() or self._load_state()
        state = exchange.broadcast_meta(self.group, state)
        steps = compatibility.planned_steps(state.meta, self.config, self.plan.num_iterations)
        self.plan = dataclasses.replace(self.plan, num_iterations=steps)
        placement = Placement("exact" if self.config.sync == "auto" else self.config.sync, ())
        placement = decide.broadcast_placement(self.group, getattr(self, "placement", placement))
        shares = tuple(self.plan.shares)
        self.placement = dataclasses.replace(placement, shares=shares, owner_speeds=(), prediction=None)
        self.model.compute_dtype = self.optimizer.compute_dtype = self.numerics.compute_dtype
        if not hasattr(self, "sync"):
            self.sync = self.make_sync()
        self._resume(state)
        self.config_digest = str(state.meta.get("config_digest") or self.config_digest)
        self._gather_facts([member.record for member in view.members])

    def _offer_held(self) -> State | None:
        """Gather what each member has of the state, and load the parameters of this rank into the model.

        On rank 0, returns a State that has only the meta, if the members together have the whole state; else
        None. If a part of the state is missing, this rank releases what it has of the state.
        """
        self._offers = reshard.gather_offers(self.group, self.held)
        if not reshard.is_complete(self._offers):
            self.held, self._offers = reshard.Held(), []
        elif self._offers[self.group.rank].step >= 0:
            self.held.load_parameters(self.model)
        else:
            self.held = reshard.Held()
        return State(self.held.meta, {}, {}) if self._offers and self.env.is_coordinator else None

    def _connect_view(self, view: View) -> None:
        records = [member.record for member in view.members]
        self.watchdog.set_members(
            [record.peer for record in records], {record.rank: record.endpoint for record in records}
        )
        rank, world_size = view.numbers.index(self.env.rank), len(records)
        peers = [Peer(rank, record.host, record.address) for rank, record in enumerate(records)]
        env = dataclasses.replace(self.env, rank=rank, world_size=world_size)
        name = f"group/{view.generation}"
        self.joined.wait_to_connect()
        self.group = Collectives(env, peers)  # if it cannot be connected, this is the one to be abandoned
        self.group.launch_ranks = list(map(self.env.launch_rank_of, view.numbers))
        self.group.n_launch_ranks = max(self.env.world_size, 1 + max(self.group.launch_ranks))
        self.group.connect(self.joined.store, CPU, name, CONNECT_TIMEOUT)
        self.group.interruption = self.joined.interruption
        self._watch_group()
        self.run_status.update(world_size=world_size)

    def _shares_of(self, view: View) -> list[int]:
        """Rows of each member: equal, or in proportion to the fixed shares of the run file."""
        fixed, rows = self.run_file.fixed_shares, self.plan.rows_per_step
        if not fixed:
            return equal_split(rows, len(view.members))
        launched = [r for r in map(self.env.launch_rank_of, view.numbers) if r < self.env.world_size]
        weights = [fixed[rank] for rank in launched]
        added = len(view.members) - len(launched)
        return split_rows([1 / each for each in [*weights, *added * [statistics.median(fixed)]]], rows)
