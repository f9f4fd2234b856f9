"""Keeps the run status of this rank in heartbeat-<rank>.json, which is replaced at each phase and step.

RunStatus also measures the seconds of each phase. A thread writes the file every second too, while the main
thread computes or waits: an old file shows that the process does not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.health.sensors import Sensors
from trainer.health.status_record import RunStatusRecord
from trainer.host.rank_env import RankEnv

PHASES = (
    "load",
    "compile",
    "resume",
    "data",
    "forward",
    "backward",
    "sync",
    "optimizer",
    "evaluate",
    "checkpoint",
    "done",
)
STEP_PHASES = ("data", "forward", "backward", "sync", "optimizer")
PUBLISH_SECONDS = 1.0
SENSOR_SECONDS = 10.0
CPU_WINDOW = 5  # publications over which the share of a core is measured


class Stage(NamedTuple):
    """A unit of work that the watchdog times: a step, an evaluation, loading.

    name: "step", or a phase outside of steps. step: the number of steps completed before the stage. seconds:
    the time since the stage began.
    """

    name: str
    step: int
    seconds: float


class RunStatus:
    """Keeps the run status of this rank, and writes it to heartbeat-RANK.json in the run directory.

    path: the heartbeat file. is_waiting: function that returns whether the rank waits in a collective; the
    setup of the run sets it.
    """

    def __init__(
        self, run_dir: Path, env: RankEnv, run_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin in the stage load; the first call of `enter` begins the first phase.

        Call this on the thread that trains: the CPU time of this thread is measured. run_dir: the folder of
        the heartbeat file. env: the environment of this rank. run_id: the name of the run. clock: returns the
        time in seconds; tests pass another one.
        """
        self.path = run_dir / f"heartbeat-{env.rank}.json"
        self.is_waiting: Callable[[], bool] = lambda: False  # whether the rank waits in a collective
        self._clock = clock
        self._entered = self._stage_entered = clock()
        self._stage = ("load", 0)
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._cpu = CpuUsage()
        self._sensors = Sensors()
        self._record = RunStatusRecord(
            run_id=run_id, rank=env.rank, world_size=env.world_size, host=env.host, pid=os.getpid()
        )

    def start(self, every_seconds: float = PUBLISH_SECONDS) -> None:
        """Start the thread that writes the heartbeat file every `every_seconds`."""
        threading.Thread(target=self._work, args=(every_seconds,), name="run status", daemon=True).start()

    def stop(self) -> None:
        """End the thread that writes the heartbeat file."""
        self._stopped.set()

    def _work(self, every_seconds: float) -> None:
        sensors_at = time.monotonic()
        while not self._stopped.wait(every_seconds):
            if time.monotonic() >= sensors_at:
                sensors_at += SENSOR_SECONDS
                self._set(**self._sensors.read())
            self._record.cpu = self._cpu.share(self._entered)
            self._write()

    @property
    def phase(self) -> str:
        """The current phase, one of PHASES; "" before the first."""
        return self._record.phase

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`, one of PHASES."""
        if phase not in PHASES:
            raise ValueError(f"{phase} is not one of the phases {', '.join(PHASES)}")
        before = self.phase
        self._switch(phase)
        if phase != before:
            self._enter_stage(self._entered)
            self._write()

    def _switch(self, phase: str) -> None:
        now = self._clock()
        if self.phase:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._entered
        self._entered = now
        if phase != self.phase:
            self._record.phase, self._record.entered = phase, time.time()

    def waiting(self) -> AbstractContextManager[None]:
        """Context around a wait for other ranks: within a step, its seconds count for the phase sync."""
        return self.during("sync")

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context whose seconds count for `phase` within a step, and for the current phase outside of steps.

        It does not write the heartbeat file, because a step has many such contexts. The thread of `start`
        writes the file.
        """
        before = self.phase
        if before == phase or before not in STEP_PHASES:
            yield
            return
        self._switch(phase)
        yield
        self._switch(before)  # not after an error, which happened in `phase`

    def seconds_in(self, *phases: str) -> float:
        """The seconds in these phases together since the last call of `lap`, the current one included."""
        current = self._clock() - self._entered if self.phase in phases else 0.0
        return current + sum(self._seconds.get(phase, 0.0) for phase in phases)

    def lap(self) -> dict[str, float]:
        """The seconds in each phase, also the current one, since the last call of `lap`: {phase: seconds}."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def update(self, **figures: Any) -> None:
        """Set fields of the run status, and write the heartbeat file. figures: fields of RunStatusRecord."""
        self._set(**figures)
        self._enter_stage(self._clock())
        self._write()

    def _set(self, **figures: Any) -> None:
        for name, value in figures.items():
            setattr(self._record, name, value)  # AttributeError for one that the record lacks

    def _enter_stage(self, now: float) -> None:
        stage = ("step" if self.phase in STEP_PHASES else self.phase, self._record.step)
        if stage != self._stage:
            self._stage_entered, self._stage = now, stage
            self._record.diagnosis = None

    def begin_stage_again(self) -> None:
        """Count the seconds of the current stage from 0 again, after a part of the stage is done."""
        self._stage_entered = self._clock()

    @property
    def stage(self) -> Stage:
        """The current stage, and the seconds since it began."""
        return Stage(*self._stage, self._clock() - self._stage_entered)

    @property
    def step_seconds(self) -> float:
        """Seconds of the median step; 0 before the first step has ended."""
        return self._record.step_seconds or 0.0

    def record(self) -> RunStatusRecord:
        """A copy of the run status with the values of this moment: stage, seconds in the phase, CPU share."""
        return replace(
            self._record,
            stage=self.stage.name,
            phase_seconds=round(self._clock() - self._entered, 1),
            waits=self.is_waiting(),
            cpu=self._cpu.share(self._entered),
        )

    def _write(self) -> None:
        """Replace the heartbeat file without fsync: after a crash of the host it may be old or empty."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self._lock:
            self._record.time = time.time()
            content = json.dumps(self._record.heartbeat()).encode()
            try:
                temporary.write_bytes(content)
                os.replace(temporary, self.path)
            except OSError:
                with contextlib.suppress(OSError):  # a status that cannot be written does not end a run
                    temporary.unlink(missing_ok=True)
                    with open(self.path, "r+b", buffering=0) as file:  # on a full disk: write in place
                        file.write(content.ljust(os.fstat(file.fileno()).st_size))


class CpuUsage:
    """Measures the share of a CPU core that one thread uses: the thread that creates the object."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=CPU_WINDOW + 1)
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clock = clock_of(threading.get_ident()) if clock_of else None
        self.share(0.0)

    def share(self, since: float) -> float | None:
        """The share of a core that the thread has used in the last few seconds; 1.0 is a whole core.

        since: a time of time.monotonic(); earlier measurements are left out. None if there is no measurement
        after `since`, or if the system does not measure the CPU time of a thread.
        """
        if self._clock is None:
            return None
        now, used = time.monotonic(), time.clock_gettime(self._clock)
        if not self._marks or now - self._marks[-1][0] >= PUBLISH_SECONDS / 2:
            self._marks.append((now, used))
        marks = [mark for mark in list(self._marks)[:-1] if mark[0] >= since]
        if not marks:
            return None
        then, before = marks[0]
        return round((used - before) / (now - then), 2)
