"""A lab whose runs are broken on purpose: what is planted, what was reported, how soon, what is left.

Times are taken from the moment of planting to the moment a line appears in a run's log on a host, in a
playbook's output, or in what systemd shows.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from e2e.lab import ENVIRONMENT, ROOT, Fleet

from .messages import AwaitedLine, Pause, Row

STATE = "/var/lib/nanofleet"
COORDINATOR, WORKER = 1, 2
TINY = {
    "depth": 1, "head_dim": 32, "aspect_ratio": 32, "sequence_len": 128, "total_batch_size": 1024,
    "device_batch_size": 4, "warmup_steps": 1, "eval_tokens": 1024, "eval_every": 0, "sample_every": 0,
    "save_every": 10, "steps": 100_000, "doctor": "never",
}  # fmt: skip
"""A model that makes some steps a second on a core that others want too."""
POLL_SECONDS = 0.25
IMPATIENT = 15
"""Seconds after which a step is late (launch_stall_seconds), where the minute would only cost time."""


def slack() -> float:
    """How many times longer things may take while other work keeps this machine busy."""
    return min(4.0, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def _heed_interrupts() -> None:
    """A playbook receives Ctrl-C as in a terminal, though whoever runs the tests may not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Play:
    """A playbook at work, as a person started it in a terminal of its own."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def end(self, seconds: float = 600) -> int:
        return self.process.wait(seconds)

    def signal(self, number: int) -> None:
        """To the whole terminal, as Ctrl-C is."""
        os.killpg(self.process.pid, number)


@dataclass
class Site:
    """Two hosts, set up, and the data they train on."""

    fleet: Fleet
    data: Path
    names: list[str]
    addresses: list[str]
    rows: list[Row] = field(default_factory=list)
    elastic: str = "false"  # of its runs: then both hosts are needed

    @classmethod
    def of(cls, fleet: Fleet, data: Path) -> Site:
        assert fleet.inventory is not None
        text = fleet.inventory.read_text()
        names = re.findall(r"^    (\S+-\d+):$", text, re.MULTILINE)
        return cls(fleet, data, names, re.findall(r"ansible_host: [\"']?([0-9.]+)", text))

    def changed(self, folder: Path, variables: str) -> Site:
        """The same hosts by an inventory that gives all of them further variables (a line of YAML)."""
        assert self.fleet.inventory is not None
        text = self.fleet.inventory.read_text()
        inventory = folder / "hosts.yml"
        inventory.write_text(re.sub(r"^  vars:$", f"  vars:\n    {variables}", text, flags=re.MULTILINE))
        assert variables in inventory.read_text()
        return replace(self, fleet=Fleet(self.fleet.workdir, inventory))

    # -- what a person does ----------------------------------------------------------------------------

    def play(self, playbook: str, run_id: str, *, fails: bool = False, **settings: Any) -> str:
        """Run a playbook to its end; returns its output."""
        return self.fleet.play(playbook, fails=fails, run_id=run_id, data_dir=self.data, **settings).stdout

    def train(self, run_id: str, *, fails: bool = False, **settings: Any) -> str:
        return self.play("train.yml", run_id, fails=fails, **{**TINY, "elastic": self.elastic, **settings})

    def begin(self, playbook: str, run_id: str, folder: Path, **settings: Any) -> Play:
        """Start a playbook and continue."""
        log = folder / f"{playbook}-{run_id}.log"
        run = {**TINY, "elastic": self.elastic} if playbook == "train.yml" else {}
        words = {**run, **settings, "run_id": run_id, "data_dir": self.data}
        command = ["ansible-playbook", "-i", str(self.fleet.inventory), playbook]
        for name, value in words.items():
            command += ["-e", f"{name}={value}"]
        environment = {**os.environ, **ENVIRONMENT}
        with open(log, "w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment,
                start_new_session=True, preexec_fn=_heed_interrupts,
            )  # fmt: skip
        return Play(process, log)

    # -- what is there ---------------------------------------------------------------------------------

    def inside(self, host: int, command: str, check: bool = True) -> str:
        """What a shell command says on host 1 or 2 as root; not over SSH, which may be what is broken."""
        argv = ["podman", "exec", self.names[host - 1], "sh", "-c", command]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{self.names[host - 1]}: {command}: {done.stderr}"
        return done.stdout.strip()

    def outside(self, command: str, host: int) -> None:
        """A shell command on the lab's machine; {name} is the host's container, {gateway} its way out."""
        gateway = self.addresses[host - 1].rsplit(".", 1)[0] + ".1"
        words = {"{name}": self.names[host - 1], "{gateway}": gateway}
        for word, value in words.items():
            command = command.replace(word, value)
        lab = self.names[0].rsplit("-", 1)[0]
        environment = {**os.environ, "CONTAINERS_CONF": str(ROOT / ".lab" / lab / "containers.conf")}
        done = subprocess.run(
            ["sh", "-c", command], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def json(self, host: int, run_id: str, name: str) -> dict[str, Any]:
        text = self.inside(host, f"cat {STATE}/runs/{run_id}/{name} 2>/dev/null || true")
        found: dict[str, Any] = json.loads(text or "{}")
        return found

    def step(self, run_id: str) -> int:
        """The step rank 0 has made in the attempt under way; -1 before its first."""
        beat = self.json(1, run_id, "heartbeat-0.json")
        return int(beat["step"]) if beat.get("loss") is not None else -1

    def pid(self, host: int, run_id: str, what: str = "rank") -> int:
        """The process of the rank, or of its torchrun, on a host."""
        pattern = {"rank": "-u -m trainer train .*{}", "torchrun": "-m torch.distributed.run .*{}"}[what]
        pids = self.inside(host, f"pgrep -u nanofleet -f -- '^[^ ]*python {pattern.format(run_id)}/'").split()
        assert len(pids) == 1, pids
        return int(pids[0])

    def unit(self, host: int, run_id: str) -> dict[str, str]:
        """ActiveState, SubState, NRestarts, Result of the run's unit."""
        out = self.inside(host, f"systemctl show nanofleet-{run_id} -p ActiveState,SubState,NRestarts,Result")
        return dict(line.split("=", 1) for line in out.splitlines())

    def losses(self, run_id: str) -> dict[int, float]:
        """The loss of every step, as the coordinator has written it."""
        text = self.inside(COORDINATOR, f"cat {STATE}/runs/{run_id}/metrics.jsonl")
        entries = [json.loads(line) for line in text.splitlines() if '"loss"' in line]
        steps = [entry["step"] for entry in entries]
        assert steps == sorted(set(steps)), "a step is there twice, or out of order"
        return {entry["step"]: entry["loss"] for entry in entries}

    def log_size(self, host: int, run_id: str) -> int:
        path = f"{STATE}/runs/{run_id}/train.log"
        return int(self.inside(host, f"stat -c %s {path} 2>/dev/null || echo 0"))

    # -- waiting ---------------------------------------------------------------------------------------

    def until(self, what: Callable[[], Any], seconds: float, why: str, during: Play | None = None) -> float:
        """Wait for something to be true; returns the seconds it took.

        What a playbook is to bring about is not waited for once the playbook has ended, and where it fails to
        come the playbook's words are shown.
        """
        started = time.monotonic()
        limit = seconds * slack()
        while not what():
            printed = during.output if during else ""
            assert not during or during.process.poll() is None, f"{why}: the playbook has ended\n{printed}"
            assert time.monotonic() - started < limit, f"{why}: not within {limit:.0f} s\n{printed}"
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started

    def trains(self, run_id: str, beyond: int = 0, seconds: float = 90) -> float:
        """Wait until rank 0 has made a step beyond one."""
        return self.until(lambda: self.step(run_id) > beyond, seconds, f"{run_id} beyond step {beyond}")

    def ended(self, run_id: str, seconds: float, hosts: tuple[int, ...] = (1, 2)) -> float:
        """Wait until the run's units are gone and nothing will start them again."""
        return self.until(
            lambda: all(self.unit(host, run_id)["ActiveState"] in ("inactive", "failed") for host in hosts),
            seconds,
            f"the end of {run_id}",
        )

    @contextmanager
    def awaits_line(
        self, run_id: str, *words: str, host: int = 1, seconds: float = 60
    ) -> Iterator[AwaitedLine]:
        """Within the block a fault is planted; after it, its line in the log is waited for."""
        before = self.log_size(host, run_id)
        awaited = AwaitedLine(time.monotonic(), time.time())
        yield awaited
        path = f"{STATE}/runs/{run_id}/train.log"

        def found() -> bool:
            log = self.inside(host, f"tail -c +{before + 1} {path} 2>/dev/null || true")
            hits = [line for line in log.splitlines() if all(word in line for word in words)]
            awaited.line = hits[0] if hits else ""
            awaited.log = log
            return bool(hits)

        try:
            self.until(found, seconds, f"{words} in {path} of host {host}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{awaited.log[-4000:]}") from None
        awaited.seconds = time.monotonic() - awaited.planted

    def boots(self, host: int) -> None:
        """Wait until a host that was started is up."""
        self.until(
            lambda: (
                self.inside(host, "systemctl is-system-running", check=False) in ("running", "degraded")
                and self.inside(host, "systemctl is-active ssh", check=False) == "active"
            ),
            60,
            f"boot of {self.names[host - 1]}",
        )

    # -- faults that a run outlives --------------------------------------------------------------------

    def survives(
        self,
        run_id: str,
        fault: str,
        plant: Callable[[], Any],
        *words: str,
        within: float,
        fix: Callable[[], Any] = lambda: None,
        host: int = 1,
        restarts: bool = True,
    ) -> AwaitedLine:
        """Plant a fault in a run that trains: its words come in time, the run continues; a row of it.

        `host` is the one whose log has the words. Without `restarts` the same attempt must continue.
        """
        self.trains(run_id, beyond=self.step(run_id))
        restarted = self.unit(COORDINATOR, run_id)["NRestarts"]
        log = self.log_size(COORDINATOR, run_id)
        step = self.step(run_id)
        try:
            with self.awaits_line(run_id, *words, host=host, seconds=within) as awaited:
                plant()
            paused = self.step(run_id)  # steps after `step`, made before the fault was there, count as well
        finally:
            fix()
        if restarts:
            self.resumed(run_id, log)
        else:
            assert self.unit(COORDINATOR, run_id)["NRestarts"] == restarted
        self.trains(run_id, beyond=step + 1 if restarts else max(step + 1, paused), seconds=120)
        for each in (COORDINATOR, WORKER):
            self.pid(each, run_id)  # one, and no orphan beside it
        then = "resumed" if restarts else "continued"
        self.note(
            fault, awaited.seconds, awaited.line, then, self.pause(run_id, awaited, step, log, restarts)
        )
        return awaited

    def pause(self, run_id: str, awaited: AwaitedLine, step: int, log: int, restarts: bool = True) -> Pause:
        """What a fault cost that was planted after `step`, when the coordinator's log had the size `log`."""
        text = self.inside(COORDINATOR, f"cat {STATE}/runs/{run_id}/metrics.jsonl")
        entries = [json.loads(line) for line in text.splitlines() if '"loss"' in line]
        times = {entry["step"]: entry["time"] for entry in entries}
        if not restarts:
            return Pause.of(times, awaited.planted_at, step, None)
        ended = self.inside(COORDINATOR, f"tail -n 1 {STATE}/runs/{run_id}/attempts.jsonl")
        return Pause.of(
            times, awaited.planted_at, max(step, json.loads(ended)["step"]), self.resumed(run_id, log)
        )

    def resumed(self, run_id: str, beyond: int) -> int:
        """Wait until an attempt resumes, by the coordinator's log from a size on; returns its step."""
        path = f"{STATE}/runs/{run_id}/train.log"
        words = re.compile(r"Resuming from the checkpoint of step (\d+)")
        self.until(
            lambda: words.search(self.inside(COORDINATOR, f"tail -c +{beyond + 1} {path}")),
            240,
            f"{words.pattern} in {path}",
        )
        return int(words.findall(self.inside(COORDINATOR, f"tail -c +{beyond + 1} {path}"))[-1])

    @contextmanager
    def running(self, name: str) -> Iterator[str]:
        """A run that trains and is past its first checkpoint; after it nothing of it is left. Its run_id."""
        run_id = f"{name}-{int(time.time())}"
        self.train(run_id, launch_stall_seconds=IMPATIENT)
        self.trains(run_id, beyond=10)
        yield run_id
        self.stop(run_id)
        self.nothing_is_left()

    # -- afterwards ------------------------------------------------------------------------------------

    def stop(self, run_id: str) -> None:
        self.play("stop.yml", run_id, stop_now="true")

    def clear(self) -> None:
        """End whatever a test that failed has left, so that the next one begins on free hosts."""
        lists = "systemctl list-units --all --plain --no-legend 'nanofleet-*.service' | cut -d' ' -f1"
        ends = "systemctl stop $unit; systemctl reset-failed $unit"
        for host in (COORDINATOR, WORKER):
            self.inside(host, f"for unit in $({lists} | grep -v tracker); do {ends}; done", check=False)

    def nothing_is_left(self, hosts: tuple[int, ...] = (1, 2)) -> None:
        """No process of a run, no unit, no held port, no half checkpoint."""
        for host in hosts:
            assert (
                self.inside(host, "pgrep -u nanofleet -af 'trainer [t]rain|[t]orch.distributed' || true")
                == ""
            )
            units = self.inside(host, "systemctl list-units --all --plain --no-legend 'nanofleet-*.service'")
            left = [line for line in units.splitlines() if "tracker" not in line and " loaded active" in line]
            assert left == []
            assert ":29500 " not in self.inside(host, "ss -Htln")
            assert self.inside(host, f"find {STATE}/runs -path '*/checkpoints/.*.tmp' -type d") == ""

    def note(self, fault: str, seconds: float, printed: str, then: str, pause: Pause | None = None) -> None:
        """Keep a row for docs/faults.md."""
        self.rows.append(Row(fault, seconds, printed, then, pause))
