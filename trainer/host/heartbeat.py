"""The sign of life of a rank: heartbeat-<rank>.json in its run directory, replaced at each phase and step.

The same calls keep the time each phase took, since both need to know where the loop is.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trainer.host.place import Place

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


class Heartbeat:
    """States phase, step and figures; `lap` gives the seconds spent in each phase since the last lap."""

    def __init__(self, run_dir: Path, place: Place, run_id: str) -> None:
        self.path = run_dir / f"heartbeat-{place.rank}.json"
        self.phase = ""
        self._entered = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._state: dict[str, Any] = {
            "run_id": run_id,
            "rank": place.rank,
            "world_size": place.world_size,
            "host": place.host,
            "pid": os.getpid(),
            "phase": "",
            "step": 0,
            "num_iterations": None,
            "loss": None,
            "val_bpb": None,
            "tok_per_s": None,
            "step_seconds": None,
            "eta_seconds": None,
        }

    def enter(self, phase: str) -> None:
        """Leave the current phase for `phase`."""
        if phase not in PHASES:
            raise ValueError(f"{phase} is none of the phases {', '.join(PHASES)}")
        now = time.monotonic()
        if self.phase:
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._entered
        self._entered = now
        if phase != self.phase:
            self.phase = phase
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
        self._write()

    def _write(self) -> None:
        """Replace the file; not synced to the disk, since a sign of life need not outlive the machine."""
        self._state["phase"] = self.phase
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            temporary.write_text(json.dumps({**self._state, "time": time.time()}), encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError:  # a full disk must not end a run for the sake of a sign of life
            temporary.unlink(missing_ok=True)
