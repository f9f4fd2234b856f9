"""Chooses the number of threads of a rank and their processors, by measurement at the first start of a run.

    numerics = bind_threads(numerics, config, env, run_dir, log)      # on a CPU, before the rank computes

threads.json in the run directory keeps the chosen processors of this host, so that a restart does not measure
again. They are chosen again if the shape of the model, the number format, the version of torch, the CPU or
the set of usable processors has changed. A checkpoint has the chosen processors too
(`trainer.host.numerics.restore_numerics`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.config import RunConfig
from trainer.data.files import write_json
from trainer.formatting import counted
from trainer.host.cores import at_most_quota
from trainer.host.gemm import gemm_rates
from trainer.host.logger import RunLogger, fields
from trainer.host.numerics import Binding, Numerics, name_of, threads_set
from trainer.host.pinning import can_pin, pin
from trainer.host.rank_env import RankEnv
from trainer.host.topology import Topology, cpu_list, parse_cpu_list, read_topology
from trainer.model.gpt import GPT, GPTConfig
from trainer.placement.threads import (
    WORK_SECONDS,
    TimedCandidate,
    candidates_of,
    choose_threads,
    layer_work,
    ranks_per_node,
)

CHOICE = "threads.json"
SHAPE = ("depth", "aspect_ratio", "head_dim", "n_kv_head", "sequence_len", "device_batch_size")
Json = dict[str, Any]


def bind_threads(
    numerics: Numerics, config: RunConfig, env: RankEnv, run_dir: Path, log: RunLogger
) -> Numerics:
    """Bind the threads of this rank to processors; returns `numerics` with their number and the binding.

    One rank on a host is bound to the fastest processors, unless the number of threads is set. Several ranks
    are bound only if there are as many ranks as NUMA nodes and a node has a processor for each thread: each
    rank is then bound to the processors of its own node, and `numerics` is returned unchanged. If the system
    refuses the binding, logs a warning. numerics: device, number formats and threads of this rank. config,
    env: settings and environment of this rank. run_dir: keeps the chosen processors in threads.json.
    """
    if not can_pin():
        return numerics
    topology = read_topology()
    try:
        if env.local_world_size > 1:
            return _bind_to_node(numerics, topology, env)
        if threads_set(config.threads):
            return numerics
        return _bind_to_choice(numerics, topology, config, run_dir, log)
    except OSError as error:
        log.info(f"warning: the threads are not bound to processors, because the system refuses it: {error}")
        return numerics


def _bind_to_node(numerics: Numerics, topology: Topology, env: RankEnv) -> Numerics:
    nodes = [topology.nodes[node] for node in sorted(topology.nodes)]
    if len(nodes) != env.local_world_size or numerics.threads > len(nodes[env.local_rank]):
        return numerics
    pin(nodes[env.local_rank], numerics.threads)
    return numerics


def _bind_to_choice(
    numerics: Numerics, topology: Topology, config: RunConfig, run_dir: Path, log: RunLogger
) -> Numerics:
    usable = cpu_list(cpu.number for cpu in topology.cpus)
    host = Binding(usable=usable, cores=at_most_quota(len(topology.cpus))).host()
    key = {
        **{name: getattr(config, name) for name in SHAPE},
        "dtype": name_of(numerics.compute_dtype),
        "torch": torch.__version__,
        "processor": numerics.processor,
        **host,
    }
    choice = read_choice(run_dir / CHOICE)
    before = choice.get("of", key)
    changes = [
        f"{name} was {before.get(name)}, now {now}" for name, now in key.items() if before.get(name) != now
    ]
    if changes:
        log.info(f"The threads are chosen again: {'; '.join(changes)}.")
    if not choice or changes:
        choice = {"of": key, **_choose(numerics, topology, config, log)}
        with contextlib.suppress(OSError):  # a full disk: the next start measures again
            write_json(run_dir / CHOICE, choice)
    elif choice["ms"]:
        log.info(
            f"{counted(choice['threads'], 'thread')} on CPUs {choice['cpus']} ({choice['name']}), as "
            "measured at an earlier start of this run."
        )
    if choice["cpus"] == usable:
        torch.set_num_threads(choice["threads"])
    else:
        pin(parse_cpu_list(choice["cpus"]), choice["threads"])
    binding = Binding(choice["cpus"], usable, host["cores"], _reason(choice))
    return dataclasses.replace(numerics, threads=choice["threads"], binding=binding)


def read_choice(path: Path) -> Json:
    """Read the processors that an earlier start of the run has chosen, from `path`, a threads.json.

    Returns {} if the file is missing or cannot be used; else a dict with the keys
    of: dict of the values for which the processors were chosen: model shape, number format, version of torch,
        name of the CPU, usable processors and their number.
    cpus: the processors in list format, such as "0-7".
    threads: number of threads.
    name: name of the set of processors, such as "all physical cores".
    ms: {name of a measured set: milliseconds}; {} if nothing was measured.
    """
    try:
        choice = json.loads(path.read_text(encoding="utf-8"))
        cpus, of = parse_cpu_list(choice["cpus"]), choice["of"]
        usable = parse_cpu_list(of["usable_cpus"])
        is_sound = cpus and cpus <= usable and 0 < int(choice["threads"]) <= len(cpus)
        return dict(choice) if is_sound and isinstance(choice["ms"], dict) and choice["name"] else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _choose(numerics: Numerics, topology: Topology, config: RunConfig, log: RunLogger) -> Json:
    """Choose the set of processors by measurement, or without one if there is only one set.

    Returns a dict with the keys cpus, threads, name and ms, as in `read_choice`.
    """
    candidates = candidates_of(topology)
    if len(candidates) == 1:
        usable = cpu_list(cpu.number for cpu in topology.cpus)  # unbound, also with a CPU quota
        return {"cpus": usable, "threads": len(candidates[0].cpus), "name": candidates[0].name, "ms": {}}
    smallest = len(candidates[0].cpus)
    make_work = work_maker(config, numerics.compute_dtype, smallest, numerics.rates)
    choice = choose_threads(topology, make_work(), candidates)
    best = choice.best.candidate
    log.info(
        f"{counted(len(best.cpus), 'thread')} on CPUs {cpu_list(best.cpus)} ({best.name}): of "
        f"{len(candidates)} measured sets of CPUs, the smallest that is at most 2 % slower than the fastest "
        "(measured: a layer and its Muon update).\n" + "\n".join(choice.table()),
        extra=fields("threads", **choice.saved()),
    )
    if proposal := propose_ranks(topology, choice.best, make_work):
        log.info(proposal)
    return {**choice.saved(), "threads": len(best.cpus)}


def work_maker(
    config: RunConfig, compute_dtype: torch.dtype, cores: int, rates: Mapping[torch.dtype, float]
) -> Callable[[], Callable[[], object]]:
    """A function without arguments that creates the work to time on each set of processors.

    The created work is a function that computes one layer of the run's width (see `layer_work`), and takes
    about WORK_SECONDS on `cores` cores. config: settings of the run. compute_dtype: number format of the
    GEMMs. rates: {number format: GEMM rate of one core in FLOP/s}; measured here if it lacks compute_dtype.
    """
    rate = rates.get(compute_dtype) or gemm_rates([compute_dtype])[compute_dtype]
    shape = GPTConfig.from_depth(
        1, 64, config.sequence_len, config.n_embd, config.head_dim, config.n_kv_head, config.window_pattern
    )
    flops = rate * cores * WORK_SECONDS
    return lambda: layer_work(GPT(shape), compute_dtype, config.device_batch_size, flops)


def propose_ranks(
    topology: Topology, best: TimedCandidate, make_work: Callable[[], Callable[[], object]]
) -> str:
    """The sentence that proposes one rank on each NUMA node, if this is faster; "" if it is not.

    topology, best, make_work: as for `ranks_per_node`.
    """
    ranks, speed = ranks_per_node(topology, best, make_work)
    if ranks == 1:
        return ""
    return (
        f"One rank on each of the {ranks} NUMA nodes computes {speed:.2f} times as fast as one rank. To have "
        f"them, set nproc_per_node: {ranks} for this host in the inventory (torchrun: "
        f"--nproc-per-node {ranks})."
    )


def _reason(choice: Mapping[str, Any]) -> str:
    """The text for the tracker: why the processors in `choice` were chosen, with the measured times."""
    if not choice["ms"]:
        return f"{choice['name']}: no other set to measure"
    return f"{choice['name']}: fastest of " + ", ".join(f"{n} {ms:g} ms" for n, ms in choice["ms"].items())
