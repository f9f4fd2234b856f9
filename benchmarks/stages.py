"""What `make bench` measures: the stages by name, on which state of the lab, and about how long each takes.

A stage is named KIND-TOKENS-FORMAT[-SHARES][-on-HOST], as bench.yml has it, or idle/ and such a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.bench import WARM_STEPS

DEPTH, LENGTH, VOCAB_SIZE = 8, 1024, 32_768
A_THIRD = 0.33  # of a core, for the slow host of the uneven pair
STAGE_SECONDS = 45.0  # to start, measure the limits and take away


@dataclass(frozen=True)
class Group:
    """Stages measured on one state of the lab, in this order. `takes` are solo stages of the first group."""

    name: str
    link: str
    stages: tuple[str, ...]
    takes: tuple[str, ...] = ()
    slow_second: bool = False


IDLE = "idle/"  # a solo stage with the other host at rest
SOLO = (f"{IDLE}solo-4096-float32", f"{IDLE}solo-16384-float32")
GROUPS = (
    Group(
        "1gbit",
        "1gbit",
        (
            SOLO[0],
            "solo-2048-float32",
            "solo-4096-float32",
            "exact-4096-float32",
            "dense-4096-float32",
            "fast-4096-float32",
            "solo-2048-bfloat16",
            "solo-4096-bfloat16",
            "fast-4096-bfloat16",
            "solo-8192-bfloat16",
            "solo-16384-bfloat16",
            "fast-16384-bfloat16",
            SOLO[1],
            "solo-8192-float32",
            "solo-16384-float32",
            "exact-16384-float32",
        ),
    ),
    Group("100mbit", "100mbit", ("local-8192-float32", "solo-4096-float32")),  # solo anew, an hour later
    Group(
        "uneven",
        "1gbit",
        ("solo-4096-float32-on-{slow}", "exact-16384-float32-auto", "exact-16384-float32-8.8"),
        SOLO,
        slow_second=True,
    ),
)
HOST_STAGES = ("host-float32", "host-bfloat16")
QUICK = ("host-float32", "solo-2048-float32", "solo-4096-float32", "exact-4096-float32")
FEWEST, FEW, MANY = 2, 4, 5  # steps of a stage, by how long one takes
HOST_STEPS = 12
LOCAL_STEPS = 30  # a round of H 30


def plain(stage: str) -> str:
    """Its name for bench.yml, which knows nothing of what the other host does meanwhile."""
    return stage.removeprefix(IDLE)


def has_neighbour(stage: str) -> bool:
    """Whether the other host trains by itself while the stage is measured."""
    return stage.startswith("solo") and "-on-" not in stage


def kind_of(stage: str) -> tuple[int, str, str]:
    """What stages measured together have in common: steps, folder, and the neighbour's number format."""
    folder = IDLE if stage.startswith(IDLE) else ""
    return steps_of(stage), folder, stage.rpartition("-")[2] if has_neighbour(stage) else ""


def steps_of(stage: str) -> int:
    if stage.startswith("local"):
        return LOCAL_STEPS
    if stage.startswith("host"):
        return HOST_STEPS
    if "-on-" in stage or stage.endswith("8.8"):
        return FEWEST
    return FEW if "16384" in stage or "8192" in stage else MANY


def core_rate() -> float:
    """FLOP/s of one core in float32."""
    import torch

    from trainer.host.gemm import gemm_rates

    return gemm_rates([torch.float32])[torch.float32]


def expected(stage: str, rate: float) -> float:
    """Seconds of a stage, roughly: a core at three quarters of its rate, two of them where two ranks are."""
    tokens = int(match[0]) if (match := re.search(r"\d{4,}", stage)) else 2048
    cores = 1 if plain(stage).startswith("solo") else 2
    speed = 0.75 * rate * (2 if "bfloat16" in stage else 1) * (A_THIRD if "-on-" in stage else 1)
    if stage.endswith("8.8"):
        speed *= 2 / 3
    step = (273.7e6 * tokens + 322e9) / (cores * speed)
    if "4096" in stage and cores == 2 and not stage.startswith("exact"):
        step += 3  # the wire
    return STAGE_SECONDS + step * (steps_of(stage) + WARM_STEPS)
