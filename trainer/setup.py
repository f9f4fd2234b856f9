"""Setup of a rank before step 0: data, rendezvous, consistency check, device, model, placement, resume.

setup = RunSetup(run_file, data_dir, run_dir, env, run_status, watchdog, log)
setup.run()                             # then setup.model, setup.plan, ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import compatibility, exchange, fine_tuning, storage
from trainer.checkpoint.copies import fetch_newer
from trainer.checkpoint.rank_state import load_rank_state
from trainer.checkpoint.storage import State, TrainState
from trainer.code_digest import code_digest
from trainer.config import ConfigError, RunFile
from trainer.data import DataError
from trainer.data.dataset import Dataset
from trainer.data.files import write_whole
from trainer.distributed import consistency
from trainer.distributed.process_group import Collectives
from trainer.distributed.rendezvous import join_store
from trainer.eval.core_bundle import HOW_TO_GET, Bundle, read_bundle
from trainer.eval.parts import BUNDLE
from trainer.formatting import counted
from trainer.health.attempt_history import was_requested
from trainer.health.run_status import RunStatus
from trainer.health.watchdog import Watchdog
from trainer.host.cores import usable_cores
from trainer.host.logger import RunLogger, fields
from trainer.host.numerics import Numerics, Options, decide_device, explore, restore_numerics
from trainer.host.rank_env import RankEnv
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW, build_optimizer
from trainer.placement import decide
from trainer.placement.decide import Placement
from trainer.placement.rank_threads import bind_threads
from trainer.placement.single_host import find_obstacles
from trainer.run_plan import Plan, describe_plan, make_plan
from trainer.sync.fragment import Outer
from trainer.sync.mode import SyncMode
from trainer.sync.modes import make_sync
from trainer.tracking.reporter import StepCost
from trainer.tracking.tags import facts_of
from trainer.tracking.tracker import Tracker

PREDICTION = "prediction.txt"


class RunSetup:
    """Sets up one rank for step 0, or for the step after the checkpoint that it resumes from.

    run_file: the run file. data_dir: the data directory. run_dir: the run directory, with the folder
    checkpoints. env: environment of this rank. run_status, watchdog, log: those of this rank.
    Set before `run`:
    predicts: whether speeds are measured and steps predicted even if neither shares nor sync is auto. Nothing
        is measured if the placement is restored from a checkpoint.
    chooses_library: whether the faster library computes float32 GEMMs, else torch's default.
    trains: whether the ranks train after the setup.
    evaluates_core: whether the ranks evaluate CORE if core_metric_every is set.
    copies_to: name of the host that is chosen first to keep copies of checkpoints; "": hosts in rank order.
    tracks_on_all_hosts: whether each host writes metrics.jsonl, because it may become the coordinator.
    from_checkpoint: on rank 0, the checkpoint that a run of stage sft begins with.
    Set by `run`, for the training loop:
    plan: plan of the run, with the batch split at the first step. data: rows and tokenizer.
    core: tasks of CORE, if they are evaluated; else None. options: the devices that this rank can use.
    group: the collectives of the connected ranks.
    numerics: device, number formats and threads of this rank.
    model, optimizer, sync: the model, its optimizer and the sync mode.
    train_state: progress of the run. placement: how the ranks divide the work.
    micro_batches: rows of a micro-batch, by rank.
    config_digest: digest of the settings, as computed by the release that started the run.
    numerics_by_rank: result of `Numerics.saved` of each rank.
    facts_by_rank: {fact: text} about the host and the arithmetic of each rank, for the tracker.
    gemm_rate: sum of the GEMM rates of all ranks in FLOP/s; None if a rank has not measured its rate.
    """

    predicts = False
    trains = True
    evaluates_core = True
    copies_to = ""
    tracks_on_all_hosts = False
    from_checkpoint: Path | None = None

    plan: Plan
    data: Dataset
    core: Bundle | None = None
    options: Options | None = None
    chooses_library = True
    group: Collectives
    numerics: Numerics
    model: GPT
    optimizer: MuonAdamW
    sync: SyncMode
    train_state: TrainState
    micro_batches: list[int]
    config_digest: str
    numerics_by_rank: tuple[dict[str, Any], ...]
    facts_by_rank: list[dict[str, str]]
    gemm_rate: float | None
    placement: Placement

    def __init__(
        self,
        run_file: RunFile,
        data_dir: Path,
        run_dir: Path,
        env: RankEnv,
        run_status: RunStatus,
        watchdog: Watchdog,
        log: RunLogger,
    ) -> None:
        self.run_file, self.config = run_file, run_file.config
        self.data_dir, self.run_dir, self.checkpoints = data_dir, run_dir, run_dir / "checkpoints"
        self.env, self.run_status, self.watchdog, self.log = env, run_status, watchdog, log

    def run(self) -> None:
        """Run the setup. If it fails on any rank, every rank raises RunEnd, ConfigError or DataError."""
        config, env = self.config, self.env
        self.run_status.enter("load")
        options = self.options = self.options or self._explore()
        records = self._load_and_check(options)
        kind, reason = decide_device(config.device, {str(record): record.shown for record in records})
        kind = self._decide_kind(kind)
        self.numerics = options.on(kind)
        if options.cuda and kind == "cpu":
            self.numerics = self._bind_threads(self.numerics)
        if env.is_host_leader:
            self._log_ranks(records, kind, reason)
        self.config_digest = config.digest()
        self._begin(records, options.cuda if kind != "cuda" and config.device == "auto" else None)

    def _explore(self) -> Options:
        """Find the devices that this rank can use. If it has no GPU, bind its threads to processors."""
        config, env = self.config, self.env
        ranks = env.local_rank, env.local_world_size
        options = explore(config.device, config.dtype, config.threads, *ranks, self.chooses_library)
        if options.cuda is None:
            options = dataclasses.replace(options, cpu=self._bind_threads(options.cpu))
        return options

    def _begin(self, records: list[consistency.Record], gpu: Numerics | None) -> None:
        """Connect the ranks, build model, optimizer and sync mode, and load their state.

        records: of all ranks, in rank order. gpu: device and number formats of the GPU of this rank if the
        run leaves it idle; else None.
        """
        self._connect(records)
        self.run_status.enter("resume")
        self._build()
        state = exchange.broadcast_meta(self.group, self._initial_state())
        self._restore_arithmetic(state.meta)
        self._decide_placement(state.meta, gpu)
        self.group.owner_speeds = list(self.placement.owner_speeds)
        self.sync = self.make_sync()
        self._resume(state)
        if state.step:
            text = f"Resuming from the checkpoint of step {state.step}."
            self.log.info(text, extra=fields("resumed", step=state.step))
            if self.env.is_coordinator:
                self.train_state.checkpoint = f"checkpoints/step_{state.step:06d}"
        self._gather_facts(records)
        self.config_digest = str(state.meta.get("config_digest") or self.config_digest)

    def _decide_kind(self, kind: str) -> str:
        """The device kind of the run, "cpu" or "cuda". kind: the kind that the devices of all ranks allow."""
        return kind

    def _connect(self, records: list[consistency.Record]) -> None:
        """Open the process group of the ranks in `records`, which are in rank order."""
        self.watchdog.set_peers(
            [record.peer for record in records], {record.rank: record.endpoint for record in records}
        )
        self.group = Collectives.open(
            self.env, [record.peer for record in records], self.store, self.numerics.device
        )
        self._watch_group()

    def _watch_group(self) -> None:
        self.group.waiting = self.run_status.waiting
        self.run_status.is_waiting = lambda: self.group.is_waiting

    def _gather_facts(self, records: list[consistency.Record]) -> None:
        """Gather the arithmetic of each rank, for checkpoints and the tracker; compare the placements.

        records: of all ranks, in rank order. Raises Final if the placement differs between ranks.
        """
        if self.numerics.threads > usable_cores():
            self.log.info(
                f"warning: {self.numerics.threads} threads share {usable_cores()} core(s), which is slow. "
                "Set threads to auto. With the playbooks also remove fleet_threads from the inventory; by "
                "hand unset OMP_NUM_THREADS."
            )
        numerics = self.numerics
        mine = [numerics.saved(), numerics.facts(), numerics.gemm_rate, self.placement.digest()]
        self.numerics_by_rank, facts, rates, digests = zip(
            *map(json.loads, self.group.gather_bytes(json.dumps(mine).encode())), strict=True
        )
        self.gemm_rate = None if None in rates else sum(rates)
        decide.compare_placements(self.group.peers, digests)
        self.facts_by_rank = [record.facts | found for record, found in zip(records, facts, strict=True)]
        self.micro_batches = [int(record.shown["micro-batch"]) for record in records]

    def _bind_threads(self, numerics: Numerics) -> Numerics:
        return bind_threads(numerics, self.config, self.env, self.run_dir, self.log)

    def _log_ranks(self, records: list[consistency.Record], kind: str, reason: str) -> None:
        """Log the device kind of the run, and the arithmetic, address and micro-batch of each rank."""
        self.log.info(f"{self.run_file.run_id}: {counted(len(records), 'rank')} on {kind} ({reason})")
        for record in records:
            interface = f", {record.address} on {record.shown['interface']}" if record.address else ""
            rows = int(record.shown["micro-batch"])
            differs = rows != self.config.device_batch_size
            own = f", {counted(rows, 'row')} a micro-batch" if differs else ""
            self.log.info(f"  {record}: {record.shown[kind]}{interface}{own}")
        idle = ", ".join(str(record) for record in records if "cuda" in record.shown)
        if idle and kind == "cpu" and self.config.device == "auto" and self.config.sync != "auto":
            self.log.info(
                f"warning: the GPU of {idle} is idle. "
                "With sync=auto a run moves to its host if that is faster."
            )

    def open_data(self) -> Dataset:
        """Open the data directory of the run. A benchmark replaces this method."""
        return Dataset.open(self.data_dir, self.config.sequence_len)

    def _read_core(self) -> dict[str, str]:
        """Read the CORE bundle if CORE will be evaluated.

        Returns {"CORE bundle": digest}, which is compared across ranks; {} without CORE. Raises ConfigError
        if there is no bundle.
        """
        every, folder = self.config.core_metric_every, self.data_dir / BUNDLE
        if not every or not self.evaluates_core:
            return {}
        if not folder.is_dir():
            raise ConfigError(
                f"core_metric_every is {every}, and there is no CORE bundle {folder} on {self.env.host}. "
                f"{HOW_TO_GET}, or set core_metric_every to 0."
            )
        self.core = self.core or read_bundle(folder).limited(self.config.core_metric_max_per_task)
        return {"CORE bundle": self.core.digest[:16]}

    def make_sync(self) -> SyncMode:
        """Create the sync mode that the placement names, for the model and optimizer of this rank."""
        outer = Outer.of(self.config)
        return make_sync(self.placement.sync, self.group, self.model, self.optimizer, outer)

    def _load_and_check(self, options: Options) -> list[consistency.Record]:
        """Open the data and run the consistency check; returns the records that all ranks publish, by rank.

        A problem of this rank, such as unusable data, is published in its record and ends all ranks.
        """
        self.store = None
        if self.env.world_size > 1:
            self.store = self._open_store()
            self.watchdog.start_exchange()
        problem: ConfigError | DataError | None = None
        info, hashes = None, {}
        self.micro_batch = self.config.device_batch_size
        try:
            self.micro_batch = self.env.micro_batch(self.micro_batch)
            self.data = self.open_data()
            info, hashes = self.data.info, self.data.hashes | self._read_core()
            self.plan = make_plan(
                self.config,
                info.vocab_size,
                max(self.env.world_size, self.env.rank + 1),
                () if self.env.is_added else self.run_file.fixed_shares,
                info.train_rows,
            )
            fine_tuning.check_data(self.config, info, self.data_dir)
            if self.run_file.trainer_digest not in ("", code_digest()):
                raise ConfigError(
                    "The run file was written for another version of the trainer than that of this host. "
                    "Install the same version on all hosts: ansible-playbook setup.yml"
                )
        except (ConfigError, DataError) as error:
            problem = error
            if self.env.world_size == 1:
                raise
        record = consistency.make_record(
            self.env, self.run_file, options, info, hashes, str(problem or ""), self.watchdog.endpoint
        )
        record.shown["micro-batch"] = str(self.micro_batch)
        return self._find_ranks(record)

    def _open_store(self) -> dist.Store:
        return join_store(self.env, self.run_file.run_id)

    def _find_ranks(self, record: consistency.Record) -> list[consistency.Record]:
        """Exchange the records of all ranks and compare them; `record` is that of this rank."""
        return consistency.check_consistency(
            self.store, record, self.env.world_size, is_alive=self.watchdog.is_alive
        )

    def _build(self) -> None:
        """Create the model in the number format of the run, and its optimizer."""
        config, scale = self.config, self.plan.scales
        self.model = GPT(self.plan.model).to(self.numerics.device, self.numerics.dtype)
        self.model.recompute = config.recompute == "layers"
        self.optimizer = build_optimizer(
            self.model,
            unembedding_lr=config.unembedding_lr * scale.lr,
            embedding_lr=config.embedding_lr * scale.lr,
            matrix_lr=config.matrix_lr * scale.lr,
            scalar_lr=config.scalar_lr * scale.lr,
            weight_decay=config.weight_decay * scale.weight_decay,
        )

    def _decide_placement(self, meta: Mapping[str, Any], gpu: Numerics | None) -> None:
        """Set the placement: from a checkpoint of the same hosts, else measured if shares or sync is auto.

        It is also measured if `predicts` is True, or if sync=auto has chosen the host of the run. It is not
        restored if shares is auto now and was not at the checkpoint, or the reverse. meta: content of the
        checkpoint's meta.json. gpu: as for `_begin`. Raises TransferToHost if the GPU of one host is faster
        than all ranks together and the run can move to that host.
        """
        config, group = self.config, self.group
        together, automatic = group.world_size > 1, config.sync == "auto"
        by_speed = self.run_file.by_speed and together
        self.placement = Placement("exact" if automatic else config.sync, tuple(self.plan.shares))
        if self._same_hosts(meta) and self._same_policy(meta):
            self.placement = decide.restore_placement(self.placement, meta, by_speed, automatic)
        elif by_speed or (automatic and together) or self.run_file.chosen_from or self.predicts:
            measured = decide.measure_all(
                group, self.model, self.optimizer, self.numerics, gpu, self.micro_batch
            )
            names = decide.rank_names(group.peers)
            work = decide.work_of(self.model, self.optimizer, self.data, self.plan, config)
            requested = was_requested(self.run_dir)
            obstacles = find_obstacles(config, self.run_file.fixed_shares, meta, group.peers, requested)
            placement, lines = decide.decide(measured, names, self.plan, work, config, by_speed, obstacles)
            self.placement = decide.broadcast_placement(group, placement)
            if self.placement.faster_host and self.trains:
                raise self.placement.faster_host.end(group.peers, names, lines)
            if self.env.is_coordinator:
                for line in lines:
                    self.log.info(line, extra=fields("placement"))
                with contextlib.suppress(OSError):
                    write_whole(self.run_dir / PREDICTION, ("\n".join(lines) + "\n").encode())
        self.plan = dataclasses.replace(self.plan, shares=list(self.placement.shares))

    def _resume(self, state: State) -> None:
        """Load `state` into model, optimizer and sync mode, and its progress into train_state."""
        if self.env.is_coordinator:
            self.model.load_state_dict(state.model or self._initial_weights())
            state.model.clear()
        for tensor in self.model.state_dict().values():
            self.group.broadcast_owned({0: tensor.view(-1)})
        self._resume_optimizer(state)
        self.train_state = TrainState.from_meta(state.meta)

    def _resume_optimizer(self, state: State) -> None:
        """Load optimizer and sync mode: from this rank's state on its own host, else from rank 0's state."""
        mine, common = exchange.scatter_optimizer(self.group, self.sync, state)
        own: dict[str, Tensor] = {}
        if "own_sha256" in state.meta:
            found = load_rank_state(self.run_dir, state.meta, self.group.rank)
            if found:
                own, optim = found
                mine = optim or mine  # that of rank 0 is in the checkpoint
            else:
                self.log.info(
                    f"This host has no valid state of rank {self.group.rank} of step {state.step}: the rank "
                    "continues from the outer parameters, with the optimizer state of rank 0."
                )
        self.optimizer.load_state_dict(mine)
        self.sync.load(state.step, common, own)

    def _initial_state(self) -> State | None:
        """On rank 0, the state of the newest valid checkpoint, else of a new run; None on other ranks.

        Copies of newer checkpoints on other hosts are fetched first. Raises Final on all ranks if the
        checkpoint does not belong to this run.
        """
        fetch_newer(self.group, self.checkpoints, self.run_file.run_id, self.config, self.log.info)
        state: State | None = None
        problem = None
        if self.env.is_coordinator:
            try:
                state = self._load_state()
            except (ConfigError, DataError) as error:
                problem = str(error)
        self.group.raise_problems(problem)
        return state

    def _load_state(self) -> State:
        storage.remove_leftovers(self.checkpoints)
        hashes, run_id = self.data.hashes, self.run_file.run_id
        state = storage.newest(self.checkpoints, self.log.info)
        if state is None and self.config.stage == "sft":
            state = fine_tuning.initial_state(self.from_checkpoint, self.config, self.plan.model, hashes)
            self.log.info(f"Fine-tuning the model of {self.config.parent}.")
        state = state or State({"step": 0}, {}, {})
        if state.step:
            compatibility.check_continues(state, self.config, hashes, run_id)
            steps = compatibility.planned_steps(state.meta, self.config, self.plan.num_iterations)
            changes = compatibility.describe_changes(state, self.config, steps, run_id)
            if changes:
                self.log.info(changes, extra=fields("changed"))
        elif "imported" in state.meta:
            compatibility.check_begins(state, self.plan.model, hashes, run_id)
            self.log.info(f"Starting with the weights of {state.meta['imported']}.")
        return state

    def _initial_weights(self) -> dict[str, Tensor]:
        """Draw the initial weights. Rank 0 alone does so, on its CPU: processors may draw different bits."""
        torch.manual_seed(self.config.seed)
        model = GPT(self.plan.model).to(self.numerics.dtype)
        model.init_weights()
        return dict(model.state_dict())

    def _same_hosts(self, meta: Mapping[str, Any]) -> bool:
        """Whether the ranks of a checkpoint ran on the same hosts, in the same order, as the ranks now.

        meta: content of the checkpoint's meta.json. A checkpoint that an elastic run wrote during a change of
        its members may have lists of different lengths; the result is then False.
        """
        hosts = [peer.host for peer in self.group.peers]
        return meta.get("hosts") == hosts and len(meta["shares"]) == len(meta["numerics"]) == len(hosts)

    def _same_policy(self, meta: Mapping[str, Any]) -> bool:
        """Whether shares is auto both now and at a checkpoint, or at neither; True for older checkpoints."""
        return bool(meta.get("shares_auto", self.run_file.by_speed) == self.run_file.by_speed)

    def _restore_arithmetic(self, meta: Mapping[str, Any]) -> None:
        """Restore the number of steps of a checkpoint; on the same hosts also number formats and threads.

        With shares=auto, now and at the checkpoint, the batch split is restored too. With the same batch
        split, formats and threads, the resumed run is bitwise equal to an uninterrupted one. meta: content of
        the checkpoint's meta.json.
        """
        steps = compatibility.planned_steps(meta, self.config, self.plan.num_iterations)
        self.plan = dataclasses.replace(self.plan, num_iterations=steps)
        if self._same_hosts(meta) and self._same_policy(meta) and self.run_file.by_speed:
            self.plan = dataclasses.replace(self.plan, shares=meta["shares"])
        now = self.numerics
        if self._same_hosts(meta):
            saved = meta["numerics"][self.group.rank]
            self.numerics = restore_numerics(now, saved, self.config.threads)
            if changes := now.binding.changes(saved):
                self.log.info(
                    f"The processors of this host are not those at the checkpoint ({changes}), so the number "
                    "and binding of threads are not restored from it. No action is needed."
                )
        if self.numerics != now:
            self.log.info(f"Restored from the checkpoint: {self.numerics.describe()}")
        self.model.compute_dtype = self.optimizer.compute_dtype = self.numerics.compute_dtype

    # -- what the training loop asks for ------------------------------------------------------------------

    def describe(self) -> str:
        """The summary of the run (see `describe_plan`), which rank 0 logs before the first step."""
        rows, sizes = self.data.info.train_rows, self.micro_batches
        return describe_plan(self.plan, self.config, self.model, rows, sizes)

    def checkpoint_meta(self, plan: Plan, state: TrainState) -> dict[str, Any]:
        """The content of meta.json for a checkpoint.

        plan: plan of the run with the current batch split. state: the progress of the run. The result has the
        fields of TrainState except checkpoint, and the keys run_id, num_iterations, rows and tokens (trained
        so far), config, config_digest, model_config, hashes (of the data), world_size, shares, shares_auto
        (whether the setting shares is auto), placement, numerics and hosts (by rank), torch (its version) and
        time (Unix).
        """
        done = dataclasses.asdict(state)
        del done["checkpoint"]
        return {
            "run_id": self.run_file.run_id,
            **done,
            "num_iterations": plan.num_iterations,
            "rows": state.step * plan.rows_per_step,
            "tokens": state.step * plan.total_batch_size,
            "config": self.config.to_dict(),
            "config_digest": self.config_digest,
            "model_config": plan.model.__dict__,
            "hashes": self.data.hashes,
            "world_size": self.group.world_size,
            "shares": plan.shares,
            "shares_auto": self.run_file.by_speed,
            "placement": self.placement.saved(),
            "numerics": self.numerics_by_rank,
            "hosts": [peer.host for peer in self.group.peers],
            "torch": torch.__version__,
            "time": time.time(),
        }

    def step_cost(self) -> StepCost:
        """The constants from which the reporter computes FLOPs and epochs."""
        return StepCost(self.model.flops_per_token(), self.gemm_rate, self.data.info.train_rows)

    def open_tracker(self, uri: str) -> Tracker:
        """The tracker of this attempt on this rank. uri: address of the MLflow server; "" for no server.

        The tracker writes only files if `uri` is "", with tracker=none, and on other ranks than rank 0.
        """
        if self.config.tracker == "none" or not self.env.is_coordinator:
            uri = ""
        elif not uri:
            self.log.info(
                "No tracker address was given (--tracker-uri): the figures are in metrics.jsonl only."
            )
        facts = facts_of(
            self.run_file,
            self.config_digest,
            self.plan,
            self.model,
            self.data.info,
            self.data.hashes,
            [peer.host for peer in self.group.peers],
            self.facts_by_rank,
            self.placement.tags(),
        )
        is_main = self.env.is_coordinator
        return Tracker(self.run_dir, self.train_state.step, facts, uri, self.log.info, is_main)
