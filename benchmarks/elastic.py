"""Measures what it costs a run when a host is lost, leaves or returns, with and without elastic=true.

    python -m benchmarks.elastic --lab NAME --data-dir data --out artifacts/elastic --record

NAME is a lab of three or more hosts that setup.yml has set up with the same data:

    ansible-playbook lab.yml -e lab_state=up -e lab_name=NAME -e lab_hosts=3
    ansible-playbook -i .lab/NAME/inventory setup.yml -e data_dir=data

Each event happens to the last host (--host), --repeats times with elastic=true, and --restarts times with
elastic=false, where the units restart the run from its last checkpoint. A checkpoint is saved every minute. A
host that is cut off, frozen, stopped or without power is back after 20 s. Writes the medians to
OUT/elastic.json after each event, and prints them at the end; --record also writes
docs/recorded/elastic.json. The times are those of the lines in metrics.jsonl of another host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ranks, record
from benchmarks.lab import machine
from trainer.formatting import markdown_table

ROOT = ranks.ROOT
RECORD = record.RECORDED / "elastic.json"
MARK = "elastic"  # of the result in docs/explanation/elastic.md
RUNS = "/var/lib/nanofleet/runs"
AWAY_SECONDS = 20.0
CALM_STEPS = 5  # of all ranks before the next event
POLL_SECONDS = 1.0
AGAIN = re.compile(r"The ranks continue after step (\d+), .* MB\. (\d+) step\(s\) are trained again")
CONTINUED = re.compile(r"continue after step .* ([\d.]+) s after they stopped; .* sent ([\d,.]+) MB\.")
RANK = "pgrep -u nanofleet -f -- '-u -m trainer train'"
SETTINGS = {
    "depth": 4,
    "total_batch_size": 4096,
    "sequence_len": 256,
    "sync": "exact",
    "snapshot_seconds": "auto",
    "steps": 1_000_000,
    "eval_every": 0,
    "sample_every": 0,
    "save_minutes": 1,
    "doctor": "never",
    "tracker": "none",
}


@dataclass
class Lab:
    """The hosts of a lab, their run, and what the run has written to metrics.jsonl so far.

    name: the name of the lab. hosts: the number of its hosts, which are numbered from 1.
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
        """The run directory on host `number`, as a path on this machine. Raises SystemExit if it is off.

        To read this path takes no CPU time of the host; a command that runs on the host does.
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
        """What `host` has logged of each change: (seconds for which its ranks stopped, MB that it sent)."""
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
        """Let the event happen, and end it; returns the Unix times of both. Reads the metrics meanwhile."""
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
    """All events for a host but those of playbooks. host: its number."""
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
    """The event that a person takes a host out of the run, and in again. host: its number."""
    return Event(
        "stop.yml -e leave",
        lambda: lab.play("stop.yml", run_id=lab.run_id, leave=lab.host(host)),
        lambda: lab.play("train.yml", run_id=lab.run_id),
        is_elastic=True,
    )


def measure(lab: Lab, event: Event, elastic: bool) -> dict[str, float]:
    """Let an event happen, and wait until all ranks train again; returns the figures of the event.

    next_step: seconds from the event to the first step after the interruption. pause: seconds between that
    step and the step before it. repeated: the number of steps that were trained again.
    elastic: whether the run is elastic. If True, the figures also have `return` (seconds from the end of the
    event to the first step of all ranks), join_pause (seconds between that step and the step before it),
    changes (the number of changes of the members), megabytes (what the ranks have sent in these changes) and
    stopped (the longest time from the end of a step of a rank until it continued, in the first change).
    """
    lab.read()
    calm = time.time()
    lab.wait(lambda: len(lab.after(calm)) >= CALM_STEPS, f"{CALM_STEPS} steps before {event.name}")
    hosts = range(1, lab.hosts + 1)
    repeated, before = lab.repeated(), [len(lab.continued(host)) for host in hosts]
    planted, fixed = event.happen(lab)
    if elastic:
        figures = _elastic_figures(lab, planted, fixed)
        new = [lab.continued(host)[count:] for host, count in zip(hosts, before, strict=True)]
        return {
            **figures,
            "repeated": float(lab.repeated() - repeated),
            "megabytes": sum(sent for each in new for _, sent in each),
            "stopped": max((each[0][0] for each in new if len(each) > 1), default=0.0),  # of those that stay
        }
    return _restart_figures(lab, planted, fixed)


def _elastic_figures(lab: Lab, planted: float, fixed: float) -> dict[str, float]:
    def are_all_back() -> bool:
        changes = [change for change in lab.changes if change[0] > planted]
        return bool(changes) and changes[-1][1] == lab.hosts and len(lab.after(changes[-1][0])) > 1

    lab.wait(are_all_back, "the return of the last host")
    changes = [change for change in lab.changes if change[0] > planted]
    lost, returned = changes[0][0], changes[-1][0]
    resumed, pause, _ = around(lab.steps, lost)
    joined, join_pause, _ = around(lab.steps, returned)
    figures = {"next_step": resumed - planted, "pause": pause}
    return {**figures, "return": joined - fixed, "join_pause": join_pause, "changes": float(len(changes))}


def _restart_figures(lab: Lab, planted: float, fixed: float) -> dict[str, float]:
    def continues() -> bool:
        since = lab.after(max(planted, fixed))
        has_paused = longest_gap(lab.steps, planted)[1] > AWAY_SECONDS / 4
        return len(since) > 2 and (has_paused or time.time() - fixed > 90)

    lab.wait(continues, "steps after a restart", 600)
    before, pause = longest_gap(lab.steps, planted)
    resumed, _, repeated = around(lab.steps, before)
    return {"next_step": resumed - planted, "pause": pause, "repeated": float(repeated)}


def around(steps: Iterable[tuple[float, int]], at: float) -> tuple[float, float, int]:
    """The first step after the time `at`, as (its time, seconds since the step before it, repeated steps).

    steps: (time, step) of each step. repeated steps: how many of the steps before `at` are trained again.
    """
    done = [(when, step) for when, step in sorted(steps) if when <= at]
    when, step = min(key for key in steps if key[0] > at)
    return when, when - done[-1][0], max(0, max(each for _, each in done) - step + 1)


def longest_gap(steps: Iterable[tuple[float, int]], after: float) -> tuple[float, float]:
    """The longest time between two consecutive steps, as (its start, its seconds).

    steps: (time, step) of each step. after: only steps after this time count as the second of the two.
    """
    times = sorted(when for when, _ in steps)
    gaps = [(end - start, start) for start, end in itertools.pairwise(times) if end > after]
    seconds, start = max(gaps, default=(0.0, after))
    return start, seconds


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure in `found`, rounded to one decimal; {} if `found` is empty."""
    names = found[0] if found else {}
    return {name: round(statistics.median(each[name] for each in found), 1) for name in names}


