"""Findings about the memory, disk and processor that the requested run needs on each host.

Facts are those of preflight_hosts.py. Sizes are in GiB.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding, warning
from ansible_collections.nanofleet.fleet.plugins.module_utils.run_memory import GIB, VOCABULARY, Need
from ansible_collections.nanofleet.fleet.plugins.module_utils.systemd_unit import numbers
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig

NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
Facts = Mapping[str, Any]


def run_findings(facts_by_host: Mapping[str, Facts], options: Mapping[str, Any]) -> list[Finding]:
    """All findings about the requested run on all hosts; [] if no run is requested.

    facts_by_host: {host: facts of its probe}, the coordinator first. options: a dict with asked (whether a
    run is requested) and config ({setting: value} of the settings that were given).
    """
    if not options["asked"]:
        return []
    request = Request(facts_by_host, options)
    findings = list(_elastic(request))
    joining = request.joining()
    for host in joining or request.reached:  # the other hosts train already
        facts, need = request.reached[host], joining.get(host, request.needs[host])
        findings += _memory(host, facts, need, bool(request.stored), host in joining)
        findings += _disk(host, facts, need) if need.coordinates else []
        findings += [] if request.on_gpu else _processor(host, facts, request)
        findings += _cpus(host, facts, request.config, need.ranks)
    return findings


def run_settings(facts_by_host: Mapping[str, Facts], options: Mapping[str, Any]) -> dict[str, str]:
    """The settings of the requested run that follow from its hosts, as {setting: value}.

    Arguments: as for `run_findings`. The only such setting is elastic, which is decided ("true" or "false")
    if its value is auto and the run has several hosts; otherwise the result is {}.
    """
    return Request(facts_by_host, options).decided if options["asked"] else {}


class Request:
    """The requested run, and what it needs on each host.

    Arguments: as for `run_findings`. Attributes:
    reached: {host: facts} of the hosts that answered.
    stored, members: the configuration and the hosts of an earlier attempt; empty if there was none.
    config: the configuration of this attempt. on_gpu: whether the ranks compute on GPUs. needs: {host: Need}.
    decided: the settings that follow from the hosts.
    too_small: {host: GiB that are missing} of the hosts that lack memory for the copies of the state that an
    elastic run keeps.
    """

    def __init__(self, facts_by_host: Mapping[str, Facts], options: Mapping[str, Any]) -> None:
        self.reached = {host: facts for host, facts in facts_by_host.items() if "unreachable" not in facts}
        run_files = map(_run_file, self.reached.values())
        run_file = next((found for found in run_files if isinstance(found.get("config"), Mapping)), {})
        self.stored: Mapping[str, Any] = run_file.get("config", {})
        self.members: Sequence[str] = run_file.get("hosts", [])
        try:
            # As train.yml resumes it: an existing run keeps its values for settings that are not given.
            self.config = RunConfig.resumed(self.stored, options["config"])
        except ValueError:  # settings of another release, about which train.yml decides
            self.config = RunConfig.resumed({}, options["config"])
        devices = [facts.get("gpu") for facts in self.reached.values()]
        ranks = {host: int(facts.get("ranks") or 1) for host, facts in facts_by_host.items()}
        self.on_gpu = self.config.device == "cuda" or (self.config.device == "auto" and all(devices))
        vocabularies = [
            str(facts["vocabulary"]) for facts in self.reached.values() if facts.get("vocabulary")
        ]
        vocabulary = int(vocabularies[0]) if vocabularies and vocabularies[0].isdigit() else VOCABULARY
        self.needs: dict[str, Need] = {}
        for host, facts in self.reached.items():
            coordinates, rows = host == next(iter(facts_by_host)), int(facts.get("micro_batch") or 0)
            values = self.config.to_dict() | ({"device_batch_size": rows} if rows else {})
            world_size = sum(ranks.values())
            self.needs[host] = Need(values, vocabulary, ranks[host], world_size, coordinates, self.on_gpu)
        self.decided: dict[str, str] = {}
        self.too_small: dict[str, float] = {}
        if self.config.elastic == "auto" and len(facts_by_host) > 1:
            self._decide_elastic()

    def _decide_elastic(self) -> None:
        needs = {}
        # An elastic run needs the same number of ranks on each host (trainer/host/rank_env.py).
        if not self.on_gpu and len({need.ranks for need in self.needs.values()}) == 1:
            needs = {host: need.with_(elastic="true") for host, need in self.needs.items()}
        # A host that is too small even without copies is refused (NF401) and needs no warning.
        if not all(self.fits(host, need) for host, need in self.needs.items()):
            needs = {}
        for host, need in needs.items():
            if not self.fits(host, need):
                self.too_small[host] = need.memory_gb - memory_of(self.reached[host])
        self.decided = {"elastic": "true" if needs and not self.too_small else "false"}
        self.config = dataclasses.replace(self.config, elastic=self.decided["elastic"])
        if self.config.is_elastic:
            self.needs = needs

    def joining(self) -> dict[str, Need]:
        """{host: Need} of the hosts that are to join an elastic run, which already trains on the other hosts.

        Only hosts that were part of the run at its start may become its coordinator (trainer/elastic). The
        other hosts need no memory for that. The result is {} if no host joins an active run.
        """
        hosts = [host for host, facts in self.reached.items() if not facts["active"]]
        if not self.stored or not self.config.is_elastic or len(hosts) == len(self.reached):
            return {}
        needs = {host: self.needs[host] for host in hosts}
        for host, need in needs.items():
            if host not in self.members or not self.config.has_failover(len(self.members)):
                needs[host] = need.with_(coordinator_failover="false")
        return needs

    def fits(self, host: str, need: Need) -> bool:
        """Whether a host has the memory in `need`; also True if the memory of the host is not known."""
        memory = memory_of(self.reached[host])
        return not memory or need.memory_gb <= memory


def _elastic(request: Request) -> Iterator[Finding]:
    """A warning for each host without memory for copies of the state, which makes elastic=auto false."""
    without = {"elastic": "true", "coordinator_failover": "false"}
    one_keeps = all(request.fits(host, need.with_(**without)) for host, need in request.needs.items())
    for host, missing in request.too_small.items():
        problem = (
            f"This host lacks {missing:.1f} GiB of memory for copies of the training state (parameters and "
            "optimizer), so the run is not elastic: when one host is lost, the others wait until it is back."
        )
        fix = "do nothing if the other hosts may wait"
        if one_keeps:
            fix += (
                "; else end the run (ansible-playbook stop.yml), then repeat the command with -e "
                f"elastic=true -e coordinator_failover=false  (only {next(iter(request.needs))} then keeps "
                "whole copies; if it is lost, the run waits)"
            )
        elif not request.stored and request.config.stage != "sft":  # the checkpoint has the depth
            fix += "; else start another run, with a smaller -e depth and -e run_id=NAME"
        yield warning("NF445", host, problem, fix)


def _run_file(facts: Facts) -> dict[str, Any]:
    """The content of the run.json of an earlier attempt; {} without one."""
    try:
        return dict(json.loads(facts.get("run_file", "")))
    except (ValueError, TypeError):
        return {}


def _memory(host: str, facts: Facts, need: Need, resumes: bool, joins: bool) -> Iterator[Finding]:
    """A refusal if the host has too little memory in total; a warning if too little of it is free.

    need: the need of the run on this host. resumes: whether the run exists, so that its depth cannot change.
    joins: whether the run already trains on other hosts, so that only settings of this host can change.
    """
    if not (limit := memory_of(facts)):
        return
    total, needed, depth = _total_gb(facts), need.memory_gb, need.config.depth
    subject = f"{need.ranks} ranks with depth {depth} need" if need.ranks > 1 else f"Depth {depth} needs"
    if needed > limit:
        parts = need.described()
        has = "the host has" if limit == total else "the setting fleet_memory allows"
        problem = f"{subject} about {needed:.1f} GiB of memory on this host ({parts}); {has} {limit:.1f} GiB."
        # A run that is resumed keeps its depth.
        fixed = resumes or need.config.stage == "sft"  # the checkpoint has the depth
        smaller = [] if fixed else [d for d in range(1, depth) if need.fits(limit, depth=d)]
        if smaller:
            fix = f"repeat the command with -e depth={smaller[-1]}"
        else:
            fix = f"remove {host} from the inventory"
            if need.coordinates:
                fix = "make a host with more memory the coordinator in the inventory"
        rows = range(1, need.config.device_batch_size)
        fewer = [n for n in rows if need.fits(limit, device_batch_size=n)]
        if fewer and not smaller:
            fix = (
                f"write fleet_device_batch_size: {fewer[-1]} at {host} in the inventory, then repeat the "
                "command"
            )
        elif not joins and need.fits(limit, coordinator_failover="false"):
            fix = (
                "repeat the command with -e coordinator_failover=false: only the coordinator then keeps "
                "whole copies of the training state, and the run waits if it is lost"
            )
        elif not joins and need.fits(limit, elastic="false"):
            fix = "repeat the command with -e elastic=false: no host then keeps copies of the training state"
        yield finding("NF401", host, problem, fix)
        return
    available = min(total, int(facts.get("available_kb") or facts["memory_kb"]) / 2**20)
    if needed > available and not facts["active"]:
        problem = (
            f"{subject} about {needed:.1f} GiB of memory; {available:.1f} of the {total:.1f} GiB of this "
            "host are free"
        )
        size, pid, user, command = [*str(facts.get("biggest", "")).split(" ", 3), "", "", "", ""][:4]
        if command:
            problem += (
                f". The largest program is {command} (PID {pid} of {user}) with {int(size) / 2**20:.1f} GiB"
            )
        fix = (
            f"end programs that are not needed: sudo kill PID  (on {host}; the largest are listed with their "
            "PID by: ps aux --sort=-rss | head)"
        )
        if need.with_(elastic="false").memory_gb <= available and not joins:
            fix += (
                ", or repeat the command with -e elastic=false: no host then keeps copies of the training "
                "state"
            )
        yield warning("NF402", host, f"{problem}.", fix)


def _total_gb(facts: Facts) -> float:
    """The memory of a host in GiB; of a host in a container, at most its memory limit; 0 if not known."""
    if not str(facts.get("memory_kb", "")).isdigit():
        return 0.0
    return min(int(facts["memory_kb"]), int(facts.get("container_kb") or facts["memory_kb"])) / 2**20


def memory_of(facts: Facts) -> float:
    """The memory in GiB that a run may use on a host; 0 if it is not known. facts: those of its probe."""
    return limited_gb(facts.get("limit", ""), _total_gb(facts))


def limited_gb(limit: str, total_gb: float) -> float:
    """The memory in GiB that a unit may use.

    limit: the value of systemd's MemoryMax=, such as 8G or 50%; "" for no limit. total_gb: the memory of the
    host in GiB.
    """
    match = re.fullmatch(r"(\d+)([KMGT%])", limit)
    if not match:
        return total_gb
    amount = int(match[1])
    if match[2] == "%":
        return total_gb * amount / 100
    return min(total_gb, amount * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[match[2]] / GIB)


def _disk(host: str, facts: Facts, need: Need) -> Iterator[Finding]:
    """A warning if the disk has too little space for checkpoints; a refusal if there is none for two.

    Without space for two checkpoints a run cannot replace its first one.
    """
    if not facts["disks"]:
        return
    path, disk = list(facts["disks"].items())[-1]
    free, keep = (disk["free_kb"] + int(facts.get("kept_kb") or 0)) / 2**20, need.config.keep_checkpoints
    size = need.checkpoint_gb + need.own_gb
    needed = (keep + 2) * size
    if free >= needed:
        return
    problem = (
        f"{path} has {free:.1f} GiB free for checkpoints, and a run of depth {need.config.depth} needs "
        f"{needed:.1f} GiB: {keep + 2} checkpoints of {size:.1f} GiB each (the newest {keep}, the best one, "
        "and the one being written)."
    )
    fix = (
        f"delete large files; they are listed by: sudo du -xh --max-depth=2 {disk['mount']} | sort -h | "
        f"tail  (on {host})"
    )
    if free < 2 * size:
        yield finding("NF403", host, problem, fix)
    else:
        fit = min(keep - 1, int(free // size) - 2)
        fewer = f", or repeat the command with -e keep_checkpoints={fit}" if fit >= 1 else ""
        yield warning("NF404", host, problem, fix + fewer)


def _cpus(host: str, facts: Facts, config: Any, ranks: int) -> Iterator[Finding]:
    """A refusal if fleet_cpus names processors that the host lacks; a warning about too many threads."""
    listed, asked = str(facts.get("online", "")), str(facts.get("cpus", ""))
    online, chosen = set(numbers(listed)), set(numbers(asked))
    if not online:
        return
    if asked and not all(_is_within(part, online) for part in asked.split(",")):
        problem = f"fleet_cpus of this host is {asked}, but the host has only the processors {listed}."
        fix = (
            f"write fleet_cpus: {listed}, or a part of these processors, at {host} in the inventory; or "
            "remove fleet_cpus (from the inventory, or -e fleet_cpus) to use all"
        )
        yield finding("NF424", host, problem, fix)
        return
    threads, name = int(facts.get("threads") or 0), "fleet_threads"
    if config.threads:  # of a rank; it is used instead
        threads, name = config.threads * ranks, "threads" if ranks == 1 else f"threads times {ranks} ranks"
    usable = len(chosen or online)
    if threads > usable:
        has = (
            f"{'fleet_cpus allows' if chosen else 'the host has'} {usable} "
            f"processor{'s' if usable > 1 else ''}"
        )
        problem = f"{name} is {threads}, but {has}: threads would wait for each other in every step."
        then = "has a thread on each processor of fleet_cpus" if chosen else "measures the fastest number"
        fix = (
            f"remove fleet_threads of {host} from the inventory (or -e fleet_threads): the next run then "
            f"{then}"
        )
        if config.threads:
            fix = f"repeat the command with -e threads=auto  (or -e threads={max(1, usable // ranks)})"
        yield warning("NF425", host, problem, fix)


def _is_within(part: str, online: set[int]) -> bool:
    """Whether a number or range of a CPU list names a processor and only processors of `online`."""
    named = set(numbers(part))
    return bool(named) and named <= online


def _processor(host: str, facts: Facts, request: Request) -> Iterator[Finding]:
    """Findings about missing instructions of the processor: AVX2, and those for bfloat16.

    There are none about other processors than x86-64, which do not list their instructions in enough detail.
    """
    flags: Sequence[str] = facts.get("flags", "").split()
    if facts.get("machine") != "x86_64" or not flags:
        return
    has = f"its vector instructions are {', '.join(flags)}"
    if request.config.dtype == "bfloat16" and not NATIVE_BF16 & set(flags):
        problem = (
            "dtype is bfloat16, but the processor of this host has no instructions for bfloat16 "
            f"({has}): a step would take minutes."
        )
        fix = "repeat the command with -e dtype=auto  (each host then uses the format that is faster there)"
        if request.stored:  # a run keeps its dtype
            fix = f"remove {host} from the inventory, or start a new run: add -e dtype=auto -e run_id=NAME"
        yield finding("NF405", host, problem, fix)
    if "avx2" not in flags:
        problem = (
            f"The processor of this host has no AVX2 ({has}), so its rate of matrix multiplication (GEMM) is "
            "half that of other processors or less. Every step waits for the slowest host."
        )
        fix = f"compare the rates: ansible-playbook doctor.yml, or remove {host} from the inventory"
        yield warning("NF406", host, problem, fix)
