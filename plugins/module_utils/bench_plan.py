"""The benchmark cases that bench.yml measures, made from their names.

A case is a dict: name, hosts, nproc (ranks on each host), config (settings of its run), shares (batch split).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json
from ansible_collections.nanofleet.fleet.trainer import bench
from ansible_collections.nanofleet.fleet.trainer import config as trainer

ONE_HOST = ("solo", "gpu", "ranks")
RANKS_ON_A_HOST = 2
NAME = re.compile(
    r"(?P<kind>[a-z]+)-(?P<tokens>\d+)(-(?P<format>float32|bfloat16))?(-(?P<shares>auto|\d+(\.\d+)+))?(-on-(?P<host>.+))?"
)
Case = dict[str, Any]


def bench_plan(
    asked: str,
    hosts: Sequence[str],
    gpu_hosts: Sequence[str],
    config: Mapping[str, Any],
    tokens: int,
    steps: int,
) -> list[Case]:
    """The benchmark cases that `asked` names, separated by commas; the default cases if it is empty.

    Raises AnsibleFilterError for an invalid name and for settings that RunConfig refuses.
    """
    names = [name.strip() for name in asked.split(",") if name.strip()]
    problems, cases = [], []
    for name in names or default_cases(hosts, gpu_hosts, tokens):
        try:
            cases.append(_case(name, hosts, config, steps))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise AnsibleFilterError("bench_stages: " + " ".join(problems))
    return cases


def default_cases(hosts: Sequence[str], gpu_hosts: Sequence[str], tokens: int) -> list[str]:
    """Names of the default benchmark cases. tokens: tokens per step, of all ranks together.

    These are each host alone, the GPU of each GPU host, two ranks on the first host, all hosts in every sync
    mode. The coordinator alone with tokens / len(hosts) gives the least step time that the fleet can have. In
    sync=local every rank has `tokens` per step.
    """
    names = [f"solo-{tokens}-on-{host}" for host in hosts]
    names += [f"gpu-{tokens}-on-{host}" for host in gpu_hosts]
    several = len(hosts) > 1
    names += [f"solo-{tokens // len(hosts)}-on-{hosts[0]}"] if several else []
    names.append(f"ranks-{tokens}-on-{hosts[0]}")
    modes = trainer.SYNC_MODES if several else ()
    return names + [f"{mode}-{tokens * len(hosts) if mode == 'local' else tokens}" for mode in modes]


def _case(name: str, hosts: Sequence[str], config: Mapping[str, Any], steps: int) -> Case:
    match = NAME.fullmatch(name)
    if not match:
        raise ValueError("a case is KIND-TOKENS[-FORMAT][-SHARES][-on-HOST], such as exact-4096-float32.")
    kind, shares = match["kind"], match["shares"]
    if kind not in (*ONE_HOST, *trainer.SYNC_MODES):
        raise ValueError(f"its kind is {' or '.join((*ONE_HOST, *trainer.SYNC_MODES))}.")
    if match["host"] and match["host"] not in hosts:
        raise ValueError(f"there is no host {match['host']}, only {', '.join(hosts)}.")
    if kind not in ONE_HOST and (match["host"] or len(hosts) < 2):
        raise ValueError("a sync mode is measured on all hosts of a fleet, two or more.")
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
        "solo": {"device": "cpu"},
        "gpu": {"device": "cuda"},
        "ranks": {"sync": "exact"},
    }.get(kind, {"sync": kind})
    trainer.RunConfig.from_strings(settings)
    return {
        "name": name,
        "hosts": [match["host"] or hosts[0]] if kind in ONE_HOST else list(hosts),
        "nproc": RANKS_ON_A_HOST if kind == "ranks" else 1,
        "config": settings,
        "shares": shares.replace(".", ",") if shares else "equal",
    }


def measured(plan: Sequence[Case], paths: Sequence[Path]) -> list[str]:
    """Names of the cases of `plan` whose result file (NAME.json in `paths`) can be used instead of a run.

    Schema, hosts, depth, sequence_len and device_batch_size must be equal, and the file must have at least as
    many steps. It does not record the link, the data and other settings: if these have changed, measure again
    with -e bench_again=true.
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
    """A sentence that names the cases to measure (`left`) and counts those of `plan` with a result file."""
    names = ", ".join(case["name"] for case in left) or "nothing"
    kept = len(plan) - len(left)
    before = f"; {kept} of {len(plan)} cases have a result (-e bench_again=true measures them again)"
    return f"Measured now: {names}{before if kept else ''}."
