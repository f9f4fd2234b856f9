"""Benchmarks on one machine: the machine itself, and a lab of two hosts with one core each.

    make bench                              all cases; existing results are kept
    make bench ARGS="--quick"               this machine in float32; exact at 4,096 tokens and its baselines
    make bench ARGS="--only exact-4096"     the cases whose names start with this (--again: measure again)
    make bench ARGS="--list"                the cases, and about how long each takes
    make bench ARGS="--record"              all cases, then docs/recorded/bench.json for the documentation

Depth 8, rows of 1,024 tokens. Prints the expected duration, measures each case with `bench.yml`, writes the
figures of the case to OUT/GROUP/cases, and writes OUT/targets.md, OUT/targets.json and a report per group.
Run no other load on the machine: the tables show the share of its cores that each process had.

Two hosts on one machine slow each other down, because they share its memory bus and its clock. Separate
machines do not. So the single-host baseline is measured while the other host trains a model of its own, which
slows the baseline down as much as the second rank of a fleet does. The `idle/` cases are baselines that are
measured while the other host is idle; the tables have both.
"""

from __future__ import annotations

import argparse
import contextlib
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

from benchmarks import record
from benchmarks.cases import (
    A_THIRD,
    DEPTH,
    GROUPS,
    HOST_CASES,
    HOST_STEPS,
    IDLE,
    IDLE_BASELINES,
    LENGTH,
    LINK_MBIT,
    QUICK,
    VOCAB_SIZE,
    Group,
    core_rate,
    expected,
    has_neighbour,
    kind_of,
    plain,
    steps_of,
)
from benchmarks.targets import host_table, prediction_line, relative_gemm_rate, targets_table
from fleet import corpus
from trainer.bench import SCHEMA
from trainer.bench.report import compare, load
from trainer.bench.text import percent
from trainer.code_digest import code_digest

ROOT = Path(__file__).resolve().parents[1]
STEADY = 0.10  # accepted difference between the GEMM rates of a case and of its baseline
NEIGHBOUR = "nanofleet-neighbour.service"
REPEATS = 2  # the most repetitions of a case with a larger difference


@dataclass
class Job:
    """The requested measurements.

    args: the command line. out: the output folder. missing: names of the cases that could not be measured.
    """

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

    def file(self, group: str, case: str) -> Path:
        folder = self.out / group / (IDLE if case.startswith(IDLE) else "")
        return folder / "cases" / f"{plain(case)}.json"

    def measured(self, group: str, case: str) -> bool:
        """Whether the result file of a case exists and has the current SCHEMA."""
        file = self.file(group, case)
        return file.exists() and json.loads(file.read_text()).get("schema") == SCHEMA

    def left(self, group: str, cases: Sequence[str]) -> list[str]:
        names = [name.format(slow=f"{self.args.lab}-2") for name in cases]
        return [
            name
            for name in names
            if self.wanted(name) and (self.args.again or not self.measured(group, name))
        ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="cases that start with this")
    parser.add_argument("--quick", action="store_true", help="the most important cases only")
    parser.add_argument("--again", action="store_true", help="measure existing results again")
    parser.add_argument("--list", action="store_true", help="print the cases and their expected duration")
    parser.add_argument("--report", action="store_true", help="only write the tables of existing results")
    parser.add_argument(
        "--record", action="store_true", help="also write docs/recorded/bench.json, if all cases are measured"
    )
    parser.add_argument("--lab", default="bench", metavar="NAME", help="name of the lab (%(default)s)")
    parser.add_argument("--keep-lab", action="store_true", help="do not remove the lab at the end")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "artifacts/bench", metavar="DIR", help="(%(default)s)"
    )
    args = parser.parse_args(argv)
    known = [*HOST_CASES, *(case for group in GROUPS for case in group.cases)]
    known = list(dict.fromkeys(case.format(slow=f"{args.lab}-2") for case in known))
    for start in args.only:
        if not any(case.startswith(start) for case in known):
            parser.error(f"no case begins with {start}: they are {', '.join(known)}")
    job = Job(args, args.out.resolve())
    if args.report:
        return conclude(job)

    host = job.left("host", HOST_CASES)
    todo = [(group, job.left(group.name, group.cases)) for group in GROUPS]
    todo = [(group, cases) for group, cases in todo if cases]
    names = host + [case for _, cases in todo for case in cases]
    rate = core_rate()
    seconds = sum(expected(name, rate) for name in names) + (180 if todo else 0)
    for name in names:
        print(f"  {name:34} about {expected(name, rate) / 60:4.1f} min")
    print(f"{len(names)} cases to measure, about {seconds / 60:.0f} min; results in {job.out}", flush=True)
    if args.list or not names:
        return 0 if args.list else conclude(job)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally blocks
    data = prepare()
    for case in host:
        measure_host(job, case, data)
    try:
        for group, cases in todo:
            measure_group(job, group, cases, data)
    finally:
        if todo and not args.keep_lab:
            playbook(job, "lab.yml", {"lab_state": "down"}, quiet=True)
    return conclude(job)


