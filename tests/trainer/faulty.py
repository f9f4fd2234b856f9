"""A rank with a fault planted: at a step, once it has its gradients, it burns, sleeps, fails or diverges.

Or it is slow: from that step on, each row takes so many seconds longer, and rows are shared out anew sooner.

python tests/trainer/faulty.py burn 5 8 train --data-dir ...       # at step 5, for 8 s
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def plant(fault: str, step: int, seconds: float) -> None:
    """Put the fault after the gradients of `step`, counted from 1."""
    from trainer import shares
    from trainer.train import Run

    if fault == "slow":
        shares.WINDOW_STEPS, shares.REST_STEPS = 3, 6
    sound = Run._accumulate

    def accumulate(self: Any, *arguments: Any) -> float:
        loss = sound(self, *arguments)
        if fault == "slow":
            time.sleep(seconds * len(arguments[0]) if self.report.progress.step + 1 >= step else 0)
            return loss
        if self.report.progress.step + 1 != step:
            return loss
        if fault == "fail":
            raise KeyError("a fault of the trainer's own")
        if fault == "diverge":
            return float("nan")
        self.heartbeat.enter("backward")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if fault == "sleep":
                time.sleep(0.1)
        return loss

    Run._accumulate = accumulate  # type: ignore[method-assign]


if __name__ == "__main__":
    from trainer.__main__ import main

    plant(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    code = main(sys.argv[4:])
    sys.stdout.flush()
    os._exit(code)
