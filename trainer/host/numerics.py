"""The arithmetic of this rank: device, number formats, threads and denormals, with the reasons for them.

    options = explore("auto", "auto", threads=0, local_rank=0, local_world_size=1)    # before torch is used
    options.shown()                                        # strings for the other ranks
    kind, reason = decide_device("auto", {rank: its shown(), ...})                # the same on every rank
    numerics = options.on(kind)
    model.to(numerics.device, numerics.dtype); model.compute_dtype = numerics.compute_dtype

Weights, gradients and optimizer state are in `dtype`, which is the same on all ranks. GEMMs are in
`compute_dtype`, which may differ between ranks: results that all ranks compute alike do not depend on it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from trainer.config import ConfigError
from trainer.formatting import counted
from trainer.host.cores import at_most_quota, usable_cores
from trainer.host.gemm import gemm_rates
from trainer.host.gemm_library import DEFAULT, ONEDNN, choose_library
from trainer.host.memory import keep_freed_memory
from trainer.host.pinning import pin
from trainer.host.topology import parse_cpu_list

# bfloat16 is used where its GEMM rate is higher by this factor: a smaller gain does not justify the lost
# digits, since other work does not get faster. At 2.1 times the GEMM rate (AVX512-BF16) a step is 1.5 times
# as fast at depth 4 and 1.7 times at depth 8; at 1.5 times it would be 1.2 to 1.3.
WORTHWHILE = 1.5
NARROW = "bfloat16"
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class Gpu(NamedTuple):
    """A GPU of this host.

    name: its name in the driver. capability: its compute capability, such as "8.6". has_bfloat16: whether it
    computes bfloat16 in hardware, not by emulation.
    """

    name: str
    capability: str
    has_bfloat16: bool


@dataclass(frozen=True)
class Binding:
    """The logical processors to which the threads of this rank are bound.

    cpus: the processors to which they are bound, in the kernel's list format, such as "0-3,8".
    usable: the processors among which `cpus` were chosen, in the same format.
    cores: the number of processors in `usable`, limited to the CPU quota.
    reason: why `cpus` were chosen, for the tracker.
    `cpus` is empty if none were chosen, for example because a person has set the number of threads.
    """

    cpus: str = ""
    usable: str = ""
    cores: int = 0
    reason: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether the threads may not run on all usable processors."""
        return self.cpus != self.usable

    def facts(self) -> dict[str, str]:
        """Facts for the tracker: "cpus" and "threads reason"; {} if `cpus` is empty."""
        return {"cpus": self.cpus, "threads reason": self.reason} if self.cpus else {}

    def saved(self) -> dict[str, Any]:
        """Values for a checkpoint: cpus, and unless that is empty also usable_cpus and cores."""
        return {"cpus": self.cpus, **(self.host() if self.cpus else {})}

    def host(self) -> dict[str, Any]:
        """The usable processors as JSON values: usable_cpus (in list format) and cores (a number).

        If one of these values changes between two starts of a run, the processors are chosen again.
        """
        return {"usable_cpus": self.usable, "cores": self.cores}

    def changes(self, saved: Mapping[str, Any]) -> str:
        """How the processors of this host differ from those at a checkpoint, as text; "" if they are equal.

        saved: the result of `Binding.saved` or `Numerics.saved` in the checkpoint. The text is also "" if
        `cpus` is empty now or was empty at the checkpoint.
        """
        if not (self.cpus and saved.get("cpus")):
            return ""
        names = [name for name, value in self.host().items() if saved.get(name) != value]
        return "; ".join(f"{name} was {saved.get(name)}, now {self.host()[name]}" for name in names)


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a rank: its device, number formats and threads.

    device: the device that computes.
    dtype: number format of weights, gradients and optimizer state.
    compute_dtype: number format of GEMMs.
    reason: why `compute_dtype` was chosen.
    threads: torch's number of threads.
    denormals_flushed: whether denormal numbers become 0.
    processor: name of the CPU or GPU.
    rates: {number format: measured GEMM rate of one core in FLOP/s}; {} if it was not measured.
    binding: the processors to which the threads are bound.
    library: the library that computes float32 GEMMs on the CPU, see gemm_library.py.
    """

    device: torch.device
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reason: str
    threads: int
    denormals_flushed: bool
    processor: str
    rates: Mapping[torch.dtype, float] = field(default_factory=dict)
    binding: Binding = field(default_factory=Binding)
    library: str = DEFAULT

    def describe(self) -> str:
        """One line for the log: compute format and its reason, processor, threads, denormals."""
        on = f" on CPUs {self.binding.cpus}" if self.binding.is_partial else ""
        by = f", float32 GEMMs by {ONEDNN}" if self.library == ONEDNN else ""
        kept = "kept (this CPU cannot flush them: steps may slow down)"
        return (
            f"{name_of(self.compute_dtype)} ({self.reason}) on {self.processor}{by}, "
            f"{counted(self.threads, 'thread')}{on}, "
            f"denormals {'flushed' if self.denormals_flushed else kept}"
        )

    @property
    def gemm_rate(self) -> float | None:
        """GEMM rate of this rank in FLOP/s: the rate of a core times `threads`. None if not measured."""
        rate = self.rates.get(self.compute_dtype)
        return None if rate is None else rate * self.threads

    def facts(self) -> dict[str, str]:
        """Facts for the tracker as texts.

        Keys: device, processor, dtype, "compute dtype", "compute dtype reason", "FORMAT GFLOP/s" for each
        measured format, "GEMM library" (default or oneDNN), threads, denormals (flushed or kept), and the
        keys of `Binding.facts`.
        """
        return {
            "device": self.device.type,
            "processor": self.processor,
            "dtype": name_of(self.dtype),
            "compute dtype": name_of(self.compute_dtype),
            "compute dtype reason": self.reason,
            **{f"{name_of(dtype)} GFLOP/s": f"{rate / 1e9:.1f}" for dtype, rate in self.rates.items()},
            "GEMM library": self.library,
            "threads": str(self.threads),
            **self.binding.facts(),
            "denormals": "flushed" if self.denormals_flushed else "kept",
        }

    def saved(self) -> dict[str, Any]:
        """Values for a checkpoint, from which `restore_numerics` restores the arithmetic.

        Keys: device (cpu or cuda), compute_dtype (such as "float32"), gemm_library (default or oneDNN),
        threads, and the keys of `Binding.saved`.
        """
        return {
            "device": self.device.type,
            "compute_dtype": name_of(self.compute_dtype),
            "gemm_library": self.library,
            "threads": self.threads,
            **self.binding.saved(),
        }


@dataclass(frozen=True)
class Options:
    """The devices on which this rank can compute, found before the device of the run is chosen.

    cpu: device, number formats and threads on the CPU; set even if `refusals` has the key "cpu".
    cuda: the same on the GPU of this local rank; None if the host has no GPU for this rank.
    gpus: number of GPUs of the host that torch can use; 0 if the setting device is cpu.
    refusals: {"cpu" or "cuda": the reason why that device cannot be used with the setting dtype}.
    """

    cpu: Numerics
    cuda: Numerics | None
    gpus: int
    refusals: Mapping[str, str]

    def shown(self) -> dict[str, str]:
        """Texts that describe these options to the other ranks. The keys may differ between ranks.

        Keys: cpu and cuda (one line about the arithmetic on that device; cuda only with a GPU), gpus (as
        the field `gpus`), and "cpu refused" or "cuda refused" (the reason why that device cannot be used).
        """
        shown = {"cpu": self.cpu.describe(), "gpus": str(self.gpus)}
        if self.cuda:
            shown["cuda"] = self.cuda.describe()
        return shown | {f"{kind} refused": sentence for kind, sentence in self.refusals.items()}

    def on(self, kind: str) -> Numerics:
        """The arithmetic on the device kind `kind`, "cpu" or "cuda".

        For cuda, makes the GPU of this rank the current device and disables TF32.
        """
        if kind == "cpu":
            return self.cpu
        assert self.cuda is not None
        torch.cuda.set_device(self.cuda.device)
        torch.set_float32_matmul_precision("highest")  # no TF32: float32 is asked for to have its digits
        return self.cuda


def explore(
    device: str,
    dtype: str,
    threads: int,
    local_rank: int,
    local_world_size: int,
    chooses_library: bool = True,
) -> Options:
    """Set threads, denormals and memory of this process; returns the devices and formats that it can use.

    device, dtype, threads: the settings of these names. local_rank: the rank of this process among the ranks
    of this host. local_world_size: the number of ranks on this host. chooses_library: whether the faster
    library computes float32 GEMMs, else torch's default. Call this before any other use of torch.
    Denormals become 0: AdamW's moments of embedding rows that no token activates decay into denormals, and a
    step over such state takes 50 times as long. Each thread has its own flag for this; threads that torch
    starts later inherit the flag.
    """
    keep_freed_memory()
    flushed = torch.set_flush_denormal(True)
    torch.set_num_threads(thread_count(threads, local_world_size))
    wide = FORMATS["float64" if dtype == "float64" else "float32"]
    refusals: dict[str, str] = {}

    def choose(kind: str, choice: Callable[[], tuple[torch.dtype, str]]) -> tuple[torch.dtype, str]:
        try:
            return choice()
        except ConfigError as error:
            refusals[kind] = str(error)
            return wide, "refused"

    has_choice = chooses_library and device != "cuda" and dtype != "float64"
    library = choose_library("" if has_choice else DEFAULT)
    measures = device != "cuda" and dtype in ("auto", NARROW)
    rates = gemm_rates([torch.float32, torch.bfloat16]) if measures else {}
    compute, reason = choose("cpu", lambda: cpu_format(dtype, rates))
    cpu = Numerics(
        torch.device("cpu"),
        wide,
        compute,
        reason,
        torch.get_num_threads(),
        flushed,
        _cpu_name(),
        rates,
        library=library,
    )
    # No GPU without a driver or with a build of torch for CPUs.
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if local_rank >= gpus:
        return Options(cpu, None, gpus, refusals)
    gpu = find_gpu(local_rank)
    compute, reason = choose("cuda", lambda: gpu_format(dtype, gpu))
    cuda = Numerics(torch.device("cuda", local_rank), wide, compute, reason, cpu.threads, flushed, gpu.name)
    return Options(cpu, cuda, gpus, refusals)


def find_gpu(index: int) -> Gpu:
    """The properties of the GPU with the device index `index`."""
    major, minor = torch.cuda.get_device_capability(index)
    with torch.cuda.device(index):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(torch.cuda.get_device_name(index), f"{major}.{minor}", has_bfloat16)


def thread_count(asked: int, local_world_size: int) -> int:
    """The number of threads of this rank, 1 or more.

    asked: the setting `threads`; if it is not 0, it is the result. Otherwise the result is OMP_NUM_THREADS,
    but at most this rank's part of the CPU quota, which the variable may ignore. Without this variable, the
    usable cores are divided by `local_world_size`, the number of ranks on this host.
    """
    return threads_set(asked, local_world_size) or max(1, usable_cores() // local_world_size)


def limit_threads(local_world_size: int = 1) -> None:
    """Limit torch's threads to the part of the CPU quota that each of the ranks of this host has."""
    torch.set_num_threads(_of_quota(torch.get_num_threads(), local_world_size))


