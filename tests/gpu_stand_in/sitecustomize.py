"""A stand-in for a GPU, for machines that have none: Python imports this at its start, where it finds it.

A rank that is one of several finds a GPU on its host that takes next to no time. A rank by itself finds none:
what a run does there that was left to it, it does on the CPU. What a GPU computes is not tried with this.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any


def stand_in() -> None:
    """Let this process find a fast GPU beside its CPU."""
    from trainer import setup
    from trainer.host.numerics import Options
    from trainer.placement import decide
    from trainer.placement.microbenchmark import Speed

    explore = setup.explore

    def explore_both(*arguments: Any) -> Options:
        found = explore(*arguments)
        return replace(found, cuda=replace(found.cpu, processor="a stand-in for a GPU"), gpus=1)

    setup.explore = explore_both  # type: ignore[attr-defined]
    decide.measure_gpu = lambda *_: Speed(1e-5, 1e-5, 1e-5)  # type: ignore[attr-defined]


if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
    stand_in()
