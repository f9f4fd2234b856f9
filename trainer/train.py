"""A training, from loading to its outcome: the loop as one would write it on a blackboard.

python -m trainer train --data-dir data --run-dir runs/mine --depth 4 --num-iterations 100
torchrun --nproc-per-node 2 -m trainer train --run-file run.json --data-dir data --run-dir runs/mine
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer import checkpoint, contract, plan, schedule
from trainer.config import ConfigError, RunConfig, RunFile, code_digest
from trainer.data import DataError
from trainer.data.files import file_sha256, write_whole
from trainer.data.loader import batch_rows, rank_rows
from trainer.data.rows import Rows, RowsInfo, pack
from trainer.data.tokenizer import FILE_NAME, Tokenizer
from trainer.evaluate import evaluate
from trainer.host.heartbeat import Heartbeat
from trainer.host.numerics import Numerics, again, decide_device, explore
from trainer.host.place import Place, Voice
from trainer.model import GPT
from trainer.optim import MuonAdamW, build_optimizer
from trainer.outcome import Attempt, Final, Retryable, Stopped
from trainer.sample import stream_text
from trainer.sync import Sync, make_sync
from trainer.sync.digest import compare_parameters
from trainer.sync.group import Group, PeerLost
from trainer.sync.store import join_store
from trainer.tracking import MlflowTracker, Tracker

SAMPLE_PROMPT = "The "
SAMPLE_TOKENS = 64
SAMPLE_TEMPERATURE = 0.8
MEASURED_STEPS = 3  # after which the expected time is said and collectives get their time-out
TIMEOUT_FLOOR = timedelta(minutes=2)
TIMEOUT_STEPS = 20
LINE_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Data:
    """What a rank reads."""

    tokenizer: Tokenizer
    info: RowsInfo
    train: NDArray[Any]  # (n, T+1)
    val: NDArray[Any]
    hashes: dict[str, str]


@dataclass
class Progress:
    """Where the run stands; `step` counts the updates done."""

    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    val_bpb: float | None = None
    checkpoint: str | None = None

    def figures(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Run:
    """One attempt at a run on this rank. `go` raises RunEnd, or returns the sentence it ended with."""

    def __init__(
        self, run_file: RunFile, data_dir: Path, run_dir: Path, place: Place, attempt: Attempt, say: Voice
    ) -> None:
        self.run_file = run_file
        self.config: RunConfig = run_file.config
        self.data_dir, self.run_dir = data_dir, run_dir
        self.place, self.attempt, self.say = place, attempt, say
        self.heartbeat = Heartbeat(run_dir, place, run_file.run_id)
        self.stop_file = run_dir / "stop"
        self.progress = Progress()

    def go(self, tracker_uri: str = "") -> str:
        """Load, meet, resume, train, conclude."""
        self.attempt.state(run_id=self.run_file.run_id)
        if self.place.coordinates:
            self.stop_file.unlink(missing_ok=True)  # asked of an earlier attempt
        self.heartbeat.enter("load")
        config, place = self.config, self.place
        self.options = explore(
            config.device, config.dtype, config.threads, place.local_rank, place.local_world_size
        )
        records = self._load_and_meet()
        kind, reason = decide_device(config.device, {str(record): record.shown for record in records})
        self.numerics: Numerics = self.options.on(kind)
        self.group = Group.open(place, [record.peer for record in records], self.store, self.numerics.device)
        self.say(f"{self.run_file.run_id}: {len(records)} rank{'s' if len(records) > 1 else ''}")
        for record in records:
            self.say(f"  {record}: {record.shown[kind]}")
        self.say(f"device {kind}: {reason}")
        self.heartbeat.state(num_iterations=self.plan.num_iterations)
        self.attempt.state(num_iterations=self.plan.num_iterations)

        self.heartbeat.enter("resume")
        self.model, self.optimizer, self.sync = self._build()
        self._take_up()
        if self.place.coordinates:
            self.say(plan.describe(self.plan, self.config, self.model, self.data.info.train_rows))
            self.tracker: Tracker | None = self._make_tracker(tracker_uri)
            self.attempt.at_end(self.tracker.close)
        else:
            self.tracker = None

        stopped = self._loop()
        done = f"{self.progress.step} of {self.plan.num_iterations} steps"
        if stopped:
            self._part()
            raise Stopped(
                f"Stopped as asked after {done}; the checkpoint is {self.progress.checkpoint or 'on rank 0'}."
            )
        if self.place.coordinates:
            self._write_sample()
        self._part()
        loss, bpb = self.progress.loss, self.progress.val_bpb
        return (
            f"All {self.plan.num_iterations} steps done: loss {_figure(loss)}, {_figure(bpb)} bits per byte."
        )

    # -- before step 0 ---------------------------------------------------------------------------------

    def _load_and_meet(self) -> list[contract.Record]:
        """Read the data and agree with all ranks; what is wrong here is told to all of them."""
        self.store = join_store(self.place, self.run_file.run_id) if self.place.world_size > 1 else None
        problem: ConfigError | DataError | None = None
        info, hashes = None, {}
        try:
            self.data = load_data(self.data_dir, self.config.sequence_len)
            info, hashes = self.data.info, self.data.hashes
            self.plan = plan.make_plan(self.config, info.vocab_size, self.place.world_size)
            if self.run_file.trainer_digest not in ("", code_digest()):
                raise ConfigError("The run file is of another version of the trainer than this host's.")
        except (ConfigError, DataError) as error:
            problem = error
            if self.store is None:
                raise
        record = contract.make_record(
            self.place, self.run_file, self.options, info, hashes, str(problem or "")
        )
        return contract.meet(self.store, record, self.place.world_size)

    def _build(self) -> tuple[GPT, MuonAdamW, Sync]:
        """The model in the run's number format, its optimizer, and the way its gradients travel."""
        config, scale = self.config, self.plan.scales
        model = GPT(self.plan.model)
        model.to(self.numerics.device, self.numerics.dtype)
        model.compute_dtype = self.numerics.compute_dtype
        optimizer = build_optimizer(
            model,
            unembedding_lr=config.unembedding_lr * scale.lr,
            embedding_lr=config.embedding_lr * scale.lr,
            matrix_lr=config.matrix_lr * scale.lr,
            scalar_lr=config.scalar_lr * scale.lr,
            weight_decay=config.weight_decay * scale.weight_decay,
        )
        optimizer.compute_dtype = self.numerics.compute_dtype
        return model, optimizer, make_sync(config.sync, self.group, model, optimizer)

    def _take_up(self) -> None:
        """Begin, or go on from the newest good checkpoint: rank 0 decides, and its bytes go to all."""
        state: checkpoint.State | None = None
        problem = None
        if self.place.coordinates:
            try:
                state = checkpoint.newest(self._checkpoints, self.say) or self._fresh_state()
                if state.step:
                    checkpoint.check_continues(state, self.config, self.data.hashes, self.run_file.run_id)
            except (ConfigError, DataError) as error:
                problem = str(error)
        self.group.agree(problem)
        state = checkpoint.give_to_all(self.group, state)
        self._compute_as_before(state.meta)
        self.model.load_state_dict(state.model)
        mine = {n: s for n, s in state.optim.items() if self.sync.owner_of(n) in (None, self.group.rank)}
        self.optimizer.load_state_dict(mine)
        meta = state.meta
        self.progress = Progress(state.step, meta.get("first_loss"), meta.get("loss"), meta.get("val_bpb"))
        if state.step:
            self.say(f"Going on from the checkpoint of step {state.step}.")
            if self.place.coordinates:
                self.progress.checkpoint = f"checkpoints/step_{state.step:06d}"
        self.attempt.state(**self.progress.figures())
        # No loss yet: it says that this attempt has made a step.
        self.heartbeat.state(step=state.step, val_bpb=self.progress.val_bpb)

    def _compute_as_before(self, meta: dict[str, Any]) -> None:
        """Resuming is bitwise only in the same formats and threads; says so where they changed."""
        hosts, before = meta.get("hosts", []), meta.get("numerics", [])
        rank = self.place.rank
        if len(before) == self.place.world_size and hosts[rank] == self.place.host:
            self.numerics = again(self.numerics, before[rank])
            self.model.compute_dtype = self.optimizer.compute_dtype = self.numerics.compute_dtype
        mine = json.dumps(self.numerics.saved()).encode()
        self.saved_numerics = [json.loads(text) for text in self.group.gather_bytes(mine)]

    def _fresh_state(self) -> checkpoint.State:
        """Initial weights, drawn by rank 0 alone: unlike CPUs draw unlike bits."""
        torch.manual_seed(self.config.seed)
        model = self.model
        if model.device.type != "cpu":  # a GPU draws other bits than a CPU
            model = GPT(self.plan.model).to(self.numerics.dtype)
        model.init_weights()
        return checkpoint.State({"step": 0}, dict(model.state_dict()), {})

    def _make_tracker(self, uri: str) -> Tracker:
        mlflow = None
        if self.config.tracker == "mlflow" and uri:
            derived = {
                "total_batch_size": self.plan.total_batch_size,
                "num_iterations": self.plan.num_iterations,
                "parameters": self.model.param_counts()["total"],
                "flops_per_token": self.model.flops_per_token(),
                "vocab_size": self.plan.model.vocab_size,
                "n_embd": self.plan.model.n_embd,
            }
            tags = {
                "config digest": self.config.digest(),
                "hosts": " ".join(peer.host for peer in self.group.peers),
                **self.data.hashes,
            }
            params = {**self.config.to_dict(), **derived}
            mlflow = MlflowTracker(uri, self.run_file.run_id, params, tags, self.say)
        elif self.config.tracker == "mlflow":
            self.say("No tracker address was given (--tracker-uri): metrics.jsonl alone keeps the figures.")
        return Tracker(self.run_dir, self.progress.step, mlflow)

    # -- the loop --------------------------------------------------------------------------------------

    def _loop(self) -> bool:
        """Train to the end; returns True when somebody asked for a stop and the run has saved."""
        config, last = self.config, self.plan.num_iterations
        durations: list[float] = []
        said = -math.inf
        self.heartbeat.lap()
        for step in range(self.progress.step, last):
            sent, started = self.group.bytes_sent, time.monotonic()

            self.heartbeat.enter("data")
            idx_BT, targets_BT = self._batch(step)
            self.sync.zero_grad()
            loss = self._accumulate(idx_BT, targets_BT)

            self.heartbeat.enter("sync")
            loss, stop = self._agree_on(loss)
            self._refuse_nan(loss, step)
            self.sync.reduce_gradients(self.plan.total_batch_size)

            self.heartbeat.enter("optimizer")
            rate = self._set_rates(step)
            self.sync.step()

            self.heartbeat.enter("sync")
            self.sync.hand_out()
            if config.digest_every and (step + 1) % config.digest_every == 0:
                compare_parameters(self.group, self.model, step + 1)

            durations.append(time.monotonic() - started)
            self.progress.step, self.progress.loss = step + 1, loss
            self.progress.first_loss = loss if self.progress.first_loss is None else self.progress.first_loss
            line = self._note_step(rate, durations, self.group.bytes_sent - sent)
            if len(durations) == 1 or step + 1 == last or time.monotonic() - said >= LINE_EVERY_SECONDS:
                self.say(line)
                said = time.monotonic()
            if len(durations) == MEASURED_STEPS:
                self._say_expected_time(durations)
                self.group.set_timeout(max(TIMEOUT_FLOOR, timedelta(seconds=TIMEOUT_STEPS * max(durations))))

            ends = step + 1 == last
            if ends or (config.eval_every and (step + 1) % config.eval_every == 0 and not stop):
                self._evaluate()
            if ends or stop or (config.save_every and (step + 1) % config.save_every == 0):
                self._save()
            if stop and not ends:
                return True
        return False

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's slice of the step's rows: inputs and targets, (rows, T) each."""
        rows = batch_rows(self.config.seed, step, self.plan.rows_per_step, len(self.data.train))
        mine = rank_rows(rows, self.plan.shares, self.place.rank)
        tokens = torch.from_numpy(self.data.train[mine].astype(np.int64))
        tokens = tokens.to(self.numerics.device)
        return tokens[:, :-1], tokens[:, 1:]

    def _accumulate(self, idx_BT: Tensor, targets_BT: Tensor) -> float:
        """Add up gradients of summed token losses over micro-batches; returns the sum of the losses."""
        total = 0.0
        size = self.config.device_batch_size
        for idx, targets in zip(idx_BT.split(size), targets_BT.split(size), strict=True):
            self.heartbeat.enter("forward")
            loss = self.model(idx, targets, loss_reduction="sum")
            self.heartbeat.enter("backward")
            loss.backward()
            total += loss.item()
        return total

    def _agree_on(self, loss_sum: float) -> tuple[float, bool]:
        """The step's mean loss over all ranks, and whether rank 0 has been asked to stop."""
        stop = self.place.coordinates and self.stop_file.exists()
        shared = torch.tensor([loss_sum, float(stop)], dtype=torch.float64)
        self.group.sum([shared])
        return shared[0].item() / self.plan.total_batch_size, bool(shared[1] > 0)

    def _refuse_nan(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise Final(
                f"The loss of step {step + 1} is {loss}: the run has diverged. Lower the rates (matrix_lr, "
                "embedding_lr) or go back to an earlier checkpoint."
            )

    def _set_rates(self, step: int) -> float:
        config, n = self.config, self.plan.num_iterations
        rate = schedule.lr_multiplier(
            step, n, config.warmup_steps, config.warmdown_ratio, config.final_lr_frac
        )
        momentum = schedule.muon_momentum(step, n, config.warmdown_ratio)
        self.optimizer.set_schedule(rate, momentum, schedule.muon_weight_decay(step, n))
        return rate

    # -- beside the loop -------------------------------------------------------------------------------

    def _note_step(self, rate: float, durations: list[float], sent: int) -> str:
        """Write the step down everywhere and return its line for the log."""
        progress, last = self.progress, self.plan.num_iterations
        seconds = durations[-1]
        speed = self.plan.total_batch_size / seconds
        eta = (last - progress.step) * _typical(durations)
        phases = self.heartbeat.lap()
        split = {name: phases.get(name, 0.0) for name in ("data", "forward", "backward", "sync", "optimizer")}
        self._state(tok_per_s=speed, step_seconds=seconds, eta_seconds=eta)
        self.attempt.state(tok_per_s=self.plan.total_batch_size / _typical(durations))
        if self.tracker is not None:
            figures = {
                "loss": progress.loss or 0.0,
                "lr_multiplier": rate,
                "tok_per_s": speed,
                "step_seconds": seconds,
            }
            self.tracker.step(
                progress.step,
                {**figures, **{f"{name}_s": value for name, value in split.items()}, "bytes_sent": sent},
            )
        return (
            f"step {progress.step}/{last} loss {progress.loss:.4f} lr {rate:.2f} "
            f"{speed:,.0f} tok/s {seconds:.2f} s "
            f"(data {split['data']:.2f} fwd {split['forward']:.2f} bwd {split['backward']:.2f} "
            f"sync {split['sync']:.2f} opt {split['optimizer']:.2f}) eta {plan.duration(eta)}"
        )

    def _state(self, **figures: Any) -> None:
        """Let heartbeat and outcome know where the run stands."""
        progress = self.progress
        self.attempt.state(**progress.figures())
        self.heartbeat.state(step=progress.step, loss=progress.loss, val_bpb=progress.val_bpb, **figures)

    def _say_expected_time(self, durations: list[float]) -> None:
        if self.place.coordinates:
            left = self.plan.num_iterations - self.progress.step
            seconds = left * _typical(durations)
            at = time.strftime("%a %H:%M", time.localtime(time.time() + seconds))
            self.say(f"About {plan.duration(seconds)} for the {left} steps left, until {at}.")

    def _evaluate(self) -> None:
        self.heartbeat.enter("evaluate")
        token_bytes = torch.from_numpy(self.data.tokenizer.token_bytes)
        bpb, loss = evaluate(
            self.model,
            self.data.val,
            token_bytes,
            self.config.eval_tokens,
            self.config.device_batch_size,
            self.group,
        )
        self.progress.val_bpb = bpb
        self._state()
        if self.tracker is not None:
            self.tracker.step(self.progress.step, {"val_bpb": bpb, "val_loss": loss})
            self.say(f"step {self.progress.step}: {bpb:.4f} bits per byte, validation loss {loss:.4f}")

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _save(self) -> None:
        """Gather what is shared out and let rank 0 write it; a full disk ends the run on all ranks."""
        self.heartbeat.enter("checkpoint")
        started = time.monotonic()
        optim = checkpoint.gather_optimizer(self.group, self.sync, self.optimizer)
        problem = None
        if self.place.coordinates:
            state = checkpoint.State(self._meta(), dict(self.model.state_dict()), optim)
            try:
                path = checkpoint.save(self._checkpoints, state, self.data_dir / "tokenizer")
                self.progress.checkpoint = path.relative_to(self.run_dir).as_posix()
                self.say(f"Saved {self.progress.checkpoint} in {time.monotonic() - started:.1f} s.")
            except OSError as error:
                problem = (
                    f"The checkpoint of step {self.progress.step} cannot be written to {self._checkpoints}: "
                )
                problem += f"{error.strerror or error}."
        self.group.agree(problem)
        self._state()

    def _meta(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "run_id": self.run_file.run_id,
            "step": progress.step,
            "num_iterations": self.plan.num_iterations,
            "tokens": progress.step * self.plan.total_batch_size,
            "first_loss": progress.first_loss,
            "loss": progress.loss,
            "val_bpb": progress.val_bpb,
            "config": self.config.to_dict(),
            "config_digest": self.config.digest(),
            "model_config": self.plan.model.__dict__,
            "hashes": self.data.hashes,
            "world_size": self.place.world_size,
            "shares": self.plan.shares,
            "numerics": self.saved_numerics,
            "hosts": [peer.host for peer in self.group.peers],
            "torch": torch.__version__,
            "time": time.time(),
        }

    def _write_sample(self) -> None:
        pieces = stream_text(
            self.model, self.data.tokenizer, SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE
        )
        text = SAMPLE_PROMPT + "".join(pieces)
        write_whole(self.run_dir / "sample.txt", (text + "\n").encode())
        self.attempt.state(sample=text)
        self.say("sample: " + "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text))

    def _part(self) -> None:
        self.heartbeat.enter("done")
        self.group.close()

    @contextmanager
    def telling_where(self) -> Iterator[None]:
        """Add phase and step to what a lost peer's message says."""
        try:
            yield
        except PeerLost as error:
            raise Retryable(f"In {self.heartbeat.phase} after step {self.progress.step}: {error}") from None


def load_data(data_dir: Path, sequence_len: int) -> Data:
    """Rows (packed now where they are missing), tokenizer, and the hashes that all ranks must share."""
    if not data_dir.is_dir():
        raise DataError(
            f"There is no data directory {data_dir}. Make it with: python -m trainer prepare --source FOLDER "
            f"--out {data_dir}"
        )
    info = pack(data_dir, sequence_len)
    rows = Rows(info.path)
    hashes = {
        "manifest": file_sha256(data_dir / "manifest.json")[:16],
        "tokenizer": file_sha256(data_dir / "tokenizer" / FILE_NAME)[:16],
        "rows": info.digest[:16],
    }
    return Data(Tokenizer.load(data_dir / "tokenizer"), info, rows.split("train"), rows.split("val"), hashes)


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
    with run.telling_where():
        return run.go(tracker_uri or os.environ.get("MLFLOW_TRACKING_URI", ""))


def _typical(durations: list[float]) -> float:
    """The mean step after the first, which also warms up; of late ones, for the pace may change."""
    late = durations[1:][-50:] or durations
    return sum(late) / len(late)


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
