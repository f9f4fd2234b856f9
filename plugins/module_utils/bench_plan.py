"""The benchmark cases that bench.yml measures, made from their names.

A case is a dict: name, hosts, nproc (ranks on each host), config (settings of its run), shares (batch split),
arguments (more options of `trainer bench`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_memory import Need
from ansible_collections.nanofleet.fleet.trainer import bench
from ansible_collections.nanofleet.fleet.trainer import config as trainer

ONE_HOST = ("single", "gpu", "ranks")
SEVERAL_HOSTS = (bench.DDP, *trainer.SYNC_MODES)
KINDS = (*ONE_HOST, *SEVERAL_HOSTS)
PROCESSES = (2, 4)  # of the default cases of the kind ranks; ranks-4096 means ranks2-4096
NAME = re.compile(
    r"(?P<kind>[a-z]+)(?P<processes>\d+)?-(?P<tokens>\d+)(-(?P<format>float32|bfloat16))?(-(?P<shares>auto|\d+(\.\d+)+))?(-on-(?P<host>.+))?"
)
Case = dict[str, Any]


def bench_plan(
    asked: str,
    hosts: Sequence[str],
    gpu_hosts: Sequence[str],
    config: Mapping[str, Any],
    tokens: int,
    steps: int,
    threads: int = 0,
    memory_gb: float = 0.0,
) -> list[Case]:
    """The benchmark cases of bench.yml, as the dicts that the top of this file describes.

    asked: names of cases, separated by commas; "" for the default ones.
    hosts, gpu_hosts: names of all hosts, and of the hosts with a GPU.
    config: {setting: value} of the runs.
    tokens: the number of tokens in a step. steps: the number of measured steps of a case.
    threads, memory_gb: CPU threads and memory (GiB) of the first host, 0 if unknown. They limit how many
        processes the default cases start on this host: with `threads` unknown, two at most.
    Raises AnsibleFilterError for an invalid name and for settings that RunConfig refuses.
    """
    names = [name.strip() for name in asked.split(",") if name.strip()]
    problems, cases = [], []
    least, *more = PROCESSES
    processes = [least, *(n for n in more if _has_room(n, config, tokens, threads, memory_gb))]
    for name in names or default_cases(hosts, gpu_hosts, tokens, processes):
        try:
            cases.append(_case(name, hosts, config, steps))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise AnsibleFilterError("bench_cases: " + " ".join(problems))
    return cases


def _has_room(ranks: int, config: Mapping[str, Any], tokens: int, threads: int, memory_gb: float) -> bool:
    """Whether a host has a thread, memory and a sequence of the step for each of `ranks` ranks.

    config: {setting: value} of the run. tokens: the number of tokens in a step. threads: CPU threads of the
    host. memory_gb: memory of the host in GiB; 0: unknown, taken as enough. The result is False for settings
    that RunConfig refuses.
    """
    try:
        rows = tokens // trainer.RunConfig.from_strings(config).sequence_len
        need = Need(config, ranks=ranks, world_size=ranks, coordinates=False)
    except ValueError:  # the cases report it
        return False
    return min(threads, rows) >= ranks and (not memory_gb or need.memory_gb <= memory_gb)


def default_cases(
    hosts: Sequence[str], gpu_hosts: Sequence[str], tokens: int, processes: Sequence[int] = PROCESSES[:1]
) -> list[str]:
    """Names of the default benchmark cases.

    hosts, gpu_hosts: names of all hosts, and of the hosts with a GPU. tokens: the number of tokens in a step,
    of all ranks together. processes: numbers of processes. The cases are each host alone, the GPU of each GPU
    host, the first host with each of these numbers of processes, and all hosts with plain DDP and in every
    sync mode. In sync=local every rank has `tokens` tokens per step. With several hosts there is one more
    case: the first host alone with `tokens` / len(hosts) tokens per step. The step time of this case is the
    least that the fleet can reach.
    """
    names = [f"single-{tokens}-on-{host}" for host in hosts]
    names += [f"gpu-{tokens}-on-{host}" for host in gpu_hosts]
    several = len(hosts) > 1
    names += [f"single-{tokens // len(hosts)}-on-{hosts[0]}"] if several else []
    names += [f"ranks{number}-{tokens}-on-{hosts[0]}" for number in processes]
    kinds = SEVERAL_HOSTS if several else ()
    return names + [f"{kind}-{tokens * len(hosts) if kind == 'local' else tokens}" for kind in kinds]


def _case(name: str, hosts: Sequence[str], config: Mapping[str, Any], steps: int) -> Case:
    match = NAME.fullmatch(name)
    if not match:
        raise ValueError("a case is KIND-TOKENS[-FORMAT][-SHARES][-on-HOST], such as exact-4096-float32.")
    kind, shares = match["kind"], match["shares"]
    if kind not in KINDS:
        raise ValueError(f"its kind (before the first -) must be {' or '.join(KINDS)}.")
    nproc = int(match["processes"] or PROCESSES[0]) if kind == "ranks" else 1
    if (match["processes"] and kind != "ranks") or (kind == "ranks" and nproc < 2):
        raise ValueError(
            "a number after the kind is the number of processes: only the kind ranks takes it, and it must "
            "be 2 or more, as in ranks4-4096."
        )
    if kind == bench.DDP and shares == trainer.BY_SPEED:
        raise ValueError("plain DDP measures no speeds: leave out auto, or give rows by rank such as 3.1.")
    if match["host"] and match["host"] not in hosts:
        raise ValueError(f"there is no host {match['host']}, only {', '.join(hosts)}.")
    if kind not in ONE_HOST and (match["host"] or len(hosts) < 2):
        raise ValueError(f"{kind} is measured on all hosts of a fleet, two or more.")
    case_hosts = [match["host"] or hosts[0]] if kind in ONE_HOST else list(hosts)
    settings = {
        **config,
        "num_iterations": bench.WARM_STEPS + steps,
        "total_batch_size": int(match["tokens"]),
        "tracker": "none",
        "save_minutes": 0,
        "digest_every": 0,
    }
    if match["format"]:
        settings["dtype"] = match["format"]
    settings |= {
        "single": {"device": "cpu"},
        "gpu": {"device": "cuda"},
        "ranks": {"sync": "exact"},
        bench.DDP: {"sync": "dense"},  # not used
    }.get(kind, {"sync": kind})
    run = trainer.RunConfig.from_strings(settings)
    rows, ranks = run.total_batch_size // run.sequence_len, nproc * len(case_hosts)
    if 0 < rows < ranks:
        raise ValueError(f"{ranks} ranks need a sequence each, {ranks * run.sequence_len} tokens or more.")
    return {
        "name": name,
        "hosts": case_hosts,
        "nproc": nproc,
        "config": settings,
        "shares": shares.replace(".", ",") if shares else "equal",
        "arguments": ["--ddp"] if kind == bench.DDP else [],
    }


def measured(plan: Sequence[Case], paths: Sequence[Path]) -> list[str]:
    """The names of the cases that need no new run, because each has a usable result file.

    plan: all cases. paths: the result files, NAME.json. A file is usable if its schema is the present one,
    its hosts, depth, sequence_len and device_batch_size are those of the case, and it has at least as many
    steps as the case. A file does not record the link, the data and other settings: if these have changed,
    measure again with -e bench_again=true.
    """
    results = {path.stem: load_json(str(path)) or {} for path in paths}
    return [case["name"] for case in plan if _covers(results.get(case["name"], {}), case)]


def _covers(result: Mapping[str, Any], case: Case) -> bool:
    if result.get("schema") != bench.SCHEMA or set(result["hosts"]) != set(case["hosts"]):
        return False
    config = trainer.RunConfig.from_strings(case["config"])
    names = ("depth", "sequence_len", "device_batch_size")
    same = all(result[name] == getattr(config, name) for name in names)
    return same and bool(result["steps"] >= config.num_iterations - bench.WARM_STEPS)


def summary(plan: Sequence[Case], left: Sequence[Case]) -> str:
    """A sentence with the names of the cases to measure and the number of cases that have a result file.

    plan: all cases. left: those of `plan` that have to be measured.
    """
    names = ", ".join(case["name"] for case in left) or "nothing"
    kept = len(plan) - len(left)
    before = f"; {kept} of {len(plan)} cases have a result (-e bench_again=true measures them again)"
    return f"Measured now: {names}{before if kept else ''}."
