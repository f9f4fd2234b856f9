"""Measures training steps, with the training loop of a run but without evaluation, checkpoints and tracker.

    trainer = BenchTrainer(run_file, data_dir, run_dir, env, attempt, log)
    trainer.run()
    trainer.result                                                          # on rank 0, else {}

The first WARM_STEPS steps are not measured. GEMM rate and copy bandwidth are measured in the same
process before, between and after the steps, since the speed of a host changes within a minute. All ranks
measure them at the same time, when no transfer is in flight. With several ranks the effective bandwidth of an
all-reduce is measured too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.bench import SCHEMA, WARM_STEPS
from trainer.bench.limits import Rates, count_operations, measure
from trainer.config import RunFile
from trainer.data import VOCAB_SIZE
from trainer.data.dataset import Dataset
from trainer.data.rows import RowsInfo, row_dtype
from trainer.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from trainer.distributed.process_group import CPU
from trainer.distributed.step_sync import StepSummary
from trainer.health.run_status import STEP_PHASES
from trainer.host.facts import host_facts
from trainer.host.network_interface import NetworkInterface
from trainer.host.numerics import name_of
from trainer.host.rank_env import RankEnv
from trainer.placement.cost_model import transfer_seconds
from trainer.placement.microbenchmark import Link, measure_link
from trainer.tracking.files import METRICS, read_lines
from trainer.train import Trainer

LINK_REPEATS = 3
PIECE_BYTES = 128 * 2**20  # of the all-reduce that is measured, so that it needs little memory
ROWS = 512  # of synthetic data
SEED = 7

Result = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """The clocks and byte counters of a rank at the start or end of a step.

    wall: seconds of time.monotonic(). cpu: CPU seconds of this process.
    counted: bytes sent so far, as the trainer counts them.
    sent: bytes sent so far, as the network interface counts them; None with one rank, or if the interface has
        no counters.
    """

    wall: float
    cpu: float
    counted: int
    sent: int | None


class BenchTrainer(Trainer):
    """A trainer that measures its steps.

    run_file, run_dir, env, and `more` (attempt, log): as for Trainer. data_dir: None for synthetic rows.
    After `run`, the attribute `result` on rank 0 is the content of a result file; {} on the other ranks. Its
    main keys are
    depth, sequence_len, tokens (of a step), shares (rows by rank), sync, world_size, hosts (by rank).
    steps: number of measured steps.
    step_seconds: median seconds of a step. step_seconds_all: seconds of each measured step.
    tok_per_s: tokens per second. share_of_limit: result of the function of this name.
    split: {phase: median seconds of this phase in a step}.
    predicted_seconds: seconds of a step by the cost model; None if nothing was predicted.
    ranks: for each rank a dict with host, device, compute_dtype, threads, rows, rates, peak_rss, counted, and
        others.
    """

    def __init__(
        self, run_file: RunFile, data_dir: Path | None, run_dir: Path, env: RankEnv, *more: Any
    ) -> None:
        super().__init__(run_file, data_dir or Path(), run_dir, env, *more)
        self.setup.evaluates_core = False
        self.setup.predicts = env.world_size > 1  # to compare with
        if data_dir is None:
            self.setup.open_data = lambda: synthetic(self.config.sequence_len)  # type: ignore[method-assign]
        self.interface = NetworkInterface(env.address()) if env.world_size > 1 else None
        self.marks: list[Mark] = []  # as each step begins
        self.ends: list[Mark] = []
        self.rates: list[Rates] = []
        self._peak = 0  # bytes, of the steps and not of the measurements between them
        self.result: Result = {}

    @property
    def sync_name(self) -> str:
        """The sync mode of the benchmark case; "" with one rank."""
        return self.setup.placement.sync if self.env.world_size > 1 else ""

    def train(self) -> bool:
        stopped = super().train()
        if stopped:
            return True
        self.ends.append(self._mark())
        self.sync.finish()
        self._measure()
        mine = json.dumps(self._of_this_rank() | self._measure_transfers()).encode()
        ranks = [json.loads(raw) for raw in self.group.gather_bytes(mine)]
        if self.env.is_coordinator:
            self.result = self._of_all(ranks)
        return False

    def train_step(self, step: int) -> None:
        self._mark_step(step)
        super().train_step(step)

    def _mark_step(self, step: int) -> None:
        """Before `step`: mark its start, and measure the rates of the roofline limit outside of the step.

        The rates are not measured before the first WARM_STEPS steps or while a transfer is in flight.
        """
        if self.marks:
            self.ends.append(self._mark())
        if step >= WARM_STEPS and self.sync.is_idle():
            self._measure()
        self.marks.append(self._mark())

    def _mark(self) -> Mark:
        sent = self.interface.counters()[0] if self.interface else None
        return Mark(time.monotonic(), time.process_time(), self.group.bytes_sent, sent)

    def _measure(self) -> None:
        numerics = self.setup.numerics
        self._peak = max(self._peak, self._peak_bytes())
        with self._long_phase("evaluate"):
            self.rates.append(measure(numerics.compute_dtype, numerics.device))
            self._forget_peak()
            self.group.all_reduce([torch.zeros(1)])  # all ranks continue at the same time

    def _measure_transfers(self) -> Result:
        """Measure all-reduces while no rank computes. Returns three figures; they are None with one rank.

        reduce_bandwidth: effective bandwidth in bytes/s. reduce_measured: seconds of an all-reduce in which
        each rank sends as many bytes as the rank that sends most in a step. reduce_computed: these seconds as
        the cost model predicts them.
        """
        if self.group.world_size == 1:
            return dict.fromkeys(("reduce_bandwidth", "reduce_measured", "reduce_computed"))
        mean = statistics.mean if self.sync_name == "local" else statistics.median
        mine = round(mean(end.counted - begin.counted for begin, end in self._spans()))
        sent = int(self.group.gather_int64(torch.tensor([mine])).max())
        with self._long_phase("evaluate"):
            links = [link for _ in range(LINK_REPEATS) if (link := measure_link(self.group, CPU))]
            bandwidth, latency = (
                statistics.median(getattr(link, name) for link in links) for name in ("bandwidth", "latency")
            )
            return {
                "reduce_bandwidth": bandwidth,
                "reduce_measured": self._seconds_of_all_reduce(sent),
                "reduce_computed": transfer_seconds(sent, Link(bandwidth, latency)),
            }

    def _seconds_of_all_reduce(self, sent: int) -> float:
        """Measure the seconds of all-reduces in which each rank sends `sent` bytes in all.

        Each all-reduce has at most PIECE_BYTES.
        """
        n = self.group.world_size
        left = round(sent * n / (2 * (n - 1)) / 4)
        buffer = torch.zeros(min(left, PIECE_BYTES // 4))
        self.group.all_reduce([torch.zeros(1)])  # all ranks begin at the same time
        began = time.monotonic()
        while left > 0:
            self.group.all_reduce([buffer[:left]])
            left -= len(buffer)
        return time.monotonic() - began

    # -- parts of a run that are not measured ------------------------------------------------------------

    def _finish_sync(self) -> None: ...  # would distort the mean of a few steps; `train` runs it later

    def _evaluate_and_save(self, summary: StepSummary, step: int, is_last: bool) -> None: ...

    # -- the figures -------------------------------------------------------------------------------------

    def _spans(self) -> list[tuple[Mark, Mark]]:
        """(Begin, end) of each measured step, without the first WARM_STEPS."""
        return list(zip(self.marks, self.ends, strict=True))[WARM_STEPS:]

    def _peak_bytes(self) -> int:
        """The peak memory of this process in bytes.

        On a GPU: the most GPU memory that torch has reserved so far. Else the most resident memory, on Linux
        since the last `_forget_peak`.
        """
        if self.setup.numerics.device.type == "cuda":
            return torch.cuda.max_memory_reserved()
        with contextlib.suppress(OSError, StopIteration):
            status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            return int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def _forget_peak(self) -> None:
        """Reset the peak resident memory, so that it excludes the measurements between steps. Linux only."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def _of_this_rank(self) -> Result:
        """The figures of this rank, without those of `_measure_transfers`."""
        rows = self.plan.shares[self.env.rank]
        names = [matrix.name for matrix in self.optimizer.muon_parameters()]
        owned = {name for name in names if self.sync.owner_of(name) in (None, self.env.rank)}
        work = count_operations(self.model, self.optimizer, owned, rows * self.config.sequence_len)
        rates, numerics = Rates.median(self.rates), self.setup.numerics
        spans = self._spans()
        used = sum(b.cpu - a.cpu for a, b in spans) / sum(b.wall - a.wall for a, b in spans)
        counted = [b.counted - a.counted for a, b in spans]
        sent = [b.sent - a.sent for a, b in spans if a.sent is not None and b.sent is not None]
        return {
            "rank": self.env.rank,
            "host": self.env.host,
            "processor": numerics.processor,
            "cpu": host_facts().get("cpu", ""),
            "device": numerics.device.type,
            "compute_dtype": name_of(numerics.compute_dtype),
            "threads": numerics.threads,
            "rows": rows,
            "cpu_share": used / numerics.threads,
            "peak_rss": self._peak,
            "work": asdict(work),
            "rates": asdict(rates),
            "rates_all": [asdict(one) for one in self.rates],
            "limit_seconds": work.seconds(rates),
            "limit_seconds_all": [work.seconds(one) for one in self.rates],
            "interface": self.interface.name if self.interface else "",
            "link_mbit": self.interface.link_mbit() if self.interface else None,
            "counted": statistics.median(counted),
            "counted_mean": statistics.mean(counted),
            "sent": statistics.median(sent) if sent else None,
            "sent_mean": statistics.mean(sent) if sent else None,
        }

    def _of_all(self, ranks: list[Result]) -> Result:
        lines = read_lines(self.run_dir / METRICS)
        steps = [line for _, line in lines if "step_seconds" in line][WARM_STEPS:]
        seconds = [step["step_seconds"] for step in steps]
        walls = [end.wall - begin.wall for begin, end in self._spans()]
        step_seconds = statistics.median(seconds)
        placement, config = self.setup.placement, self.config
        return {
            "schema": SCHEMA,
            "run_id": self.run_file.run_id,
            "depth": config.depth,
            "parameters": self.model.param_counts()["total"],
            "sequence_len": config.sequence_len,
            "device_batch_size": config.device_batch_size,
            "tokens": self.plan.total_batch_size,
            "shares": list(self.plan.shares),
            "sync": self.sync_name,
            "predicted_seconds": placement.prediction.step_seconds if placement.prediction else None,
            "world_size": self.env.world_size,
            "hosts": [peer.host for peer in self.group.peers],
            "steps": len(seconds),
            "step_seconds": step_seconds,
            "step_seconds_mean": statistics.mean(walls),
            "step_seconds_all": seconds,
            "tok_per_s": self.plan.total_batch_size / step_seconds,
            "split": {name: statistics.median(step[f"{name}_s"] for step in steps) for name in STEP_PHASES},
            "share_of_limit": share_of_limit([rank["limit_seconds_all"] for rank in ranks], seconds),
            "ranks": ranks,
            "torch": torch.__version__,
            "time": time.time(),
        }