def copies(lab: Lab) -> dict[str, float]:
    """Figures of the copies of the training state that the ranks of an elastic run have made.

    copies: the number of copies. pause_seconds: the median pause of training for a copy. state_bytes: the
    mean size of a checkpoint in bytes.
    """
    text = lab.inside(lab.observer, f"grep -h 'Copying the state' {RUNS}/{lab.run_id}/train.log || true")
    pauses = [float(line.rsplit("paused ", 1)[1].split()[0]) for line in text.splitlines()]
    size = lab.inside(
        lab.observer,
        f"du -sb {RUNS}/{lab.run_id}/checkpoints | cut -f1; ls {RUNS}/{lab.run_id}/checkpoints | wc -l",
    )
    total, count = map(int, size.split())
    return {
        "copies": len(pauses),
        "pause_seconds": round(statistics.median(pauses), 3) if pauses else 0.0,
        "state_bytes": total // max(count, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = ranks.argument_parser(__doc__, out="the figures")
    parser.add_argument("--lab", required=True, metavar="NAME", help="a lab that is set up")
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each event (%(default)s)")
    parser.add_argument(
        "--restarts", type=int, default=5, metavar="N", help="with elastic=false (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="EVENT", help="these events, as in the table"
    )
    parser.add_argument("--host", type=int, metavar="N", help="to which they happen (the last one)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the run, such as depth=8"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    args.settings = {**SETTINGS, **dict(each.split("=", 1) for each in args.set)}
    args.out.mkdir(parents=True, exist_ok=True)
    origin = {
        **record.origin("python -m benchmarks.elastic"),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "hosts": args.hosts,
        "away_seconds": AWAY_SECONDS,
        "settings": args.settings,
    }
    content: dict[str, Any] = {**origin}
    for elastic, repeats in ((True, args.repeats), (False, args.restarts)):
        if repeats:
            run(args, elastic, repeats, content)
    print(block(content))
    return 0


def run(args: argparse.Namespace, elastic: bool, repeats: int, content: dict[str, Any]) -> None:
    """Start a run, let each event happen `repeats` times, and add the medians to `content`."""
    key = "elastic" if elastic else "restart"
    victim = args.host or args.hosts
    lab = Lab(args.lab, args.hosts, args.data_dir.resolve(), f"{key}-{int(time.time())}")
    lab.observer = 1 if victim > 1 else 2
    settings = {**args.settings, "elastic": str(elastic).lower(), "data_dir": lab.data_dir}
    lab.play("train.yml", run_id=lab.run_id, **settings)
    try:
        lab.read()
        lab.wait(lambda: len(lab.steps) > 20, "20 steps")
        quiet = list(lab.steps.values())[2:]
        content[f"{key}_step_seconds"] = round(statistics.median(quiet), 3)
        possible = [*events(lab, victim), leave(lab, victim)]
        possible = [each for each in possible if elastic or not each.is_elastic]
        asked = [each for each in possible if not args.only or each.name in args.only]
        found: dict[str, list[dict[str, float]]] = {event.name: [] for event in asked}
        for repeat in range(repeats):
            for event in asked:
                try:
                    found[event.name].append(measure(lab, event, elastic))
                except SystemExit as error:
                    print(f"{key} {repeat + 1}: {event.name}: {error}", flush=True)
                    continue
                figures = found[event.name][-1]
                print(f"{time.strftime('%H:%M:%S')} {key} {repeat + 1}: {event.name} {figures}", flush=True)
                keep(args, content, key, found)
        if elastic:
            content["copy"] = copies(lab)
            keep(args, content, key, found)
    finally:
        lab.play("stop.yml", run_id=lab.run_id, stop_now="true")


def keep(
    args: argparse.Namespace, content: dict[str, Any], key: str, found: Mapping[str, list[dict[str, float]]]
) -> None:
    """Add the medians so far to `content` as its entry `key`, and write `content` to OUT/elastic.json.

    With --record, `content` is also written to docs/recorded/elastic.json. found: {event: figures of each
    repeat}.
    """
    content[key] = [
        {"event": name, "repeats": len(each), **medians(each)} for name, each in found.items() if each
    ]
    record.write(args.out / RECORD.name, content)
    if args.record:
        record.write(RECORD, content)


HEAD = (
    "event",
    "next step after, s",
    "pause of the others, s",
    "steps trained again",
    "back after, s",
    "pause when it joins, s",
    "sent in both changes, MB",
    "`elastic=false`: next step after, s",
    "steps trained again",
)


def table(content: Mapping[str, Any]) -> str:
    """The table of a record, as Markdown: a row for each event, with the figures of elastic=true.

    content: the record. If it also has runs with elastic=false, each row has their figures too.
    """
    restarts = {row["event"]: row for row in content.get("restart", [])}
    rows = []
    for row in content.get("elastic", []):
        beside = restarts.get(row["event"])
        cells = [
            row["event"],
            f"{row['next_step']:.1f}",
            f"{row['pause']:.1f}",
            f"{row['repeated']:.0f}",
            f"{row['return']:.0f}",
            f"{row['join_pause']:.1f}",
            f"{row['megabytes']:.0f}" if "megabytes" in row else "-",
        ]
        cells += [f"{beside['next_step']:.0f}", f"{beside['repeated']:.0f}"] if beside else ["-", "-"]
        rows.append(cells if restarts else cells[:7])
    return markdown_table([HEAD if restarts else HEAD[:7], *rows], aligned=False)


def block(content: Mapping[str, Any]) -> str:
    """The table of a record, with sentences on its hardware, command and settings."""
    counts = {
        key: max((row["repeats"] for row in content.get(key, [])), default=0)
        for key in ("elastic", "restart")
    }
    settings, copy, hosts = content["settings"], content.get("copy"), content["hosts"]
    beside = f", and of {counts['restart']} with `elastic=false` and a checkpoint every minute"
    beside = beside if counts["restart"] else ""
    text = (
        f"**Measured in containers on one machine** ({content['machine']}), {hosts} hosts with one thread "
        f"each on its cores (load of other programs before: {content['load']:g}): `{content['command']}`, "
        f"commit `{content['commit']}`, {content['date']}. Depth {settings['depth']}, "
        f"{int(settings['total_batch_size']):,} tokens in a step, `sync={settings['sync']}`, "
        f"`snapshot_seconds={settings['snapshot_seconds']}`. "
        f"Medians of up to {counts['elastic']}{beside}. A host that is frozen, cut off, stopped or without "
        f"power is there again after {content['away_seconds']:.0f} s; *back after* counts from then.\n\n"
        f"{table(content)}\n\n"
        f"The median step took {content['elastic_step_seconds']:.2f} s with {hosts} ranks"
    )
    if "restart_step_seconds" in content:
        text += f", and {content['restart_step_seconds']:.2f} s with `elastic=false`"
    if copy:
        text += (
            f". Training paused {copy['pause_seconds']:.2f} s for a copy (median of {copy['copies']}); the "
            f"state is {copy['state_bytes'] / 1e6:.0f} MB"
        )
    return text + "."


if __name__ == "__main__":
    sys.exit(main())
