"""`python -m trainer plan`: what a step would take, alone and in every sync mode. Nothing is trained or kept.

python -m trainer plan --data-dir data --depth 8
torchrun ... -m trainer plan --data-dir data --depth 8 --shares auto        # on every host, as for train
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from trainer.config import RunFile
from trainer.health.attempt import Attempt
from trainer.health.run_status import Heartbeat
from trainer.health.watchdog import Watchdog
from trainer.host.logger import Voice
from trainer.host.rank_env import Place
from trainer.outcome import RunEnd
from trainer.run_plan import describe
from trainer.setup import Beginning


class Previewed(Beginning):
    """The way to step 0, for the sake of what is said on it."""

    def predicts(self) -> bool:
        return True

    def trains(self) -> bool:
        return False


def preview(run_file: RunFile, data_dir: Path, place: Place, say: Voice) -> int:
    """Meet, measure, say the table, part; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="nanofleet-plan-") as folder:
        run_dir = Path(folder)
        heartbeat = Heartbeat(run_dir, place, run_file.run_id)
        watchdog = Watchdog(heartbeat, place, run_dir, Attempt(run_dir, place), say)
        way = Previewed(run_file, data_dir, run_dir, place, heartbeat, watchdog, say)
        watchdog.start()
        try:
            ready = way.ready()
            if place.coordinates:
                rows, sizes = ready.data.info.train_rows, ready.micro_batches
                say(describe(ready.plan, run_file.config, ready.model, rows, sizes))
            ready.group.close()
        except RunEnd as end:
            print(end, file=sys.stderr)
            return 1
        finally:
            watchdog.stop()
            heartbeat.stop()
    return 0