# -- measuring -----------------------------------------------------------------------------------------------


def prepare() -> Path:
    """Prepare texts on this machine as data, with a vocabulary of VOCAB_SIZE; returns the data directory."""
    data = ROOT / ".cache/bench/data"
    command = [sys.executable, "-m", "trainer", "prepare", "--out", str(data)]
    command += [f"--source={source}" for source in corpus.machine_sources()]
    run([*command, "--vocab-size", str(VOCAB_SIZE), "--max-bytes", str(corpus.MAX_BYTES)], quiet=True)
    rows = ["--rows", "--data-dir", str(data), "--sequence-len", str(LENGTH)]
    run([sys.executable, "-m", "trainer", "prepare", *rows], quiet=True)
    return data


def measure_host(job: Job, case: str, data: Path) -> None:
    """Measure one process with all cores of this machine. The name `case` ends with the dtype."""
    out = job.file("host", case)
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M:%S')} {case}", flush=True)
    command = [sys.executable, "-m", "trainer", "bench", "--depth", str(DEPTH), "--rows", "2"]
    command += ["--data-dir", str(data), "--dtype", case.removeprefix("host-"), "--out", str(out)]
    if run([*command, "--steps", str(HOST_STEPS)], check=False):
        job.missing.append(case)


def measure_group(job: Job, group: Group, cases: list[str], data: Path) -> None:
    """Set up the lab for a group, and measure `cases`.

    A case whose GEMM rate differs from that of its baseline (see `unsteady`) is measured again, at most
    REPEATS times. data: the data directory.
    """
    print(f"{time.strftime('%H:%M:%S')} {group.name}: {', '.join(cases)}", flush=True)
    for case in group.takes:
        source, target = job.file(GROUPS[0].name, case), job.file(group.name, plain(case))
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    playbook(job, "lab.yml", {"lab_state": "up", "lab_link": group.link}, quiet=True)
    set_up(job, data)
    check_shaped(job, group.link)
    limit_second(job, A_THIRD if group.slow_second else 1.0)
    try:
        measure_cases(job, group, cases, data)
        for _ in range(REPEATS):
            odd = unsteady(job, group, cases)
            if not odd:
                break
            for name, speed in odd.items():
                print(
                    f"{name}: its GEMM rate is {percent(speed)} of the baseline's; measured again", flush=True
                )
            measure_cases(job, group, list(odd), data)
    finally:
        limit_second(job, 1.0)
    job.missing += [case for case in cases if not job.measured(group.name, case)]