def _of_quota(threads: int, local_world_size: int) -> int:
    """The number `threads`, or a rank's part of the CPU quota if that is lower; 1 or more."""
    return max(1, at_most_quota(threads * local_world_size) // local_world_size)


def threads_set(asked: int, local_world_size: int = 1) -> int:
    """The number of threads that a person or launcher has set; 0 if nobody has.

    asked: the setting threads, which has priority. If it is 0, the result is OMP_NUM_THREADS, at most the
    part of the CPU quota that each of the `local_world_size` ranks of this host has.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not asked and threads.isdigit() and int(threads):
        return _of_quota(int(threads), local_world_size)
    return asked


def cpu_format(asked: str, rates: Mapping[torch.dtype, float]) -> tuple[torch.dtype, str]:
    """Choose the number format of GEMMs on the CPU. Returns (number format, reason).

    asked: the setting dtype; auto is bfloat16 if its rate is at least WORTHWHILE times that of float32, else
    float32. rates: {number format: GEMM rate of one core in FLOP/s}; if it is {}, auto and bfloat16 give
    float32. Raises ConfigError if `asked` is bfloat16 and the CPU emulates it (its rate is below that of
    float32): steps would take minutes instead of seconds.
    """
    if asked not in ("auto", NARROW):
        return FORMATS[asked], "as asked"
    if not rates:
        return torch.float32, "not measured"
    narrow, wide = rates[torch.bfloat16], rates[torch.float32]
    figures = f"{gflops(narrow)} GFLOP/s a core in bfloat16 against {gflops(wide)} in float32"
    if asked == NARROW:
        if narrow >= wide:
            return torch.bfloat16, f"as asked; {figures}"
        raise ConfigError(
            f"dtype is bfloat16, but this CPU only emulates it: {figures}. Set dtype to float32, or to auto, "
            "which uses on every host the format that is fast there."
        )
    return (torch.bfloat16 if narrow >= WORTHWHILE * wide else torch.float32), figures


def gpu_format(asked: str, gpu: Gpu) -> tuple[torch.dtype, str]:
    """Choose the number format of GEMMs on `gpu`. Returns (number format, reason).

    asked: the setting dtype; auto is bfloat16 if the GPU has it in hardware, else float32. Raises ConfigError
    if `asked` is bfloat16 and the GPU emulates it.
    """
    if asked not in ("auto", NARROW):
        return FORMATS[asked], "as asked, without TF32" if asked == "float32" else "as asked"
    if gpu.has_bfloat16:
        return torch.bfloat16, f"capability {gpu.capability} has it"
    if asked == NARROW:
        raise ConfigError(
            f"dtype is bfloat16, but a {gpu.name} (capability {gpu.capability}) only emulates it. "
            "Set dtype to float32 or auto."
        )
    return torch.float32, f"capability {gpu.capability} has no bfloat16"


def decide_device(asked: str, shown: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    """Choose the device of all ranks. Returns ("cpu" or "cuda", reason), the same on every rank.

    asked: the setting device; auto is cuda if every rank has a GPU, else cpu. shown: {rank as text: the
    result of `Options.shown` on that rank}. Raises ConfigError if `asked` is cuda and a rank has no GPU, or
    if a rank cannot use the number format on the chosen device.
    """
    counts = {who: int(fields.get("gpus", 0)) for who, fields in shown.items() if "cuda" not in fields}
    lacking = {
        who: f"{counted(gpus, 'GPU')}, fewer than its ranks" if gpus else "no GPU"
        for who, gpus in counts.items()
    }
    lacks = "; ".join(f"{who} has {lack}" for who, lack in lacking.items())
    if asked == "cuda" and lacking:
        raise ConfigError(
            f"device is cuda, but {lacks}. Every rank needs a GPU of its own: start fewer ranks there, leave "
            "the host out, or set device to cpu or auto."
        )
    kind = "cpu" if asked == "cpu" or lacking else "cuda"
    refused = [
        f"{who}: {fields[f'{kind} refused']}" for who, fields in shown.items() if f"{kind} refused" in fields
    ]
    if refused:
        raise ConfigError(" ".join(refused) if len(shown) > 1 else refused[0].partition(": ")[2])
    if asked != "auto":
        return kind, "as asked"
    if kind == "cuda":
        return kind, "every rank has a GPU of its own"
    return kind, lacks if len(lacking) < len(shown) else "there is no GPU that torch can use"


def restore_numerics(numerics: Numerics, saved: Mapping[str, Any], threads: int = 0) -> Numerics:
    """Restore the arithmetic of a checkpoint, so that a resumed run is bitwise the same.

    Returns `numerics` with the compute format, GEMM library and threads of the checkpoint. Sets torch's GEMM
    library and number of threads, and binds the threads to the processors of the checkpoint. saved: the
    result of `Numerics.saved` in the checkpoint. threads: the setting threads; 0: not set.
    Nothing is restored if the checkpoint is of another device (cpu or cuda). The format bfloat16 is not
    restored if this host emulates it, nor oneDNN if it cannot be used here. The threads are not restored if
    `threads` or OMP_NUM_THREADS sets their number now, if their number was set at the checkpoint and is not
    set now, or if the usable processors have changed.
    """
    if saved.get("device") != numerics.device.type or saved.get("compute_dtype") not in FORMATS:
        return numerics
    compute = FORMATS[saved["compute_dtype"]]
    rates, device = numerics.rates, numerics.device
    emulates = (
        not find_gpu(device.index or 0).has_bfloat16
        if device.type == "cuda"
        else bool(rates) and rates[torch.bfloat16] < rates[torch.float32]
    )
    if compute == torch.bfloat16 and emulates:
        compute = numerics.compute_dtype
    library = str(saved.get("gemm_library", numerics.library))
    if library != numerics.library:
        library = choose_library(library)
    reason = numerics.reason if compute == numerics.compute_dtype else f"as before; {numerics.reason}"
    numerics = replace(numerics, compute_dtype=compute, reason=reason, library=library)
    return numerics if threads_set(threads) else _restore_threads(numerics, saved)


def _restore_threads(numerics: Numerics, saved: Mapping[str, Any]) -> Numerics:
    now, count = numerics.binding, int(saved.get("threads", numerics.threads))
    if now.changes(saved) or (now.cpus and saved.get("cpus") == ""):
        return numerics  # the host has other processors now, or a person no longer sets the threads
    cpus = str(saved.get("cpus", now.usable)) if now.cpus else ""
    if cpus != now.cpus:
        pin(parse_cpu_list(cpus), count)
        now = replace(now, cpus=cpus, reason="as before")
    torch.set_num_threads(count)
    return replace(numerics, threads=count, binding=now)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def gflops(rate: float) -> str:
    """`rate` (FLOP/s) in GFLOP/s, as text without the unit: 1,234; below 10 with one decimal, such as 7.9."""
    return f"{rate / 1e9:,.0f}" if rate >= 1e10 else f"{rate / 1e9:.1f}"


def _cpu_name() -> str:
    name = str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine())
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
