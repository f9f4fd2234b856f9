"""The sign of life of a rank: heartbeat-<rank>.json in its run directory, replaced at each phase and step.

The same calls keep the time each phase took, since both need to know where the loop is. Once started, a
thread beats on while the main thread waits or computes: the file's age says whether the process lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainer.health.sensors import Heat
from trainer.host.rank_env import Place

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
OF_A_STEP = ("data", "forward", "backward", "sync", "optimizer")
BEAT_SECONDS = 1.0
HEAT_SECONDS = 10.0
CPU_WINDOW = 5  # beats that the share of a core is taken over


class Stage(NamedTuple):
    """What is to be over in a reasonable time: a step, an evaluation, the loading."""

    name: str  # step, or a phase that belongs to none
    step: int  # the updates done when it began
    seconds: float  # since then


class Heartbeat:
    """States phase, step and figures; `lap` gives the seconds spent in each phase since the last lap."""

    def __init__(
        self, run_dir: Path, place: Place, run_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make it on the thread that trains."""
        self.path = run_dir / f"heartbeat-{place.rank}.json"
        self.phase = ""
        self.waits: Callable[[], bool] = lambda: False  # whether it is in a collective
        self._clock = clock
        self._entered = self._stage_entered = clock()
        self._stage = ("load", 0)
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._cpu = CpuClock()
        self._heat = Heat()
        self._state: dict[str, Any] = {
            "run_id": run_id,
            "rank": place.rank,
            "world_size": place.world_size,
            "host": place.host,
            "pid": os.getpid(),
            "phase": "",
            "entered": None,
            "step": 0,
            "num_iterations": None,
            "loss": None,
            "val_bpb": None,
            "tok_per_s": None,
            "tok_per_s_average": None,
            "step_seconds": None,
            "eta_seconds": None,
            "sync_share": None,
            "shares": None,
            "checkpoint": None,
            "cpu": None,
            "temperature": None,
            "throttled": None,
            "stall_seconds": None,
            "blame": None,
            "warning": None,
        }

    def start(self, every_seconds: float = BEAT_SECONDS) -> None:
        """From now on beat by itself too."""
        threading.Thread(target=self._work, args=(every_seconds,), name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _work(self, every_seconds: float) -> None:
        heat_at = time.monotonic()
        while not self._stopped.wait(every_seconds):
            if time.monotonic() >= heat_at:
                heat_at += HEAT_SECONDS
                self._state.update(self._heat.look())
            self._state["cpu"] = self._cpu.share(self._entered)
            self._write()

    def enter(self, phase: str) -> None:
        """Leave the current phase for `phase`."""
        if phase not in PHASES:
            raise ValueError(f"{phase} is none of the phases {', '.join(PHASES)}")
        now = self._clock()
        if self.phase:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._entered
        self._entered = now
        if phase != self.phase:
            self.phase = phase
            self._state["entered"] = time.time()
            self._note_stage(now)
            self._write()

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, the current phase's included."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def move(self, phase: str, other: str, seconds: float) -> None:
        """Count some of a phase's time as another's: what was waited for in its midst."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) - seconds
        self._seconds[other] = self._seconds.get(other, 0.0) + seconds

    def state(self, **figures: Any) -> None:
        """Set figures such as step, loss, val_bpb and write them down."""
        unknown = figures.keys() - self._state.keys()
        if unknown:
            raise ValueError(f"a heartbeat has no {', '.join(sorted(unknown))}")
        self._state.update(figures)
        self._note_stage(self._clock())
        self._write()

    def _note_stage(self, now: float) -> None:
        stage = ("step" if self.phase in OF_A_STEP else self.phase, int(self._state["step"]))
        if stage != self._stage:
            self._stage_entered, self._stage = now, stage
            self._state["blame"] = None

    @property
    def stage(self) -> Stage:
        """What the rank is at, and for how long."""
        return Stage(*self._stage, self._clock() - self._stage_entered)

    @property
    def step_seconds(self) -> float:
        """The median step; 0 before there was one."""
        return float(self._state["step_seconds"] or 0.0)

    def told(self) -> dict[str, Any]:
        """What the other ranks may want to know: where it is, for how long, how busy."""
        stage = self.stage
        return {
            "phase": self.phase,
            "step": self._state["step"],
            "stage": stage.name,
            "stage_seconds": round(stage.seconds, 1),
            "phase_seconds": round(self._clock() - self._entered, 1),
            "waits": self.waits(),
            "cpu": self._cpu.share(self._entered),
            "temperature": self._state["temperature"],
            "throttled": self._state["throttled"],
        }

    def _write(self) -> None:
        """Replace the file; not synced to the disk, since a sign of life need not outlive the machine."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self._lock:
            content = json.dumps({**self._state, "phase": self.phase, "time": time.time()}).encode()
            try:
                temporary.write_bytes(content)
                os.replace(temporary, self.path)
            except OSError:
                with contextlib.suppress(OSError):  # no sign of life is worth the end of a run
                    self._write_over(content, temporary)

    def _write_over(self, content: bytes, temporary: Path) -> None:
        """On a full disk, into the file that is there: its block can take it."""
        temporary.unlink(missing_ok=True)
        with open(self.path, "r+b", buffering=0) as file:
            file.write(content.ljust(os.fstat(file.fileno()).st_size))


class CpuClock:
    """How much of a core the thread that made it has used of late, as a share; None where nobody tells."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=CPU_WINDOW + 1)
        tell = getattr(time, "pthread_getcpuclockid", None)
        self._clock = tell(threading.get_ident()) if tell else None
        self.share(0.0)

    def share(self, since: float) -> float | None:
        """Over the last seconds, none of them before `since` by the monotonic clock."""
        if self._clock is None:
            return None
        now, used = time.monotonic(), time.clock_gettime(self._clock)
        if not self._marks or now - self._marks[-1][0] >= BEAT_SECONDS / 2:
            self._marks.append((now, used))
        marks = [mark for mark in list(self._marks)[:-1] if mark[0] >= since]
        if not marks:
            return None
        then, before = marks[0]
        return round((used - before) / (now - then), 2)
