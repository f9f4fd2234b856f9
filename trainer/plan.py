"""`python -m trainer plan`: predict the seconds of a step, on one host and in each sync mode; does not train.

python -m trainer plan --data-dir data --depth 8
torchrun ... -m trainer plan --data-dir data --depth 8 --shares auto        # on every host, as for train
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from trainer.config import RunFile
from trainer.health.attempt import Attempt
from trainer.health.run_status import RunStatus
from trainer.health.watchdog import Watchdog
from trainer.host.logger import RunLogger
from trainer.host.rank_env import RankEnv
from trainer.outcome import RunEnd
from trainer.run_plan import describe_plan
from trainer.setup import RunSetup


def preview(run_file: RunFile, data_dir: Path, env: RankEnv, log: RunLogger) -> int:
    """Set up this rank in a temporary directory and log plan and prediction. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="nanofleet-plan-") as folder:
        run_dir = Path(folder)
        run_status = RunStatus(run_dir, env, run_file.run_id)
        watchdog = Watchdog(run_status, env, run_dir, Attempt(run_dir, env), log)
        setup = RunSetup(run_file, data_dir, run_dir, env, run_status, watchdog, log)
        setup.predicts, setup.trains = True, False
        watchdog.start()
        try:
            setup.run()
            if env.is_coordinator:
                rows, sizes = setup.data.info.train_rows, setup.micro_batches
                log.info(describe_plan(setup.plan, run_file.config, setup.model, rows, sizes))
            setup.group.close()
        except RunEnd as end:
            print(end, file=sys.stderr)
            return 1
        finally:
            watchdog.stop()
            run_status.stop()
    return 0
