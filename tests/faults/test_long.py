"""A run of half an hour that is disturbed every two minutes, and ends on the loss of one that is not.

NANOFLEET_FAULTS_MINUTES=6 pytest -s tests/faults/test_long.py  # shorter; _SEED: other faults
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

from .site import COORDINATOR, IMPATIENT, WORKER, Site
from .test_links import DOWN, DROP, SLOW, UP

MINUTES = float(os.environ.get("NANOFLEET_FAULTS_MINUTES", "30"))
SEED = int(os.environ.get("NANOFLEET_FAULTS_SEED", "1"))
EVERY_SECONDS = 120

pytestmark = [
    pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240 * MINUTES + 3600),
]  # fmt: skip

Fault = tuple[Callable[[], object], float, Callable[[], object]]
"""What plants it, for how many seconds it stays, what takes it away."""


def faults_of(site: Site, run: str) -> dict[str, Fault]:
    """Those that the run must outlive without anybody's help."""
    peer = site.addresses[COORDINATOR - 1]
    names = {COORDINATOR: "the coordinator", WORKER: "the worker"}
    found: dict[str, Fault] = {
        "link down for 20 s": (lambda: site.outside(DOWN, WORKER), 20, lambda: site.outside(UP, WORKER)),
        "link down for 60 s": (lambda: site.outside(DOWN, WORKER), 60, lambda: site.outside(UP, WORKER)),
        "packets dropped one way for 30 s": (
            lambda: site.inside(WORKER, DROP.format("I", peer)), 30,
            lambda: site.inside(WORKER, DROP.format("D", peer)),
        ),
        "100 kbit/s for 30 s": (
            lambda: site.inside(WORKER, SLOW), 30, lambda: site.inside(WORKER, "tc qdisc del dev eth0 root")
        ),
    }  # fmt: skip
    for host, name in names.items():
        for what in ("rank", "torchrun"):
            found[f"SIGKILL of {name}'s {what}"] = (_sender(site, run, host, what, "KILL"), 0, lambda: None)
        stopped: list[int] = []
        found[f"SIGSTOP of {name}'s rank for 50 s"] = (
            lambda host=host, stopped=stopped: _freeze(site, run, host, stopped), 50,
            lambda host=host, stopped=stopped: site.inside(host, f"kill -CONT {stopped.pop()} || true"),
        )  # fmt: skip
    return found


def _sender(site: Site, run: str, host: int, what: str, signal: str) -> Callable[[], str]:
    return lambda: site.inside(host, f"kill -{signal} {site.pid(host, run, what)}")


def _freeze(site: Site, run: str, host: int, stopped: list[int]) -> None:
    stopped.append(site.pid(host, run))
    site.inside(host, f"kill -STOP {stopped[-1]}")


def test_half_an_hour_of_faults_ends_on_the_undisturbed_loss(site: Site) -> None:
    run, chance = f"long-{int(time.time())}", random.Random(SEED)
    site.train(run, launch_stall_seconds=IMPATIENT)
    site.trains(run, beyond=10)
    faults = faults_of(site, run)
    began = time.monotonic()
    planted: list[str] = []
    while time.monotonic() - began < 60 * MINUTES:
        next_at = time.monotonic() + EVERY_SECONDS
        step, log = site.step(run), site.log_size(COORDINATOR, run)
        name = chance.choice(sorted(faults))
        plant, seconds, fix = faults[name]
        print(f"{time.monotonic() - began:6.0f} s: step {step}: {name}", flush=True)
        plant()
        try:
            time.sleep(seconds)
        finally:
            fix()
        planted.append(name)
        if seconds == 0:
            site.resumed(run, log)
        site.trains(run, beyond=step + 1, seconds=300)
        print(f"{time.monotonic() - began:6.0f} s: it trains, step {site.step(run)}", flush=True)
        time.sleep(max(0.0, min(next_at, began + 60 * MINUTES) - time.monotonic()))
    site.stop(run)
    site.nothing_is_left()
    disturbed = site.losses(run)

    calm = f"{run}-calm"
    site.train(calm)
    site.trains(calm, beyond=max(disturbed), seconds=120 * MINUTES)
    site.stop(calm)
    undisturbed = site.losses(calm)
    last = max(disturbed)
    assert list(disturbed) == list(range(min(disturbed), last + 1)), "a step is missing"
    assert disturbed == {step: undisturbed[step] for step in disturbed}
    text = f"loss of step {last}: {disturbed[last]:.6f}; undisturbed {undisturbed[last]:.6f}"
    print(text, flush=True)
    fault = f"{len(planted)} faults in {MINUTES:g} minutes, one of {len(faults)} kinds at random every two"
    site.note(fault, 60 * MINUTES, text, "the same loss at every step")
