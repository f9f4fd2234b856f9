"""The project's speed on one machine: a lab of two hosts of one core each, and the machine itself.

    make bench                              everything; what was measured before is kept
    make bench ARGS="--quick"               one host, and exact against solo at 4,096 tokens
    make bench ARGS="--only exact-4096"     the stages whose names begin so (and --again: measured anew)
    make bench ARGS="--list"                the stages, and about how long each takes

Depth 8, rows of 1,024 tokens. Says how long it will take, measures stage after stage by `bench.yml`, keeps
the figures of each in OUT/GROUP/stages as they come, and writes OUT/bars.md, bars.json and a report a group.
Nothing else should run on the machine: the tables say what share of their cores the processes had.

Two hosts of one machine slow each other down, as two machines would not: they share its memory bus and its
clock. So solo is measured while the other host trains by itself, which takes from it what the other host of
a fleet does; `idle/` stages are solo with the other host at rest, and the tables have both.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stages import (
    A_THIRD,
    DEPTH,
    GROUPS,
    HOST_STAGES,
    HOST_STEPS,
    IDLE,
    LENGTH,
    QUICK,
    SOLO,
    VOCAB_SIZE,
    Group,
    core_rate,
    expected,
    has_neighbour,
    kind_of,
    plain,
    steps_of,
)
from benchmarks.targets import host_table, speed_beside_solo, targets_table
from fleet import corpus
from trainer.bench import SCHEMA
from trainer.bench.report import compare, load
from trainer.bench.text import percent
from trainer.config import code_digest

ROOT = Path(__file__).resolve().parents[1]
LINK_MBIT = {"1gbit": 1000.0, "100mbit": 100.0}
STEADY = 0.10  # by which a host's matrix products may be faster or slower in a stage than in its solo's
NEIGHBOUR = "nanofleet-neighbour.service"
AGAIN = 2  # times that a stage is measured anew, at most, in which they were not


@dataclass
class Job:
    """What the command line asks for."""

    args: argparse.Namespace
    out: Path
    missing: list[str] = field(default_factory=list)

    @property
    def lab_dir(self) -> Path:
        return ROOT / ".lab" / self.args.lab

    def wanted(self, name: str) -> bool:
        if self.args.quick:
            return name in QUICK
        return not self.args.only or any(name.startswith(start) for start in self.args.only)

    def file(self, group: str, stage: str) -> Path:
        folder = self.out / group / (IDLE if stage.startswith(IDLE) else "")
        return folder / "stages" / f"{plain(stage)}.json"

    def measured(self, group: str, stage: str) -> bool:
        """Whether its figures are there, and of this version."""
        file = self.file(group, stage)
        return file.exists() and json.loads(file.read_text()).get("schema") == SCHEMA

    def left(self, group: str, stages: Sequence[str]) -> list[str]:
        names = [name.format(slow=f"{self.args.lab}-2") for name in stages]
        return [
            name
            for name in names
            if self.wanted(name) and (self.args.again or not self.measured(group, name))
        ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="stages that begin so")
    parser.add_argument("--quick", action="store_true", help="the most telling ones alone")
    parser.add_argument("--again", action="store_true", help="also those that were measured before")
    parser.add_argument(
        "--list", action="store_true", help="say what would be measured, and how long it takes"
    )
    parser.add_argument("--report", action="store_true", help="write the tables of what there is, and end")
    parser.add_argument("--lab", default="bench", metavar="NAME", help="of the lab (%(default)s)")
    parser.add_argument("--keep-lab", action="store_true", help="leave the lab up at the end")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "artifacts/bench", metavar="DIR", help="(%(default)s)"
    )
    args = parser.parse_args(argv)
    known = [*HOST_STAGES, *(stage for group in GROUPS for stage in group.stages)]
    known = list(dict.fromkeys(stage.format(slow=f"{args.lab}-2") for stage in known))
    for start in args.only:
        if not any(stage.startswith(start) for stage in known):
            parser.error(f"no stage begins with {start}: they are {', '.join(known)}")
    job = Job(args, args.out.resolve())
    if args.report:
        return conclude(job)

    host = job.left("host", HOST_STAGES)
    todo = [(group, job.left(group.name, group.stages)) for group in GROUPS]
    todo = [(group, stages) for group, stages in todo if stages]
    names = host + [stage for _, stages in todo for stage in stages]
    rate = core_rate()
    seconds = sum(expected(name, rate) for name in names) + (180 if todo else 0)
    for name in names:
        print(f"  {name:34} about {expected(name, rate) / 60:4.1f} min")
    print(f"{len(names)} stages to measure, about {seconds / 60:.0f} min; results in {job.out}", flush=True)
    if args.list or not names:
        return 0 if args.list else conclude(job)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    data = prepare()
    for stage in host:
        measure_host(job, stage, data)
    try:
        for group, stages in todo:
            measure_group(job, group, stages, data)
    finally:
        if todo and not args.keep_lab:
            playbook(job, "lab.yml", {"lab_state": "down"}, quiet=True)
    return conclude(job)


# -- measuring -----------------------------------------------------------------------------------------------


def prepare() -> Path:
    """Text of this machine, with the vocabulary that the sizes of depth 8 are given for."""
    data = ROOT / ".cache/bench/data"
    command = [sys.executable, "-m", "trainer", "prepare", "--out", str(data)]
    command += [f"--source={source}" for source in corpus.machine_sources()]
    run([*command, "--vocab-size", str(VOCAB_SIZE), "--max-bytes", str(corpus.MAX_BYTES)], quiet=True)
    rows = ["--rows", "--data-dir", str(data), "--sequence-len", str(LENGTH)]
    run([sys.executable, "-m", "trainer", "prepare", *rows], quiet=True)
    return data


def measure_host(job: Job, stage: str, data: Path) -> None:
    """One process on this machine, with all its cores."""
    out = job.file("host", stage)
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M:%S')} {stage}", flush=True)
    command = [sys.executable, "-m", "trainer", "bench", "--depth", str(DEPTH), "--rows", "2"]
    command += ["--data-dir", str(data), "--dtype", stage.removeprefix("host-"), "--out", str(out)]
    if run([*command, "--steps", str(HOST_STEPS)], check=False):
        job.missing.append(stage)


def measure_group(job: Job, group: Group, stages: list[str], data: Path) -> None:
    """Bring the lab to the group's state and measure."""
    print(f"{time.strftime('%H:%M:%S')} {group.name}: {', '.join(stages)}", flush=True)
    for stage in group.takes:
        source, target = job.file(GROUPS[0].name, stage), job.file(group.name, plain(stage))
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    playbook(job, "lab.yml", {"lab_state": "up", "lab_link": group.link}, quiet=True)
    set_up(job, data)
    check_shaped(job, group.link)
    limit_second(job, A_THIRD if group.slow_second else 1.0)
    try:
        measure_stages(job, group, stages, data)
        for _ in range(AGAIN):
            odd = unsteady(job, group, stages)
            if not odd:
                break
            for name, speed in odd.items():
                print(f"{name}: products ran at {percent(speed)} of solo's rate; measured again", flush=True)
            measure_stages(job, group, list(odd), data)
    finally:
        limit_second(job, 1.0)
    job.missing += [stage for stage in stages if not job.measured(group.name, stage)]


