"""Findings about the memory, disk and processor that the requested run needs on each host.

Facts are those of preflight_hosts.py. Sizes are GiB, computed from the parameter count: float32 weights and
gradients, the two AdamW moments of the tables, the Muon moment of the matrices that a rank owns, the
activations of a micro-batch, and on the coordinator the copy from which a checkpoint is written
(trainer/checkpoint). With sync=local each rank has the whole optimizer state, and besides its own parameters
the outer parameters, their momentum and the error feedback (trainer/sync/local.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils.findings import Finding, finding, warning
from ansible_collections.nanofleet.fleet.trainer.config import RunConfig

GIB = 2**30
# Both fitted to the peak resident memory of a rank (see the role's README): Python and torch; and activations
# that a layer keeps for the backward pass, per token and unit of the model's width.
BASE_GIB = 0.45
KEPT_PER_LAYER = 35
VOCABULARY = 32768
NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
Facts = Mapping[str, Any]


def run_config(values: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> Any:
    """The RunConfig of these settings. stored: configuration of an existing run, which they override."""
    return RunConfig.resumed(stored or {}, values)


def run_findings(facts_by_host: Mapping[str, Facts], options: Mapping[str, Any]) -> list[Finding]:
    """All findings about the run on all hosts, the coordinator's first; [] if no run is requested.

    options: asked (whether a run is requested), config (the settings given for it), nproc_per_node.
    """
    if not options["asked"]:
        return []
    reached = {host: facts for host, facts in facts_by_host.items() if "unreachable" not in facts}
    stored = next((found for facts in reached.values() if (found := _stored(facts))), {})
    try:
        # As train.yml resumes it: an existing run keeps its values for every setting that is not given anew.
        config = run_config(options["config"], stored)
    except ValueError:  # settings of another release: what becomes of them, train.yml decides
        config = run_config(options["config"])
    ranks = int(options["nproc_per_node"])
    on_gpu = config.device == "cuda" or (
        config.device == "auto" and all(facts.get("gpu") for facts in reached.values())
    )
    findings: list[Finding] = []
    for place, (host, facts) in enumerate(facts_by_host.items()):
        if "unreachable" in facts:
            continue
        own = {"device_batch_size": int(facts["micro_batch"])} if int(facts.get("micro_batch") or 0) else {}
        values = {**config.to_dict(), **own}
        need = Need(values, _vocabulary(reached), ranks, ranks * len(facts_by_host), place == 0, on_gpu)
        findings += _memory(host, facts, need, bool(stored))
        findings += _disk(host, facts, need) if place == 0 else []
        findings += [] if on_gpu else _processor(host, facts, config)
    return findings


def _stored(facts: Facts) -> Mapping[str, Any]:
    """The configuration in the run.json of an earlier attempt; {} without one."""
    try:
        read = json.loads(facts.get("run_file", ""))
    except ValueError:
        return {}
    stored = read.get("config") if isinstance(read, dict) else None
    return stored if isinstance(stored, dict) else {}


def _vocabulary(facts_by_host: Mapping[str, Facts]) -> int:
    told = [str(facts["vocabulary"]) for facts in facts_by_host.values() if facts.get("vocabulary")]
    return int(told[0]) if told and told[0].isdigit() else VOCABULARY


class Need:
    """GiB of memory and disk that the ranks of a run need on a host. coordinates: whether rank 0 is there."""

    def __init__(
        self,
        values: Mapping[str, Any],
        vocabulary: int = VOCABULARY,
        ranks: int = 1,
        world_size: int = 1,
        coordinates: bool = True,
        on_gpu: bool = False,
    ) -> None:
        self.values, self.ranks = values, ranks
        self._others = (vocabulary, ranks, world_size, coordinates, on_gpu)
        self.config = config = run_config(values)
        width = config.n_embd
        kv_width = (config.n_kv_head or config.n_head) * config.head_dim
        rows = math.ceil(vocabulary / 64) * 64
        number = (8 if config.dtype == "float64" else 4) / GIB
        tables = number * rows * (2 * width + (config.depth + 1) // 2 * kv_width)
        matrices = number * config.depth * (10 * width * width + 2 * width * kv_width)
        micro_batch = config.device_batch_size * config.sequence_len
        alone = config.sync == "local"
        together = tables + matrices if alone else 0.0
        self.checkpoint_gb = 3 * tables + 2 * matrices + together
        # Rank 0's own parameters and what rounding left over, in a file beside each checkpoint.
        self.own_gb = 2 * together
        activations = number * KEPT_PER_LAYER * micro_batch * config.depth * width
        head = number * rows * width
        # By rank, then once for rank 0.
        self.parts = {
            "weights": tables + matrices,
            "gradients": tables + matrices + head,
            "optimizer": 2 * tables + matrices / (1 if alone else world_size),
            "outer parameters with momentum and error feedback": 3 * together,
            f"a micro-batch of {config.device_batch_size} x {config.sequence_len} tokens": activations,
            "Python and torch": BASE_GIB,
        }
        if on_gpu:
            self.parts = {"Python, torch and CUDA": 5 * BASE_GIB}
        self.copy_gb = self.checkpoint_gb if coordinates else 0.0

    @property
    def memory_gb(self) -> float:
        return self.ranks * sum(self.parts.values()) + self.copy_gb

    def smaller(self, depth: int) -> Need:
        return Need({**self.values, "depth": depth}, *self._others)

    def described(self) -> str:
        """The parts of the needed memory in GiB as text, the largest first."""
        parts = {name: self.ranks * size for name, size in self.parts.items()}
        parts["the copy a checkpoint is written from"] = self.copy_gb
        largest = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size:.1f}" for name, size in largest if size >= 0.05)

    def subject(self) -> str:
        ranks = f"{self.ranks} ranks of depth" if self.ranks > 1 else "Depth"
        return f"{ranks} {self.config.depth} need{'' if self.ranks > 1 else 's'}"


def _memory(host: str, facts: Facts, need: Need, resumes: bool) -> Iterator[Finding]:
    """A refusal if the host has too little memory in total; a warning if too little of it is free.

    resumes: whether the run exists, so that its depth cannot change.
    """
    if not str(facts.get("memory_kb", "")).isdigit():
        return
    total, needed = int(facts["memory_kb"]) / 2**20, need.memory_gb
    limit = limited_gb(facts.get("limit", ""), total)
    # How deep a model that fits there may be; a run that is resumed keeps its depth.
    fits = next((d for d in range(need.config.depth - 1, 0, -1) if need.smaller(d).memory_gb <= limit), 0)
    typed = f"remove {host} from the inventory"
    if fits and not resumes:
        typed = f"the same with -e depth={fits}"
    if needed > limit:
        what = "it has" if limit == total else "fleet_memory allows"
        problem = (
            f"{need.subject()} about {needed:.1f} GiB of memory ({need.described()}); {what} {limit:.1f} GiB."
        )
        yield finding("NF401", host, problem, typed)
        return
    available = int(facts.get("available_kb") or facts["memory_kb"]) / 2**20
    if needed > available and not facts["active"]:
        problem = (
            f"{need.subject()} about {needed:.1f} GiB of memory; {available:.1f} of its {total:.1f} are free"
        )
        size, pid, user, command = [*str(facts.get("biggest", "")).split(" ", 3), "", "", "", ""][:4]
        if command:
            problem += f": {command} (PID {pid} of {user}) has {int(size) / 2**20:.1f}"
        yield warning(
            "NF402", host, f"{problem}.", f"ps aux --sort=-rss | head  (on {host}; end what is not needed)"
        )


def limited_gb(limit: str, total_gb: float) -> float:
    """GiB that a unit may use. limit: systemd's MemoryMax=, such as 8G or 50%; "" for total_gb."""
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
    disks = facts["disks"]
    if not disks:
        return
    path, disk = list(disks.items())[-1]
    there = int(facts.get("kept_kb") or 0)
    has, keep = (disk["free_kb"] + there) / 2**20, need.config.keep_checkpoints
    each = need.checkpoint_gb + need.own_gb
    wanted = keep + 2
    if has >= wanted * each:
        return
    problem = (
        f"A checkpoint of depth {need.config.depth} takes {each:.1f} GiB and {path} has room for "
        f"{has:.1f} GiB of them; keep_checkpoints={keep}, the best one and the one being written "
        f"take {wanted * each:.1f}."
    )
    typed = f"sudo du -xh --max-depth=2 {disk['mount']} | sort -h | tail  (on {host})"
    if has < 2 * each:
        yield finding("NF403", host, problem, typed)
    else:
        fewer = f", or the same with -e keep_checkpoints={keep - 1}" if keep > 1 else ""
        yield warning("NF404", host, problem, typed + fewer)


def _processor(host: str, facts: Facts, config: Any) -> Iterator[Finding]:
    """Findings about the matrix instructions of the processor.

    Only x86-64 processors list their instructions in enough detail.
    """
    flags: Sequence[str] = facts.get("flags", "").split()
    if facts.get("machine") != "x86_64" or not flags:
        return
    has = f"of the faster instructions it has {', '.join(flags)} alone"
    if config.dtype == "bfloat16" and not NATIVE_BF16 & set(flags):
        problem = f"dtype is bfloat16, but its processor only emulates it ({has}): steps would take minutes."
        typed = "the same with -e dtype=auto"
        yield finding("NF405", host, problem, f"{typed}  (takes on every host what is fast there)")
    if "avx2" not in flags:
        problem = f"Its processor has no AVX2 ({has}): its GEMM rate is half that of others or less."
        yield warning(
            "NF406", host, problem, f"ansible-playbook doctor.yml  (shows its rate), or leave {host} out"
        )
