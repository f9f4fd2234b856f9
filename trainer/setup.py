"""Before step 0: read the data, meet the other ranks, decide on the arithmetic, build the model, take up.

ready = Beginning(run_file, data_dir, run_dir, place, heartbeat, watchdog, say).ready()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import storage
from trainer.checkpoint.rank_state import find_own
from trainer.checkpoint.storage import State
from trainer.checkpoint.train_state import TrainState
from trainer.config import ConfigError, RunFile, code_digest
from trainer.data import DataError
from trainer.data.dataset import Dataset
from trainer.data.files import write_whole
from trainer.distributed import consistency
from trainer.distributed.process_group import Group
from trainer.distributed.rendezvous import join_store, prefix_of
from trainer.health.restart_policy import began_anew
from trainer.health.run_status import Heartbeat
from trainer.health.watchdog import Watchdog
from trainer.host.cores import usable_cores
from trainer.host.logger import Voice
from trainer.host.numerics import Numerics, Options, again, decide_device, explore
from trainer.host.rank_env import Place
from trainer.model.gpt import GPT
from trainer.optim.muon_adamw import MuonAdamW, build_optimizer
from trainer.placement import decide
from trainer.placement.decide import Arrangement
from trainer.placement.single_host import find_obstacles
from trainer.run_plan import Plan, make_plan
from trainer.sync.local import Outer
from trainer.sync.mode import SyncMode
from trainer.sync.modes import make_sync

PREDICTION = "prediction.txt"


@dataclass
class Ready:
    """What the loop works with. By rank: what each one computes in, and what its host is."""

    plan: Plan
    data: Dataset
    group: Group
    numerics: Numerics
    model: GPT
    optimizer: MuonAdamW
    sync: SyncMode
    progress: TrainState
    micro_batches: list[int]  # rows, by rank
    config_digest: str  # the run's, as the release said it that began the run
    numerics_by_rank: list[dict[str, Any]]
    facts_by_rank: list[dict[str, str]]
    arrangement: Arrangement

    def checkpoint_meta(self, run_file: RunFile, plan: Plan, state: TrainState) -> dict[str, Any]:
        """The content of a checkpoint's meta.json. `plan` has the current rows per rank."""
        done = dataclasses.asdict(state)
        del done["checkpoint"]
        return {
            "run_id": run_file.run_id,
            **done,
            "num_iterations": plan.num_iterations,
            "rows": state.step * plan.rows_per_step,
            "tokens": state.step * plan.total_batch_size,
            "config": run_file.config.to_dict(),
            "config_digest": self.config_digest,
            "model_config": plan.model.__dict__,
            "hashes": self.data.hashes,
            "world_size": self.group.world_size,
            "shares": plan.shares,
            "arrangement": self.arrangement.saved(),
            "numerics": self.numerics_by_rank,
            "hosts": [peer.host for peer in self.group.peers],
            "torch": torch.__version__,
            "time": time.time(),
        }