def measure_stages(job: Job, group: Group, stages: Sequence[str], data: Path) -> None:
    """By bench.yml, those alike that follow each other together; over what older figures there are."""
    for _, alike in itertools.groupby(stages, kind_of):
        some = list(alike)
        files = [job.file(group.name, stage) for stage in some]
        knobs = {
            "bench_stages": ",".join(plain(stage) for stage in some),
            "bench_steps": steps_of(some[0]),
            "bench_out": files[0].parents[1],
            "bench_link_mbit": LINK_MBIT[group.link],
            "bench_again": "true",
            "depth": DEPTH,
            "sequence_len": LENGTH,
            "data_dir": data,
            "fleet_nice": 0,
            "doctor": "never",
        }
        with neighbour(job, some[-1], files) if has_neighbour(some[0]) else nullcontext():
            playbook(job, "bench.yml", knobs)


@contextmanager
def neighbour(job: Job, stage: str, files: Sequence[Path]) -> Iterator[None]:
    """Meanwhile the second host trains by itself as the stage does, on made-up rows.

    Figures in `files` are removed if it ended before: solo would have been beside a host at rest.
    """
    tokens, dtype = stage.split("-")[1:3]
    host = ["podman", "exec", f"{job.args.lab}-2"]
    start = ["systemd-run", "--quiet", "--collect", f"--unit={NEIGHBOUR}", "--property=User=nanofleet"]
    start += ["--property=RuntimeMaxSec=2h", "--setenv=OMP_NUM_THREADS=1", "/opt/nanofleet/venv/bin/python"]
    start += ["-m", "trainer", "bench", "--depth", str(DEPTH), "--rows", str(int(tokens) // LENGTH)]
    run([*host, *start, "--dtype", dtype, "--steps", "10000"], environment(job))
    try:
        yield
        if run([*host, "systemctl", "--quiet", "is-active", NEIGHBOUR], environment(job), check=False):
            for file in files:
                file.unlink(missing_ok=True)
            said = f"podman exec {host[-1]} journalctl -u {NEIGHBOUR} -n 20"
            raise SystemExit(f"{stage}: the training on {host[-1]} ended meanwhile. What it said: {said}")
    finally:
        run([*host, "systemctl", "stop", NEIGHBOUR], environment(job), check=False)


def unsteady(job: Job, group: Group, stages: Sequence[str]) -> dict[str, float]:
    """The fleet's stages in which the machine was not as fast as beside solo, and how fast it was."""
    results, _ = load(job.out / group.name / "stages")
    speeds = {
        stage: speed_beside_solo(results[stage], results.values(), group.slow_second)
        for stage in stages
        if stage in results
    }
    return {stage: speed for stage, speed in speeds.items() if speed and abs(speed - 1) > STEADY}


def set_up(job: Job, data: Path) -> None:
    """setup.yml, unless these hosts have had it for this code and these data."""
    manifest = hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()
    state = f"{code_digest()} {manifest} {' '.join(containers(job))}\n"
    stamp = job.lab_dir / "bench-set-up"
    if stamp.exists() and stamp.read_text() == state:
        return
    if playbook(job, "setup.yml", {"data_dir": data}, quiet=True) == 0:
        stamp.write_text(state)


def containers(job: Job) -> list[str]:
    """The ids of the lab's hosts: other ones after one was made anew."""
    command = ["podman", "inspect", "--format", "{{.Id}}", f"{job.args.lab}-1", f"{job.args.lab}-2"]
    return subprocess.run(
        command, env=environment(job), stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()


def check_shaped(job: Job, link: str) -> None:
    """Both hosts must hold back what they send, so that both directions of the link have its rate."""
    wanted = link.replace("gbit", "Gbit").replace("mbit", "Mbit")
    for host in (f"{job.args.lab}-1", f"{job.args.lab}-2"):
        shown = subprocess.run(
            ["podman", "exec", host, "tc", "qdisc", "show", "dev", "eth0"],
            capture_output=True,
            text=True,
            env=environment(job),
            check=False,
        ).stdout
        if f"rate {wanted}" not in shown:
            raise SystemExit(f"{host} does not send at {link}: {shown.strip()}")
        print(f"  {host} sends at {wanted} at most: {shown.strip()}", flush=True)


def limit_second(job: Job, cores: float) -> None:
    """Give the second host so much of its core."""
    quota = round(cores * 100_000)
    command = ["podman", "update", "--cpu-period", "100000", "--cpu-quota", str(quota), f"{job.args.lab}-2"]
    subprocess.run(command, env=environment(job), stdout=subprocess.DEVNULL, check=True)


def playbook(job: Job, name: str, knobs: dict[str, Any], quiet: bool = False) -> int:
    extra = [f"-e{key}={value}" for key, value in knobs.items()]
    lab = [f"-elab_name={job.args.lab}"] if name == "lab.yml" else []
    lab += ["-elab_hosts=2", "-elab_cores=1"] if name == "lab.yml" and knobs["lab_state"] == "up" else []
    return run(["ansible-playbook", name, *lab, *extra], environment(job), quiet, check=name != "bench.yml")


def environment(job: Job) -> dict[str, str]:
    """The lab's inventory and its private settings of podman."""
    own = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_INVENTORY": str(job.lab_dir / "inventory"),
        "CONTAINERS_CONF": str(job.lab_dir / "containers.conf"),
    }
    if not (job.lab_dir / "inventory").exists():
        own = {"ANSIBLE_CONFIG": own["ANSIBLE_CONFIG"]}
    return {**os.environ, **own}


def run(
    command: Sequence[str], env: dict[str, str] | None = None, quiet: bool = False, check: bool = True
) -> int:
    """Run a command here; one that is quiet is shown when it fails."""
    stream = subprocess.PIPE if quiet else None
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=stream, stderr=None, text=True, check=False)
    if done.returncode and check:
        raise SystemExit(f"{done.stdout or ''}\n{' '.join(command[:3])} ended with {done.returncode}")
    return done.returncode


# -- the tables ----------------------------------------------------------------------------------------------


def conclude(job: Job) -> int:
    """Write what there is; 1 if something that was asked for could not be measured."""
    lines = [machine(), ""]
    host, _ = load(job.out / "host/stages")
    if host:
        lines += [host_table(host), ""]
    rows: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        folder = job.out / group.name / "stages"
        results, _ = load(folder)
        if results:
            report = [sys.executable, "-m", "trainer.bench.report", str(folder), "--out", str(folder.parent)]
            run([*report, "--link-mbit", str(LINK_MBIT[group.link])], quiet=True)
            idle, _ = load(job.file(group.name, SOLO[0]).parent)
            ratios = ratios_idle(results, idle)
            for row in compare(results, LINK_MBIT[group.link]):
                row["ratio_idle"] = ratios.get(row["stage"])
                rows[f"{group.name}/{row['stage']}"] = row
                beside = speed_beside_solo(results[row["stage"]], results.values(), group.slow_second)
                row["speed_beside_solo"] = beside
    lines += [targets_table(rows), ""]
    for group in GROUPS:
        path = job.out / group.name / "bench.md"
        if path.exists():
            lines += [f"### {group.name}", "", path.read_text()]
    text = "\n".join(lines)
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / "bars.md").write_text(text + "\n")
    (job.out / "bars.json").write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")
    print(text)
    if job.missing:
        print(f"Not measured: {', '.join(job.missing)}. Type the same again: what there is, is kept.")
    return 1 if job.missing else 0


def ratios_idle(results: dict[str, Any], idle: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as a solo beside a host at rest each of the fleet's stages is."""
    fleet = {name: result for name, result in results.items() if result["world_size"] > 1}
    return {row["stage"]: row["ratio"] for row in compare(fleet | idle) if "ratio" in row}


def machine() -> str:
    from trainer.host.facts import host_facts

    facts = host_facts()
    return (
        f"{facts.get('cpu', platform.machine())}, {facts['cores']} cores, {facts.get('memory', '?')}, "
        f"{facts.get('system', '')}, torch {facts.get('torch', '?')}, {time.strftime('%Y-%m-%d')}."
    )


if __name__ == "__main__":
    sys.exit(main())
