"""The hosts of a lab on which a run trains, and events on these hosts, such as a power cut.

    lab = Lab("NAME", 3, Path("data"), "first")      # of a lab that is set up, where the run `first` trains
    planted, fixed = events(lab, 3)[0].happen(lab)   # the rank of host 3 is killed
    lab.wait(lambda: len(lab.after(fixed)) > 1, "the next steps")

The times are those of the lines in metrics.jsonl of one of the hosts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ranks import ROOT

RUNS = "/var/lib/nanofleet/runs"
AWAY_SECONDS = 20.0
POLL_SECONDS = 1.0
AGAIN = re.compile(r"The ranks continue after step (\d+), .* MB\. (\d+) step\(s\) are trained again")
CONTINUED = re.compile(r"continue after step .* ([\d.]+) s after they stopped; .* sent ([\d,.]+) MB\.")
RANK = "pgrep -u nanofleet -f -- '-u -m trainer train'"


@dataclass
class Lab:
    """A lab that is set up, a run on its hosts, and what the run has written to metrics.jsonl so far.

    The constructor starts nothing: `play("train.yml", run_id=..., data_dir=...)` starts the run. name: the
    name of the lab. hosts: the number of its hosts, which are numbered from 1. data_dir: the data directory
    on this machine. run_id: the name of the run; it may be set later.
    """

    name: str
    hosts: int
    data_dir: Path
    run_id: str = ""
    steps: dict[tuple[float, int], float] = field(default_factory=dict)  # (time, step) -> seconds of the step
    changes: list[tuple[float, int]] = field(default_factory=list)  # (time, ranks)
    observer: int = 1  # the host whose metrics.jsonl is read
    processes: dict[int, int] = field(default_factory=dict)  # host -> PID of its first process here

    def host(self, number: int) -> str:
        return f"{self.name}-{number}"

    def podman(self, *words: str) -> str:
        environment = {**os.environ, "CONTAINERS_CONF": str(ROOT / ".lab" / self.name / "containers.conf")}
        done = subprocess.run(
            ["podman", *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"podman {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def inside(self, number: int, command: str) -> str:
        return self.podman("exec", self.host(number), "sh", "-c", command)

    def run_dir(self, number: int) -> Path:
        """The run directory on host `number`, as a path on this machine.

        Reading this path takes no CPU time of the host; a command that runs on the host does. Raises
        SystemExit if the host is off.
        """
        process = self.processes.get(number, 0)
        if not Path(f"/proc/{process}/root/sbin").exists():
            process = int(self.podman("inspect", "--format", "{{.State.Pid}}", self.host(number)))
            if not process:
                raise SystemExit(f"{self.host(number)} is off")
            self.processes[number] = process
        return Path(f"/proc/{process}/root{RUNS}/{self.run_id}")

    def play(self, playbook: str, **settings: object) -> None:
        words = [f"-e{name}={value}" for name, value in settings.items()]
        inventory = ROOT / ".lab" / self.name / "inventory"
        command = ["ansible-playbook", "-i", str(inventory), playbook, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-2000:]}")

    def read(self, newest: int | None = 60) -> None:
        """Add the newest lines of metrics.jsonl to `steps` and `changes`.

        newest: the number of lines; None: all. Lines that were read earlier are kept: a run removes the
        lines of steps that it trains again from the file. Raises SystemExit if there is no such file.
        """
        path = self.run_dir(self.observer) / "metrics.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError as error:
            raise SystemExit(f"{path} on {self.host(self.observer)}: {error.strerror}") from None
        complete = (line for line in lines[-(newest or 0) :] if line.endswith("\n"))
        for line in map(json.loads, complete):
            if "loss" in line:
                self.steps[line["time"], line["step"]] = line["step_seconds"]
            elif "ranks" in line and (change := (line["time"], int(line["ranks"]))) not in self.changes:
                self.changes.append(change)

    def repeated(self) -> int:
        """The number of steps that an elastic run has trained again, from the train.log of each host."""
        hosts = range(1, self.hosts + 1)
        return repeated(self.inside(host, f"cat {RUNS}/{self.run_id}/train.log") for host in hosts)

    def continued(self, host: int) -> list[tuple[float, float]]:
        """(seconds for which the ranks stopped, MB sent) of each change of the ranks, from the log of `host`.

        MB: the bytes that the rank of this host has sent in the change.
        """
        log = self.inside(host, f"cat {RUNS}/{self.run_id}/train.log")
        return [(float(each), float(sent.replace(",", ""))) for each, sent in CONTINUED.findall(log)]

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Read metrics.jsonl until `holds` returns True.

        Raises SystemExit if that takes longer than `seconds`. what: the awaited event, for the error message.
        """
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise SystemExit(f"not within {seconds:.0f} s: {what}")
            time.sleep(POLL_SECONDS)
            self.read()

    def after(self, at: float) -> list[tuple[float, int]]:
        """(time, step) of each step that ended after the Unix time `at`, sorted by time."""
        return sorted(key for key in self.steps if key[0] > at)


