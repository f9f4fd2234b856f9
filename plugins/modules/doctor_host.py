#!/usr/bin/python
# SPDX-License-Identifier: MIT
"""Ansible module: read the facts of a host that affect training: clock, links, disks, cores, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.environment_reading import read_environment
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewall_reading import read_firewalls
from ansible_collections.nanofleet.fleet.plugins.module_utils.firewalls import FIREWALLS
from ansible_collections.nanofleet.fleet.plugins.module_utils.ip_network import ask_ip, is_wireless, resolved
from ansible_collections.nanofleet.fleet.plugins.module_utils.network_reading import read_network
from ansible_collections.nanofleet.fleet.plugins.module_utils.wsl import is_wsl2, wsl_networking

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Flags of a CPU that decide the rate of a GEMM."""
COPY_SECONDS = 0.25


def links() -> dict[str, dict[str, Any]]:
    """{name: facts} of the network interfaces of this host, without lo.

    The facts are addresses, mtu, speed_mbit (None if unknown), duplex, wireless, physical, carrier (whether
    there is a signal) and made_as: the kernel's name of the link type, such as "tun" or "bridge"; "" for a
    plain interface.
    """
    found = {}
    for entry in ask_ip("-details", "address")[0]:
        name = entry.get("ifname")
        if not name or name == "lo":
            continue
        folder = f"/sys/class/net/{name}"
        speed = read_text(f"{folder}/speed")
        found[name] = {
            "addresses": [
                f"{each['local']}/{each['prefixlen']}"
                for each in entry.get("addr_info", [])
                if each.get("scope") == "global" and each.get("local")
            ],
            "mtu": entry.get("mtu"),
            "made_as": (entry.get("linkinfo") or {}).get("info_kind", ""),
            "speed_mbit": int(speed) or None if speed.isdigit() else None,
            "duplex": read_text(f"{folder}/duplex"),
            "wireless": is_wireless(name),
            "physical": os.path.exists(f"{folder}/device"),
            "carrier": read_text(f"{folder}/carrier") == "1",
        }
    return found


def wsl(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The networking mode of WSL2, such as "nat" or "mirrored"; "" if this host does not run in WSL2.

    found: the result of `links`.
    """
    release = platform.release()
    if not is_wsl2(release):
        return ""
    printed = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["wslinfo", "--networking-mode"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        printed = done.stdout.strip()
    default = ask_ip("-4", "route", "show", "default")[0]
    return wsl_networking(release, printed, found, default[0].get("dev", "") if default else "")


def disk_of(path: str) -> dict[str, Any]:
    """The file system of a folder, as {"mount", "free_gib", "inodes_free", "writable"}.

    mount: the mount point. inodes_free: None if the file system does not count inodes. If the folder does not
    exist, the nearest existing folder above it is used.
    """
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    status = os.statvfs(path)
    return {
        "mount": mount_of(path),
        "free_gib": round(status.f_bavail * status.f_frsize / 2**30, 2),
        # Some file systems count none.
        "inodes_free": status.f_favail if status.f_files else None,
        "writable": not status.f_flag & os.ST_RDONLY,
    }


def mount_of(path: str) -> str:
    """The mount point of the file system that contains a folder.

    It is read from /proc/self/mountinfo, because a bind mount can have the same device as the folder above.
    """
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        escaped = [line.split()[4] for line in file]
    points = {re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point) for point in escaped}
    folder = os.path.realpath(path)
    while folder not in points and folder != "/":
        folder = os.path.dirname(folder)
    return folder


def mark(path: str) -> str:
    """A text that changes when a file changes: its real path, mtime and size.

    "" if the file does not exist; "unreadable" if this user may not enter a folder of its path.
    """
    try:
        status = os.stat(path)
    except PermissionError:
        return "unreadable"
    except OSError:
        return ""
    return f"{os.path.realpath(path)} {status.st_mtime_ns} {status.st_size}"


def copy_rate(mib: int, threads: int) -> float:
    """GB/s of memory traffic (bytes read plus bytes written) while `threads` threads copy blocks.

    mib: size of a block in MiB.
    """
    size = mib << 20

    def copy(_index: int) -> float:
        source, target = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
        ctypes.memmove(target, source, size)
        count, started = 0, time.monotonic()
        while time.monotonic() - started < COPY_SECONDS:
            ctypes.memmove(target, source, size)
            count += 1
        return 2 * count * size / (time.monotonic() - started)

    with ThreadPoolExecutor(threads) as pool:
        return round(sum(pool.map(copy, range(threads))) / 1e9, 1)


def cpu() -> tuple[str, list[str]]:
    """The processor of this host, as (name of its model, those of its flags that are in FLAGS)."""
    lines = [line.partition(":") for line in read_text("/proc/cpuinfo").splitlines()]
    fields = {key.strip(): value.strip() for key, _colon, value in reversed(lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), [flag for flag in FLAGS if flag in flags]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sent": {"type": "float", "required": True},
            "paths": {"type": "list", "elements": "path", "default": []},
            "marks": {"type": "list", "elements": "path", "default": []},
            "copy_mib": {"type": "int", "default": 0},
            "threads": {"type": "int", "default": 0},
            "firewall": {"type": "str"},
            "targets": {"type": "list", "elements": "str"},
            "python": {"type": "path"},
        },
        supports_check_mode=True,
    )
    p = module.params
    now = time.time()
    model, flags = cpu()
    cores = len(os.sched_getaffinity(0))
    interfaces = links()
    facts = {
        "sent": p["sent"],
        "time": now,
        "hostname": socket.gethostname(),
        "resolves_to": sorted(resolved(socket.gethostname())),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": model,
        "flags": flags,
        "cores": cores,
        "machine_cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "copy_gb_s": copy_rate(p["copy_mib"], p["threads"] or cores) if p["copy_mib"] else None,
        "port_range": [int(word) for word in read_text("/proc/sys/net/ipv4/ip_local_port_range").split()],
        "links": interfaces,
        "wsl": wsl(interfaces),
        "disks": {path: disk_of(path) for path in p["paths"]},
    }
    marked = [*p["marks"], *(path for firewall in FIREWALLS.values() for path in firewall.files)]
    marks = {path: mark(path) for path in marked} | {"boot": read_text("/proc/sys/kernel/random/boot_id")}
    also: dict[str, Any] = {}
    if p["targets"]:
        also["network_links"] = read_network(p["targets"])
    if p["python"]:
        # If this fails, the module installed_environment is called later and reports the error.
        with contextlib.suppress(OSError, ValueError):
            also["installed_environment"] = read_environment(p["python"])
    rules = {} if p["firewall"] is None else read_firewalls(p["firewall"])
    module.exit_json(changed=False, facts=facts, marks=marks, **rules, **also)


if __name__ == "__main__":
    main()
