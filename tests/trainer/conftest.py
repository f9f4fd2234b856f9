"""A small dataset, and ranks started as torchrun starts them, for the tests that train."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow_stand_in import server as server
from rank_process import RankProcess
from tracked_run import track as track

from trainer.__main__ import main
from trainer.config import RunConfig, RunFile
from trainer.health.attempt import Attempt
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv

TINY = {
    "depth": 2,
    "aspect_ratio": 16,
    "head_dim": 16,
    "sequence_len": 32,
    "total_batch_size": 160,  # 5 rows, so that 2 and 3 ranks take uneven slices
    "device_batch_size": 2,
    "num_iterations": 6,
    "warmup_steps": 2,
    "eval_tokens": 320,
    "unembedding_lr": 0.3,
    "dtype": "float32",
    "threads": 1,
    "embedding_lr": 10.0,
    "matrix_lr": 0.8,
    "tracker": "none",
    "digest_every": 1,
}
RATES = {"unembedding_lr": 0.1, "embedding_lr": 1.0, "matrix_lr": 0.1, "scalar_lr": 0.5, "weight_decay": 0.1}
LONGEST_SECONDS = 120.0
OLD_CPU = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts ranks or sends to a tracker takes seconds each: such tests are for `make test`.

    Tests of a GPU run only where they are asked for, by `-m gpu`.
    """
    if config.getoption("markexpr") != "gpu":
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    for item in items:
        if {"start", "begin", "track", "alone"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, tokenizer and rows of some generated text."""
    folder = tmp_path_factory.mktemp("trainer")
    source = folder / "text"
    source.mkdir()
    draw = random.Random(7)
    syllables = [draw.choice("aeiou") + "".join(draw.choices("bcdfglmnprst", k=2)) for _ in range(80)]
    words = [syllable * draw.randint(1, 2) for syllable in syllables]
    for number in range(40):
        sentences = [" ".join(draw.choices(words, k=draw.randint(4, 9))) + ".\n" for _ in range(40)]
        (source / f"{number:02d}.txt").write_text("".join(sentences), encoding="utf-8")
    out = folder / "data"
    assert main(["prepare", "--source", str(source), "--out", str(out), "--vocab-size", "300"]) == 0
    assert main(["prepare", "--rows", "--data-dir", str(out), "--sequence-len", "32"]) == 0
    return out


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, below the range of Linux's ephemeral ports.

    Port 0 would give an ephemeral port, which the next outgoing connection of any process may take
    before the test listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def flags(settings: dict[str, Any]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@dataclass
class Rank:
    """A rank that was started, in a run directory of its own as on a host of its own."""

    process: RankProcess | subprocess.Popen[str]
    run_dir: Path

    def wait(self, seconds: float = LONGEST_SECONDS) -> tuple[int, str]:
        """Its exit code and its output."""
        printed, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, printed

    def outcome(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "outcome.json").read_text()))

    def reach_step(self, step: int, seconds: float = LONGEST_SECONDS) -> None:
        """Wait until its heartbeat says that so many steps are done."""
        deadline = time.monotonic() + seconds
        beat = self.run_dir / "heartbeat-0.json"
        while not (beat.exists() and json.loads(beat.read_text())["step"] >= step):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.02)


Start = Callable[..., list[Rank]]


@pytest.fixture
def start(data_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """Start ranks as torchrun would: start(2, depth=3, per_rank=[{}, {"seed": 1}], env=[{}, OLD_CPU]).

    `faults` are faulty.py's arguments by rank, `within` the command that runs a rank's, `data_dirs` each
    rank's data where they have not the same.
    """
    begun: list[Rank] = []

    def begin(
        world_size: int,
        *,
        name: str = "run",
        per_rank: Sequence[dict[str, Any]] = (),
        env: Sequence[dict[str, str]] = (),
        faults: Sequence[str] = (),
        within: Sequence[list[str]] = (),
        address: str = "127.0.0.1",
        data_dirs: Sequence[Path] = (),
        **settings: Any,
    ) -> list[Rank]:
        port = str(free_port())
        ranks = []
        for rank in range(world_size):
            run_dir = tmp_path / f"{name}-{rank}"
            config = {**TINY, **settings, **(per_rank[rank] if per_rank else {})}
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "GLOO_SOCKET_IFNAME": "lo",
                "NANOFLEET_HOST": f"host-{rank + 1}",
                **(env[rank] if env else {}),
            }
            if world_size > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
                environment |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            fault = faults[rank].split() if faults else []
            arguments = ["train", "--data-dir", str(data_dirs[rank] if data_dirs else data_dir)]
            arguments += ["--run-dir", str(run_dir), "--run-id", "test", *flags(config)]
            is_own = all(name.startswith("NANOFLEET_") for name in (env[rank] if env else {}))
            process: RankProcess | subprocess.Popen[str]
            if is_own and not within:
                log = tmp_path / f"log-{len(begun) + rank}"
                process = RankProcess(fault, arguments, environment, log)
            else:  # a variable that is read when torch is imported, or another namespace
                program = [str(Path(__file__).with_name("faulty.py")), *fault] if fault else ["-m", "trainer"]
                command = [*(within[rank] if within else []), sys.executable, *program, *arguments]
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            ranks.append(Rank(process, run_dir))
        begun.extend(ranks)
        return ranks

    yield begin
    for rank in begun:
        if rank.process.poll() is None:
            rank.process.kill()
            rank.process.communicate()


def train_here(data_dir: Path, run_dir: Path, **settings: Any) -> Attempt:
    """Train as one rank in this process, where torch is already imported."""
    import torch

    from trainer.train import Trainer

    attempt = Attempt(run_dir, RankEnv())
    attempt.begin()
    run_file = RunFile("here", RunConfig.from_strings({**TINY, **settings}))
    try:
        reason = Trainer(run_file, data_dir, run_dir, RankEnv(), attempt, RunLogger(RankEnv())).run()
        attempt.end("finished", reason)
    except Exception as error:
        attempt.end("final", str(error))  # which releases the run directory
        raise
    finally:
        torch.set_flush_denormal(False)  # it belongs to the thread, and the other tests run in it too
    return attempt


def losses(run_dir: Path) -> list[float]:
    """The losses of a run's steps."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]
