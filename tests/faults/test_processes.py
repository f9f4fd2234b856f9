"""Processes that die, run short of memory or of a tracker, files that are damaged: the run continues.

One run gets all of them, one after another. Its losses are at last those of a run that nobody disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.lab import ROOT

from .messages import message
from .site import COORDINATOR, IMPATIENT, STATE, WORKER, Site, slack

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

HOG = (
    "import os, time; open('/proc/self/oom_score_adj', 'w').write('-1000')\n"
    "held = []\n"
    "while True: held.append(bytearray(os.urandom(1 << 20))); time.sleep(0.002)"
)
"""A process that the kernel spares, and that takes all the memory there is."""


DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "heed = signal.signal\n"
    "signal.signal = lambda number, do: signal.SIG_IGN if number == signal.SIGTERM else heed(number, do)\n"
    "signal.sigwaitinfo = lambda numbers: time.sleep(1e6)"
)
"""Python that does not heed SIGTERM, whatever its program wants: torchrun and the rank alike."""


@pytest.fixture(scope="module")
def run(site: Site) -> Iterator[str]:
    with site.running("processes") as run_id:
        yield run_id


@pytest.mark.parametrize("host", [WORKER, COORDINATOR])
def test_torchrun_killed(site: Site, run: str, host: int) -> None:
    """On a host whose systemd has read its units again, as it does when a package is installed."""
    site.inside(host, "systemctl daemon-reload")
    site.survives(
        run,
        f"SIGKILL of {'the coordinator' if host == COORDINATOR else 'a worker'}'s torchrun",
        lambda: site.inside(host, f"kill -KILL {site.pid(host, run, 'torchrun')}"),
        "torchrun, which started this rank, has exited or was killed",
        within=10,
        host=host,
    )


def test_a_rank_killed_by_the_kernel_for_want_of_memory(site: Site, run: str) -> None:
    """The host's memory is limited to little more than is in use, then another process takes the rest.

    The rank is made the kernel's first choice: with much page cache, the other process grows to be larger.
    """
    old, new = "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory.current"
    used = int(site.inside(WORKER, f"cat {old} 2> /dev/null || cat {new}"))

    def plant() -> None:
        site.outside(f"podman update --memory {used + (64 << 20)} {{name}}", WORKER)
        site.inside(WORKER, f"echo 1000 > /proc/{site.pid(WORKER, run)}/oom_score_adj")
        site.inside(WORKER, f'systemd-run --quiet --unit=hog --collect python3 -c "{HOG}"')

    def fix() -> None:
        site.inside(WORKER, "systemctl kill -s KILL hog || true")
        site.outside("podman update --memory 1000g {name}", WORKER)
        for folder in (ROOT, ROOT / "playbooks"):
            (folder / "oom").unlink(missing_ok=True)  # podman's monitor writes it where the lab was started

    site.survives(run, "a rank killed because memory ran out", plant, "Lost rank 1", within=30, fix=fix)
    attempts = site.inside(WORKER, f"tail -n 3 {STATE}/runs/{run}/attempts.jsonl")
    assert "by hand, or by the kernel because memory ran out (to check" in attempts


def test_a_damaged_checkpoint_is_passed_over(site: Site, run: str) -> None:
    folder = f"{STATE}/runs/{run}/checkpoints"

    def plant() -> None:
        pid = site.pid(COORDINATOR, run)
        site.inside(
            COORDINATOR,
            f"kill -STOP {pid}; f=$(ls -S $(ls -d {folder}/step_* | tail -n 1)/* | head -n 1)"
            f" && printf X | dd of=$f bs=1 seek=1000 conv=notrunc status=none; kill -KILL {pid}",
        )

    # The run resumes from its copy on the other host, or from the previous checkpoint if there is none yet.
    awaited = site.survives(run, "a damaged checkpoint", plant, "is damaged", within=60)
    assert "sha256" in awaited.line
    assert site.inside(COORDINATOR, f"ls -d {folder}/damaged_step_*")


def test_the_tracker_is_killed_and_comes_back(site: Site, run: str) -> None:
    """Its unit would start it again at once: it is kept down until the run has reported that it is away."""
    site.survives(
        run,
        "the tracker gone",
        lambda: site.inside(
            COORDINATOR, "systemctl kill -s KILL nanofleet-tracker; systemctl stop nanofleet-tracker"
        ),
        "training continues without it",
        within=60,
        restarts=False,
    )
    with site.awaits_line(run, "The tracker at", "is back", seconds=90):
        site.inside(COORDINATOR, "systemctl start nanofleet-tracker")


def test_a_run_file_that_differs_ends_the_run_with_a_table(site: Site, run: str) -> None:
    """Seen by the contract at the next attempt; train.yml renders it again and the run continues."""
    path = f"{STATE}/runs/{run}/run.json"
    site.inside(WORKER, f'sed -i \'s/"seed": [0-9]*/"seed": 7/\' {path} && grep -q \'"seed": 7\' {path}')
    log = site.log_size(COORDINATOR, run)
    with site.awaits_line(run, "The ranks differ", "config.seed is 42", f"{site.names[1]}) has 7") as awaited:
        site.inside(WORKER, f"kill -KILL {site.pid(WORKER, run)}")
    site.ended(run, 30)
    for host in (COORDINATOR, WORKER):
        outcome = site.json(host, run, "outcome.json")
        assert outcome["outcome"] == "final", outcome
        assert "config.seed" in outcome["reason"]
    assert "config.seed" in awaited.log[awaited.log.index("field ") :], "the table"
    site.nothing_is_left()
    site.train(run, launch_stall_seconds=IMPATIENT)
    site.resumed(run, log)
    site.note("run files that differ", awaited.seconds, awaited.line, "ended; train.yml renders it again")


def test_the_losses_are_those_of_a_run_that_nobody_disturbed(site: Site, run: str) -> None:
    attempts = site.inside(COORDINATOR, f"cat {STATE}/runs/{run}/attempts.jsonl").splitlines()
    assert len(attempts) >= 2
    site.stop(run)
    disturbed = site.losses(run)
    calm = f"{run}-calm"
    site.train(calm)
    site.trains(calm, beyond=min(max(disturbed), 400), seconds=600)
    site.stop(calm)
    undisturbed = site.losses(calm)
    common = disturbed.keys() & undisturbed.keys()
    assert len(common) >= min(len(disturbed), 400)
    assert {step: disturbed[step] for step in common} == {step: undisturbed[step] for step in common}


def test_processes_that_ignore_sigterm_are_ended(site: Site, tmp_path: Path) -> None:
    """By stop.yml at once, and within what it promises."""
    name = f"deaf-{int(time.time())}"
    for host in (COORDINATOR, WORKER):
        site.inside(host, f"mkdir -p /opt/deaf && cat > /opt/deaf/sitecustomize.py << 'END'\n{DEAF}\nEND")
    try:
        deaf = site.changed(tmp_path, "launch_properties: {Environment: PYTHONPATH=/opt/deaf}")
        deaf.train(name)
        for what in ("rank", "torchrun"):
            pid = site.pid(WORKER, name, what)
            site.inside(WORKER, f"kill -TERM {pid}")
            time.sleep(2)
            assert site.pid(WORKER, name, what) == pid, "it has heeded SIGTERM: nothing is proven"
        started = time.monotonic()
        printed = site.play("stop.yml", name, stop_now="true")
        seconds = time.monotonic() - started
    finally:
        for host in (COORDINATOR, WORKER):
            site.inside(host, "rm -r /opt/deaf")
    site.nothing_is_left()
    assert seconds < 15 * slack()
    site.note(
        "SIGTERM ignored by torchrun and ranks",
        seconds,
        message(printed, "is ended within 15 s"),
        "ended by SIGKILL",
    )