class Beginning:
    """The way of one rank to step 0, or to the step of the checkpoint that the run goes on from."""

    def __init__(
        self,
        run_file: RunFile,
        data_dir: Path,
        run_dir: Path,
        place: Place,
        heartbeat: Heartbeat,
        watchdog: Watchdog,
        say: Voice,
    ) -> None:
        self.run_file, self.config = run_file, run_file.config
        self.data_dir, self.run_dir, self.checkpoints = data_dir, run_dir, run_dir / "checkpoints"
        self.place, self.heartbeat, self.watchdog, self.say = place, heartbeat, watchdog, say

    def ready(self) -> Ready:
        """Raises RunEnd, ConfigError or DataError, on every rank, for what is wrong on any of them."""
        config, place = self.config, self.place
        self.heartbeat.enter("load")
        options = explore(
            config.device, config.dtype, config.threads, place.local_rank, place.local_world_size
        )
        records = self._load_and_meet(options)
        kind, reason = decide_device(config.device, {str(record): record.shown for record in records})
        self.numerics = options.on(kind)
        peers = [record.peer for record in records]
        self.watchdog.meet(peers, {record.rank: record.told for record in records})
        self.group = Group.open(place, peers, self.store, self.numerics.device)
        self.heartbeat.waits = lambda: self.group.waits
        if place.speaks_for_host:
            self._say_who(records, kind, reason)

        self.heartbeat.enter("resume")
        self._build()
        state = self._state_of_all()
        self._as_before(state.meta)
        self._arrange(state.meta, options.cuda if kind != "cuda" and config.device == "auto" else None)
        self._make_sync()
        progress = self._take_up(state)
        if self.numerics.threads > usable_cores():
            self.say(
                f"warning: {self.numerics.threads} threads on {usable_cores()} core(s) wait for each other; "
                "leave threads out to have as many as cores."
            )
        mine = json.dumps([self.numerics.saved(), self.numerics.facts(), self.arrangement.digest()]).encode()
        saved, computes_in, tables = zip(*map(json.loads, self.group.gather_bytes(mine)), strict=True)
        decide.compare_arrangements(self.group.peers, tables)
        facts = [record.facts | found for record, found in zip(records, computes_in, strict=True)]
        return Ready(
            self.plan,
            self.data,
            self.group,
            self.numerics,
            self.model,
            self.optimizer,
            self.sync,
            progress,
            [int(record.shown["micro-batch"]) for record in records],
            str(state.meta.get("config_digest") or config.digest()),
            list(saved),
            facts,
            self.arrangement,
        )

    def _say_who(self, records: list[consistency.Record], kind: str, reason: str) -> None:
        """Which ranks have met, and what each computes in."""
        ranks = f"{len(records)} rank{'s' if len(records) > 1 else ''}"
        self.say(f"{self.run_file.run_id}: {ranks} on {kind} ({reason})")
        for record in records:
            wire = f", {record.address} on {record.shown['interface']}" if record.address else ""
            rows = int(record.shown["micro-batch"])
            own = (
                f", {rows} row{'s' * (rows > 1)} a micro-batch"
                if rows != self.config.device_batch_size
                else ""
            )
            self.say(f"  {record}: {record.shown[kind]}{wire}{own}")
        idle = ", ".join(str(record) for record in records if "cuda" in record.shown)
        if idle and kind == "cpu" and self.config.device == "auto" and self.config.sync != "auto":
            self.say(
                f"warning: the GPU of {idle} is idle. With sync=auto a run is left to it where it is faster."
            )

    def predicts(self) -> bool:
        """Whether speeds are measured, and a step predicted, though nothing is left to be decided."""
        return False

    def trains(self) -> bool:
        """Whether training is what the ranks have met for."""
        return True

    def open_data(self) -> Dataset:
        return Dataset.open(self.data_dir, self.config.sequence_len)

    def _load_and_meet(self, options: Options) -> list[consistency.Record]:
        """Read the data and agree with all ranks; what is wrong here is told to all of them."""
        self.store = None
        if self.place.world_size > 1:
            self.store = join_store(self.place, self.run_file.run_id)
            self.watchdog.join(prefix_of(self.place))
        problem: ConfigError | DataError | None = None
        info, hashes = None, {}
        self.micro_batch = self.config.device_batch_size
        try:
            self.micro_batch = self.place.micro_batch(self.micro_batch)
            self.data = self.open_data()
            info, hashes = self.data.info, self.data.hashes
            self.plan = make_plan(
                self.config, info.vocab_size, self.place.world_size, self.run_file.fixed_shares
            )
            if self.run_file.trainer_digest not in ("", code_digest()):
                raise ConfigError("The run file is of another version of the trainer than this host's.")
        except (ConfigError, DataError) as error:
            problem = error
            if self.store is None:
                raise
        record = consistency.make_record(
            self.place, self.run_file, options, info, hashes, str(problem or ""), self.watchdog.told
        )
        record.shown["micro-batch"] = str(self.micro_batch)
        return consistency.meet(self.store, record, self.place.world_size, lives=self.watchdog.lives)

    def _build(self) -> None:
        """The model in the run's number format, and its optimizer."""
        config, scale = self.config, self.plan.scales
        self.model = GPT(self.plan.model).to(self.numerics.device, self.numerics.dtype)
        self.optimizer = build_optimizer(
            self.model,
            unembedding_lr=config.unembedding_lr * scale.lr,
            embedding_lr=config.embedding_lr * scale.lr,
            matrix_lr=config.matrix_lr * scale.lr,
            scalar_lr=config.scalar_lr * scale.lr,
            weight_decay=config.weight_decay * scale.weight_decay,
        )

    def _state_of_all(self) -> State:
        """The newest good checkpoint's, or fresh: rank 0 decides, and its bytes go to all."""
        state: State | None = None
        problem = None
        if self.place.coordinates:
            try:
                state = self._newest_or_fresh()
            except (ConfigError, DataError) as error:
                problem = str(error)
        self.group.agree(problem)
        return storage.give_to_all(self.group, state)

    def _arrange(self, meta: Mapping[str, Any], gpu: Numerics | None) -> None:
        """Settle who does what: as the checkpoint's hosts did, or by measuring, where that is asked for."""
        config, group = self.config, self.group
        together, automatic = group.world_size > 1, config.sync == "auto"
        by_speed = self.run_file.by_speed and together
        self.arrangement = Arrangement("exact" if automatic else config.sync, tuple(self.plan.shares))
        if self._same_hosts(meta):
            self.arrangement = decide.again(self.arrangement, meta, by_speed, automatic)
        elif by_speed or (automatic and together) or self.run_file.chosen_from or self.predicts():
            measured = decide.measure_all(
                group, self.model, self.optimizer, self.numerics, gpu, self.micro_batch
            )
            names = decide.names_of(group.peers)
            work = decide.work_of(self.model, self.optimizer, self.data, self.plan, config)
            anew = began_anew(self.run_dir)
            obstacles = find_obstacles(config, self.run_file.fixed_shares, meta, group.peers, anew)
            arrangement, said = decide.decide(measured, names, self.plan, work, config, by_speed, obstacles)
            self.arrangement = decide.hand_out(group, arrangement)
            if self.arrangement.alone and self.trains():
                raise self.arrangement.alone.end(group.peers, names, said)
            if self.place.coordinates:
                for line in said:
                    self.say(line, event="arrangement")
                self._keep(said)
        self.plan = dataclasses.replace(self.plan, shares=list(self.arrangement.shares))

    def _keep(self, said: list[str]) -> None:
        """What was predicted, for whoever has started the run; done without on a full disk."""
        with contextlib.suppress(OSError):
            write_whole(self.run_dir / PREDICTION, ("\n".join(said) + "\n").encode())

    def _make_sync(self) -> None:
        """The way the gradients travel."""
        self.group.owner_speeds = list(self.arrangement.owner_speeds)
        outer = Outer.of(self.config)
        self.sync = make_sync(self.arrangement.sync, self.group, self.model, self.optimizer, outer)

    def _take_up(self, state: State) -> TrainState:
        """Begin, or go on, with a state."""
        self.model.load_state_dict(state.model)
        self._take_up_optimizer(state)
        progress = TrainState.from_meta(state.meta)
        if state.step:
            self.say(
                f"Going on from the checkpoint of step {state.step}.",
                event="resumed",
                figures={"step": state.step},
            )
            if self.place.coordinates:
                progress.checkpoint = f"checkpoints/step_{state.step:06d}"
        return progress

    def _take_up_optimizer(self, state: State) -> None:
        """The optimizer's state, and the sync mode's: what this host keeps for its rank, else rank 0's."""
        common = storage.take_common(state.optim)
        mine = {n: s for n, s in state.optim.items() if self.sync.owner_of(n) in (None, self.group.rank)}
        own: dict[str, Tensor] = {}
        if "own_sha256" in state.meta:
            found = find_own(self.run_dir, state.meta, self.place.rank)
            if found:
                own, optim = found
                mine = optim or mine  # rank 0's is in the checkpoint itself
            else:
                self.say(
                    f"This host has no state of rank {self.place.rank} from step {state.step}: the rank goes "
                    "on from the run's parameters, with rank 0's optimizer state."
                )
        self.optimizer.load_state_dict(mine)
        self.sync.load(state.step, common, own)

    def _newest_or_fresh(self) -> State:
        """The state to begin with. Raises ConfigError or DataError where the run's is another one."""
        storage.remove_leftovers(self.checkpoints)
        state = storage.newest(self.checkpoints, self.say) or self._fresh()
        hashes, run_id = self.data.hashes, self.run_file.run_id
        if state.step:
            storage.check_continues(state, self.config, hashes, run_id)
            steps = storage.settled_steps(state.meta, self.config, self.plan.num_iterations)
            changes = storage.describe_changes(state, self.config, steps, run_id)
            if changes:
                self.say(changes, event="changed")
        elif "imported" in state.meta:
            storage.check_begins(state, self.plan.model, hashes, run_id)
            self.say(f"Beginning with the weights of {state.meta['imported']}.")
        return state

    def _fresh(self) -> State:
        """Initial weights, drawn by rank 0 alone and on its CPU: unlike processors draw unlike bits."""
        torch.manual_seed(self.config.seed)
        model = GPT(self.plan.model).to(self.numerics.dtype)
        model.init_weights()
        return State({"step": 0}, dict(model.state_dict()), {})

    def _same_hosts(self, meta: Mapping[str, Any]) -> bool:
        return meta.get("hosts") == [peer.host for peer in self.group.peers]

    def _as_before(self, meta: Mapping[str, Any]) -> None:
        """The same hosts keep the shares, number formats and threads they had: so it goes on bitwise."""
        steps = storage.settled_steps(meta, self.config, self.plan.num_iterations)
        self.plan = dataclasses.replace(self.plan, num_iterations=steps)
        if self._same_hosts(meta) and not self.run_file.fixed_shares:
            self.plan = dataclasses.replace(self.plan, shares=meta["shares"])
        now = self.numerics
        if self._same_hosts(meta):
            self.numerics = again(now, meta["numerics"][self.place.rank], self.config.threads)
        if self.numerics != now:
            self.say(f"As before: {self.numerics.describe()}")
        self.model.compute_dtype = self.optimizer.compute_dtype = self.numerics.compute_dtype
