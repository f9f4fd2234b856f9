"""Facts of this host, sent to the other ranks and used as tags on the tracker.

Nothing is measured or imported that takes time; facts that a system does not provide are left out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import socket
import subprocess
from pathlib import Path

import psutil

from trainer.host.cores import cpu_quota, usable_cores

SYSCTL_SECONDS = 2.0


def host_facts() -> dict[str, str]:
    """Facts of this host as texts. A fact that the system does not provide has no key.

    Keys: hostname, system, kernel, machine (architecture), cpu (model name; the architecture if the system
    has no model name), cores ("4", or "4 of 8" if this process may use 4 of 8), memory (such as "15.6 GiB"),
    python, torch and mlflow (versions).
    """
    facts = {
        "hostname": socket.gethostname(),
        "system": _system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": _cores(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "mlflow": _version("mlflow-skinny"),
    }
    return {name: value for name, value in facts.items() if value}


def _system() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


def _cpu() -> str:
    """The model name of the CPU; its architecture if the kernel has no name (ARM)."""
    if platform.system() == "Darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True, timeout=SYSCTL_SECONDS).strip()
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "Model", "Processor")  # x86, ARM boards, old ARM
    return next(filter(None, map(found.get, names)), platform.processor() or platform.machine())


def _cores() -> str:
    """The number of usable cores, as "4", or as "4 of 8" or "0.33 of 1" if this process may not use all."""
    cores, usable = os.cpu_count() or 1, min(usable_cores(), cpu_quota() or math.inf)
    return str(cores) if usable == cores else f"{usable:.3g} of {cores}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
