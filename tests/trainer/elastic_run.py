"""An elastic run on real processes, for the tests that kill, freeze, end and start its ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, flags, free_port
from rank_process import RankProcess

STEPS = 110
SLOW = "slow 1 0.08"  # seconds longer for each row
CALM = {"matrix_lr": 0.05, "embedding_lr": 0.5, "unembedding_lr": 0.02, "dtype": "float64"}


class ElasticRun:
    """A run of up to `world_size` ranks, each in a run directory of its own as on a host of its own."""

    def __init__(self, data_dir: Path, folder: Path, world_size: int, **settings: Any) -> None:
        self.data_dir, self.folder, self.world_size = data_dir, folder, world_size
        self.settings = {
            **TINY,
            **CALM,
            "num_iterations": STEPS,
            "elastic": "true",
            "sync": "exact",
            **settings,
        }
        self.port = free_port()
        self.leader = 0  # launch rank of the coordinator
        self.processes: dict[int, RankProcess] = {}

    def start(
        self,
        rank: int,
        fault: str = SLOW,
        secret: bytes = b"\x01" * 32,
        data_dir: Path | None = None,
        **settings: Any,
    ) -> None:
        secret_file = self.folder / f"secret-{rank}"
        secret_file.write_text(secret.hex(), encoding="ascii")
        environment = {
            **os.environ,
            "NANOFLEET_SECRET_FILE": str(secret_file),
            "NANOFLEET_TEST_HURRY": str(self.folder / "hurry"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "GLOO_SOCKET_IFNAME": "lo",
            "NANOFLEET_HOST": f"host-{rank + 1}",
            "LOCAL_RANK": "0",
            **self.launch(rank),
        }
        data, folder = data_dir or self.data_dir, self.run_dir(rank)
        arguments = ["train", "--data-dir", str(data), "--run-dir", str(folder)]
        arguments += ["--run-id", "test", *flags({**self.settings, **settings})]
        log = self.folder / f"log-{rank}"
        self.processes[rank] = RankProcess(fault.split(), arguments, environment, log)

    def launch(self, rank: int) -> dict[str, str]:
        """The variables by which a rank finds the others."""
        if rank >= self.world_size:  # it is added to the active run
            return {"NANOFLEET_RANKS": f"{rank} {self.world_size} 127.0.0.1:{self.port}"}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }

    def run_dir(self, rank: int) -> Path:
        return self.folder / f"run-{rank}"

    def changes(self, rank: int) -> list[tuple[int, float]]:
        """(step, number of ranks) after each change of the members, in the metrics.jsonl of a rank."""
        lines = map(json.loads, (self.run_dir(rank) / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["ranks"]) for line in lines if "ranks" in line]

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text(encoding="utf-8")

    def status(self) -> dict[str, Any]:
        path = self.run_dir(self.leader) / "heartbeat-0.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def wait_until(self, holds: Callable[[], bool], what: str, seconds: float = 90.0) -> float:
        """Wait until `holds`; returns the seconds that took."""
        began = time.monotonic()
        while not holds():
            log = self.log(self.leader)
            assert self.processes[self.leader].poll() is None, log
            assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {what}\n{log}"
            time.sleep(0.05)
        return time.monotonic() - began

    def reach(self, step: int) -> None:
        self.wait_until(lambda: int(self.status().get("step", 0)) >= step, f"step {step}")

    def has_ranks(self, count: int) -> float:
        """Wait until that many ranks train; returns the seconds until their first step together."""
        seconds = self.wait_until(lambda: self.status().get("world_size") == count, f"{count} ranks")
        step = int(self.status()["step"])
        return seconds + self.wait_until(lambda: int(self.status()["step"]) > step, "a step")

    def resources(self, rank: int) -> tuple[int, int]:
        """The number of threads and of open files of a rank."""
        process = Path(f"/proc/{self.processes[rank].pid}")
        return len(os.listdir(process / "task")), len(os.listdir(process / "fd"))

    def open_files(self, rank: int) -> list[str]:
        """The names of the files that a rank has open, without their folders."""
        folder = Path(f"/proc/{self.processes[rank].pid}/fd")
        return [Path(os.readlink(path)).name for path in folder.iterdir() if path.is_symlink()]

    def lose(self, rank: int) -> None:
        """Kill a rank without warning."""
        self.processes[rank].kill()
        self.processes[rank].wait()

    def kill(self) -> None:
        """Kill the ranks that have not ended."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def finish(self, rank: int | None = None) -> dict[str, Any]:
        """Wait for the end of a rank, by default of the coordinator; returns its outcome.

        Ranks are no longer slow once the end of the coordinator is awaited.
        """
        rank = self.leader if rank is None else rank
        if rank == self.leader:
            (self.folder / "hurry").touch()
        self.processes[rank].wait(timeout=120)
        return dict(json.loads((self.run_dir(rank) / "outcome.json").read_text()))


def check_losses(run: ElasticRun, expected: list[float], tolerance: float = 1e-10) -> None:
    """Each step is there once, with the loss of the undisturbed run, also if it was trained again."""
    lines = map(json.loads, (run.run_dir(run.leader) / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    for step, loss in found:
        assert loss == pytest.approx(expected[step - 1], rel=tolerance), f"step {step}"