def share_of_limit(limits: Sequence[Sequence[float]], steps: Sequence[float]) -> float:
    """The roofline limit divided by the measured seconds of a step: 1 would be the fastest possible step.

    limits: by rank, the limits in seconds, one for each measurement. steps: measured seconds of each step.
    The limit of a measurement is that of its slowest rank. If there is a measurement before and after each
    step, a step is compared with the mean of these two limits, and the result is the median over the steps.
    If there are fewer measurements, the result is the mean limit divided by the median step.
    """
    longest = [max(ranks) for ranks in zip(*limits, strict=True)]
    if len(longest) != len(steps) + 1:
        return statistics.mean(longest) / statistics.median(steps)
    pairs = itertools.pairwise(longest)
    return statistics.median((a + b) / 2 / step for (a, b), step in zip(pairs, steps, strict=True))


def synthetic(sequence_len: int, vocab_size: int = VOCAB_SIZE) -> Dataset:
    """Create a dataset of random rows in memory, with token ids distributed by Zipf's law, as words in text.

    A row has about as many distinct ids as a row of text.
    """
    draw = np.random.default_rng(SEED)
    weights = 1 / np.arange(1, vocab_size + 1)
    ids = draw.choice(vocab_size, size=(ROWS, sequence_len + 1), p=weights / weights.sum())
    rows = ids.astype(row_dtype(vocab_size))
    merges = [number.to_bytes(1 if number < 256 else 3, "big") for number in range(vocab_size)]
    tokenizer = Tokenizer(merges[: vocab_size - len(SPECIAL_TOKENS)])
    info = RowsInfo(
        path=Path(),
        digest="synthetic",
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        train_rows=ROWS,
        val_rows=ROWS,
        train_sha256="synthetic",
        val_sha256="synthetic",
        packed=False,
    )
    hashes = dict.fromkeys(("manifest", "tokenizer", "rows"), "synthetic")
    return Dataset(tokenizer, info, rows, rows, hashes)