def measure_cases(job: Job, group: Group, cases: Sequence[str], data: Path) -> None:
    """Measure cases with bench.yml, replacing older results.

    Consecutive cases with an equal `kind_of` are measured in one run of bench.yml. data: the data directory.
    """
    for _, alike in itertools.groupby(cases, kind_of):
        some = list(alike)
        files = [job.file(group.name, case) for case in some]
        settings = {
            "bench_cases": ",".join(plain(case) for case in some),
            "bench_steps": steps_of(some[0]),
            "bench_out": files[0].parents[1],
            "bench_link_mbit": LINK_MBIT[group.link],
            "bench_again": "true",
            "depth": group.depth,
            "sequence_len": LENGTH,
            "data_dir": data,
            "fleet_nice": 0,
            "doctor": "never",
        }
        with neighbour(job, some[-1], files) if has_neighbour(some[0]) else nullcontext():
            playbook(job, "bench.yml", settings)


@contextmanager
def neighbour(job: Job, case: str, files: Sequence[Path]) -> Iterator[None]:
    """During the `with` block, the second host trains a model of its own, with tokens and dtype of the case.

    files: the results of the block. If that training ends before the block, the second host was idle: the
    results are deleted, and SystemExit is raised.
    """
    tokens, dtype = case.split("-")[1:3]
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
            log = f"podman exec {host[-1]} journalctl -u {NEIGHBOUR} -n 20"
            raise SystemExit(f"{case}: the training on {host[-1]} ended too early. Its log: {log}")
    finally:
        run([*host, "systemctl", "stop", NEIGHBOUR], environment(job), check=False)


def unsteady(job: Job, group: Group, cases: Sequence[str]) -> dict[str, float]:
    """The cases whose GEMM rate differs from that of their baseline by more than STEADY: {case: ratio}."""
    results, _ = load(job.out / group.name / "cases")
    speeds = {
        case: relative_gemm_rate(results[case], results.values(), group.slow_second)
        for case in cases
        if case in results
    }
    return {case: speed for case, speed in speeds.items() if speed and abs(speed - 1) > STEADY}


def set_up(job: Job, data: Path) -> None:
    """Run setup.yml, unless it has already run on these hosts for this trainer and this data."""
    manifest = hashlib.sha256((data / "manifest.json").read_bytes()).hexdigest()
    state = f"{code_digest()} {manifest} {' '.join(containers(job))}\n"
    stamp = job.lab_dir / "bench-set-up"
    if stamp.exists() and stamp.read_text() == state:
        return
    if playbook(job, "setup.yml", {"data_dir": data}, quiet=True) == 0:
        stamp.write_text(state)


def containers(job: Job) -> list[str]:
    """The container ids of the lab's two hosts; they change when a host is created again."""
    command = ["podman", "inspect", "--format", "{{.Id}}", f"{job.args.lab}-1", f"{job.args.lab}-2"]
    return subprocess.run(
        command, env=environment(job), stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()


def check_shaped(job: Job, link: str) -> None:
    """Raise SystemExit unless both hosts limit their send rate to `link`, such as 100mbit."""
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
            raise SystemExit(
                f"{host} does not limit its send rate to {link}: {shown.strip()}. Remove the lab and measure "
                f"again: ansible-playbook lab.yml -e lab_state=down -e lab_name={job.args.lab}"
            )
        print(f"  {host} sends at {wanted} at most: {shown.strip()}", flush=True)


def limit_second(job: Job, cores: float) -> None:
    """Limit the second host of the lab to the share `cores` of its one core; 1.0 is the whole core."""
    quota = round(cores * 100_000)
    command = ["podman", "update", "--cpu-period", "100000", "--cpu-quota", str(quota), f"{job.args.lab}-2"]
    subprocess.run(command, env=environment(job), stdout=subprocess.DEVNULL, check=True)


def playbook(job: Job, name: str, settings: dict[str, Any], quiet: bool = False) -> int:
    extra = [f"-e{key}={value}" for key, value in settings.items()]
    lab = [f"-elab_name={job.args.lab}"] if name == "lab.yml" else []
    lab += ["-elab_hosts=2", "-elab_cores=1"] if name == "lab.yml" and settings["lab_state"] == "up" else []
    return run(["ansible-playbook", name, *lab, *extra], environment(job), quiet, check=name != "bench.yml")


def environment(job: Job) -> dict[str, str]:
    """The environment for commands on the lab: its inventory and podman configuration, once they exist."""
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
    """Run a command in the checkout; returns its exit code. With `check`, a failure raises SystemExit.

    quiet: show standard output only if the command fails.
    """
    stream = subprocess.PIPE if quiet else None
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=stream, stderr=None, text=True, check=False)
    if done.returncode and check:
        raise SystemExit(f"{done.stdout or ''}\n{' '.join(command[:3])} ended with {done.returncode}")
    return done.returncode