def repeated(logs: Iterable[str]) -> int:
    """The number of steps that were trained again. logs: the text of train.log on each host."""
    after: dict[int, int] = {}
    for step, count in (map(int, found) for log in logs for found in AGAIN.findall(log)):
        after[step] = max(count, after.get(step, 0))
    return sum(after.values())


@dataclass(frozen=True)
class Event:
    """An event on a host.

    plant: a function that makes the event happen. fix: a function that ends the event, called when the host
    has been away for AWAY_SECONDS; None if the host returns by itself. is_elastic: whether only an elastic
    run has this event.
    """

    name: str
    plant: Callable[[], object]
    fix: Callable[[], object] | None = None
    is_elastic: bool = False

    def happen(self, lab: Lab) -> tuple[float, float]:
        """Let the event happen, and end it; returns the Unix times (of its start, of its end).

        Meanwhile the metrics of `lab` are read.
        """
        planted = time.time()
        self.plant()
        while self.fix and time.time() - planted < AWAY_SECONDS:
            time.sleep(POLL_SECONDS)
            lab.read()
        fixed = time.time()
        if self.fix:
            self.fix()
        return planted, fixed


def events(lab: Lab, host: int) -> list[Event]:
    """The events that a benchmark can cause on a host, without the one of `leave`. host: its number."""
    name, unit = lab.host(host), f"nanofleet-{lab.run_id}"
    gateway = lab.inside(host, "ip -4 route show default").split()[2]
    starts = f"systemctl reset-failed {unit}; systemctl start nanofleet@{lab.run_id}"
    end_torchrun = f"kill -9 $(ps -o ppid= -p $({RANK}))"  # the parent of the rank
    # as systemd-suspend.service
    sleeps = f"-p Requires=sleep.target -p After=sleep.target sleep {AWAY_SECONDS:.0f}"
    return [
        Event("kill -9 of the rank", lambda: lab.inside(host, f"kill -9 $({RANK})")),
        Event("kill -9 of torchrun", lambda: lab.inside(host, end_torchrun)),
        Event("power cut", lambda: lab.podman("kill", name), lambda: lab.podman("start", name)),
        Event("freeze", lambda: lab.podman("pause", name), lambda: lab.podman("unpause", name)),
        Event(
            "link cut",
            lambda: lab.inside(host, "ip link set eth0 down"),
            lambda: lab.inside(host, f"ip link set eth0 up && ip route replace default via {gateway}"),
        ),
        Event(
            "systemctl stop",
            lambda: lab.inside(host, f"systemctl stop {unit}"),
            lambda: lab.inside(host, starts),
        ),
        Event(
            "sleep",
            lambda: lab.inside(host, f"systemd-run --quiet --no-block {sleeps}"),
            lambda: None,  # it wakes by itself
            is_elastic=True,
        ),
        Event("reboot", lambda: lab.podman("restart", "--time", "30", name)),
    ]


def leave(lab: Lab, host: int) -> Event:
    """The event that a person makes a host leave the run and join it again. host: the number of the host."""
    return Event(
        "stop.yml -e leave",
        lambda: lab.play("stop.yml", run_id=lab.run_id, leave=lab.host(host)),
        lambda: lab.play("train.yml", run_id=lab.run_id),
        is_elastic=True,
    )
