"""The benchmark cases of `make bench`: their names, the state of the lab for each, and their duration.

The name of a case is KIND-TOKENS-FORMAT[-SHARES][-on-HOST], as in bench.yml. KIND is a sync mode, `ddp`
(plain DDP) or `single` (a single-host baseline), TOKENS the tokens in a step, FORMAT the dtype, and SHARES
the batch split. With `idle/` before its name, a baseline is measured while the other host is idle. The cases
host-FORMAT measure one process on this machine, without the lab.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.bench import WARM_STEPS

DEPTH, LENGTH, VOCAB_SIZE = 8, 1024, 32_768
A_THIRD = 0.33  # of a core, for the slow host of the uneven pair
LINK_MBIT = {"1gbit": 1000, "100mbit": 100}
CASE_SECONDS = 45.0  # to start a case, measure its limits and remove it


@dataclass(frozen=True)
class Group:
    """Cases that are measured one after the other on the same state of the lab.

    name: the name of the group. link: the rate of the network, such as 100mbit. cases: the names of the
    cases, in their order; {slow} in a name stands for the second host. takes: baselines whose results are
    copied from the first group, not measured again. slow_second: whether the second host gets only the share
    A_THIRD of a core. depth: depth of the model.
    """

    name: str
    link: str
    cases: tuple[str, ...]
    takes: tuple[str, ...] = ()
    slow_second: bool = False
    depth: int = DEPTH


IDLE = "idle/"  # a baseline while the other host is idle
IDLE_BASELINES = (f"{IDLE}single-4096-float32", f"{IDLE}single-16384-float32")
GROUPS = (
    Group(
        "1gbit",
        "1gbit",
        (
            IDLE_BASELINES[0],
            "single-2048-float32",
            "single-4096-float32",
            "exact-4096-float32",
            "dense-4096-float32",
            "ddp-4096-float32",
            "fast-4096-float32",
            "single-2048-bfloat16",
            "single-4096-bfloat16",
            "ddp-4096-bfloat16",
            "fast-4096-bfloat16",
            "single-8192-bfloat16",
            "single-16384-bfloat16",
            "fast-16384-bfloat16",
            IDLE_BASELINES[1],
            "single-8192-float32",
            "single-16384-float32",
            "exact-16384-float32",
        ),
    ),
    Group(
        "100mbit", "100mbit", ("local-8192-float32", "single-4096-float32")
    ),  # the baseline again, an hour later
    Group(
        "uneven",
        "1gbit",
        ("single-4096-float32-on-{slow}", "exact-16384-float32-auto", "exact-16384-float32-8.8"),
        IDLE_BASELINES,
        slow_second=True,
    ),
)
HOST_CASES = ("host-float32", "host-bfloat16")
QUICK = ("host-float32", "single-2048-float32", "single-4096-float32", "exact-4096-float32")
FEWEST, FEW, MANY = 2, 4, 5  # steps of a case, by how long one takes
HOST_STEPS = 12
LOCAL_STEPS = 30  # one sync round of every fragment with local_steps=30


def plain(case: str) -> str:
    """The name of a case without `idle/`, as bench.yml takes it."""
    return case.removeprefix(IDLE)


def has_neighbour(case: str) -> bool:
    """Whether the other host trains a model of its own while the case is measured.

    True for single-host baselines, unless their names begin with `idle/` or contain `-on-HOST`.
    """
    return case.startswith("single") and "-on-" not in case


def kind_of(case: str) -> tuple[int, str, str]:
    """(steps, folder, dtype) of a case; cases are measured in one run of bench.yml only if these are equal.

    steps: the number of steps. folder: `idle/` or "". dtype: the number format in which the other host trains
    meanwhile, "" if it does not train.
    """
    folder = IDLE if case.startswith(IDLE) else ""
    return steps_of(case), folder, case.rpartition("-")[2] if has_neighbour(case) else ""


def steps_of(case: str) -> int:
    if case.startswith("local"):
        return LOCAL_STEPS
    if case.startswith("host"):
        return HOST_STEPS
    if "-on-" in case or case.endswith("8.8"):
        return FEWEST
    return FEW if "16384" in case or "8192" in case else MANY


def core_rate() -> float:
    """Measure the GEMM rate of one core in float32, in FLOP/s."""
    import torch

    from trainer.host.gemm import gemm_rates
    from trainer.host.gemm_library import choose_library

    choose_library()
    return gemm_rates([torch.float32])[torch.float32]


def expected(case: str, rate: float) -> float:
    """Estimate the seconds that a benchmark case takes, at 3/4 of `rate` on each core.

    case: its name, such as "exact-4096-float32". rate: the GEMM rate of a core in float32, in FLOP/s;
    bfloat16 counts as twice as fast. A rank has one core, or a part of one in the cases of an uneven pair.
    """
    tokens = int(match[0]) if (match := re.search(r"\d{4,}", case)) else 2048
    cores = 1 if plain(case).startswith("single") else 2
    speed = 0.75 * rate * (2 if "bfloat16" in case else 1) * (A_THIRD if "-on-" in case else 1)
    if case.endswith("8.8"):
        speed *= 2 / 3
    muon = 322e9 * (cores if case.startswith("ddp") else 1)  # plain DDP has no owner ranks
    step = (273.7e6 * tokens + muon) / (cores * speed)
    if "4096" in case and cores == 2 and not case.startswith("exact"):
        step += 3  # seconds for the transfers
    return CASE_SECONDS + step * (steps_of(case) + WARM_STEPS)