# -- the tables ----------------------------------------------------------------------------------------------


def conclude(job: Job) -> int:
    """Write and print the tables of all results. Returns 1 if a requested case could not be measured."""
    lines = [f"{machine()}, {time.strftime('%Y-%m-%d')}.", ""]
    host, _ = load(job.out / "host/cases")
    if host:
        lines += [host_table(host), ""]
    rows: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        folder = job.out / group.name / "cases"
        results, _ = load(folder)
        if results:
            report = [sys.executable, "-m", "trainer.bench.report", str(folder), "--out", str(folder.parent)]
            run([*report, "--link-mbit", str(LINK_MBIT[group.link])], quiet=True)
            idle, _ = load(job.file(group.name, IDLE_BASELINES[0]).parent)
            ratios = ratios_idle(results, idle)
            for row in compare(results, LINK_MBIT[group.link]):
                row["ratio_idle"] = ratios.get(row["case"])
                rows[f"{group.name}/{row['case']}"] = row
                beside = relative_gemm_rate(results[row["case"]], results.values(), group.slow_second)
                row["relative_gemm_rate"] = beside
    lines += [targets_table(rows), "", prediction_line(rows.values()), ""]
    for group in GROUPS:
        path = job.out / group.name / "bench.md"
        if path.exists():
            lines += [f"### {group.name}", "", path.read_text()]
    text = "\n".join(lines)
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / "targets.md").write_text(text + "\n")
    (job.out / "targets.json").write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")
    print(text)
    if job.args.record and not job.missing:
        try:
            record.write(record.RECORD, record.record(host, rows, machine()))
        except KeyError as error:
            job.missing.append(str(error).strip("'"))
        else:
            print("Written: docs/recorded/bench.json. Fill the pages: python -m scripts.docs_figures")
    if job.missing:
        print(f"Not measured: {', '.join(job.missing)}. Type the same again; existing results are kept.")
    return 1 if job.missing else 0


def ratios_idle(results: dict[str, Any], idle: dict[str, Any]) -> dict[str, float]:
    """{case: ratio of tokens per second to those of the idle baseline} of the cases of two hosts.

    results: {case: result}. idle: {case: result} of the baselines measured while the other host was idle.
    """
    fleet = {name: result for name, result in results.items() if result["world_size"] > 1}
    return {row["case"]: row["ratio"] for row in compare(fleet | idle) if "ratio" in row}


def machine() -> str:
    from trainer.host.facts import host_facts

    facts = host_facts()
    return (
        f"{facts.get('cpu', platform.machine())}{_instructions()}, {facts['cores']} cores, "
        f"{facts.get('memory', '?')}, {facts.get('system', '')}, torch {facts.get('torch', '?')}"
    )


def _instructions() -> str:
    """The instruction sets that decide the GEMM rate, as the kernel lists them; "" if it lists none."""
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
        known = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
        found = [name for flag, name in known.items() if flag in flags]
        return f" with {', '.join(found)}{'' if 'AMX' in found else ', no AMX'}" if found else ""
    return ""


if __name__ == "__main__":
    sys.exit(main())
