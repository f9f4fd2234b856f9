# SPDX-License-Identifier: MIT
"""Reads systemd and /proc: the state of a unit, its processes, the listeners on ports.

Read-only, standard library only. Used by modules on the hosts; the controller uses only functions that parse
text, such as `numbers`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import user_name

Unit = dict[str, Any]
Process = dict[str, Any]
PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,MainPID,ExecMainStatus,StateChangeTimestampMonotonic,NRestarts"
)
LISTEN = "0A"
"""The state TCP_LISTEN in the fourth column of /proc/net/tcp."""
LOOPBACK6 = "0" * 24 + "01000000"
"""::1 as /proc/net/tcp6 prints it."""


class Socket(NamedTuple):
    """A listening TCP socket.

    port: its port. uid: the user id of its owner. inode: its inode number. loopback: whether it is bound to a
    loopback address.
    """

    port: int
    uid: int
    inode: int
    loopback: bool


def tables() -> list[str]:
    """The texts of /proc/net/tcp and /proc/net/tcp6; "" for a file that the kernel does not have."""
    return [read_text(name) for name in ("/proc/net/tcp", "/proc/net/tcp6")]


def listening(texts: list[str]) -> list[Socket]:
    """The listening sockets in the texts of `tables`."""
    found = []
    for line in (line for text in texts for line in text.splitlines()[1:]):
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTEN:
            address, _, port = fields[1].rpartition(":")
            loopback = address == LOOPBACK6 or (len(address) == 8 and address.endswith("7F"))
            found.append(Socket(int(port, 16), int(fields[7]), int(fields[9]), loopback))
    return found


def numbers(text: str) -> list[int]:
    """The numbers in a list of processors or ports as the kernel writes it, such as 0-3,6; sorted."""
    found: set[int] = set()
    for part in filter(None, str(text).split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def run(argv: list[str]) -> tuple[int, str, str]:
    """Run a command in the C locale. Returns (exit status, stdout, stderr) as text."""
    environment = dict(os.environ, LC_ALL="C", SYSTEMD_PAGER="")
    # systemctl --user needs it. Login sessions set it; cron jobs and some su shells do not.
    environment.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr.strip()


def own_scope() -> str:
    """Which systemd starts the units of this process: `system` for root, else `user` (systemd --user)."""
    return "system" if os.geteuid() == 0 else "user"


def manager(scope: str) -> list[str]:
    """The option of systemctl and systemd-run for a scope: ["--user"] for `user`, [] for `system`."""
    return ["--user"] if scope == "user" else []


def unit_name(name: str) -> str:
    """The name of a service unit with .service at its end."""
    return name if name.endswith(".service") else name + ".service"


def read_unit(name: str, now: float, scope: str = "system") -> Unit:
    """The state of a unit as a dict; a unit that systemd does not know is `inactive`.

    name: of the unit. now: Unix time. scope: whose systemd has the unit: system or user (systemd --user).
    Keys of the result: name, load_state, active_state, sub_state, result, main_pid, exit_status, restarts,
    since (Unix time of the last change of state, or None) and scope. Raises RuntimeError if systemctl fails.
    """
    shows = ["systemctl", *manager(scope), "show", "--property=" + PROPERTIES]
    code, out, err = run([*shows, "--", unit_name(name)])
    if code:
        raise RuntimeError(err or "systemctl show failed")
    shown = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    changed = int(shown.get("StateChangeTimestampMonotonic") or 0)
    return {
        "name": unit_name(name),
        "load_state": shown.get("LoadState", ""),
        "active_state": shown.get("ActiveState", "inactive"),
        "sub_state": shown.get("SubState", "dead"),
        "result": shown.get("Result", ""),
        "main_pid": int(shown.get("MainPID") or 0),
        "exit_status": int(shown.get("ExecMainStatus") or 0),
        "restarts": int(shown.get("NRestarts") or 0),
        "since": round(now - time.monotonic() + changed / 1e6, 1) if changed else None,
        "scope": scope,
    }


def find_unit(name: str, now: float) -> Unit:
    """The state of a unit (see `read_unit`), from the systemd that has it. now: Unix time.

    Without root it reads the system's and the user's own systemd; the user's is preferred.
    """
    found = read_unit(name, now)
    if own_scope() == "user":
        # A host without a user's systemd has no units in it.
        with contextlib.suppress(RuntimeError):
            own = read_unit(name, now, "user")
            found = own if own["load_state"] != "not-found" or is_up(own) else found
    return found


def is_up(unit: Unit) -> bool:
    """Whether a unit is active, starts, stops or waits for its restart. unit: the result of `read_unit`."""
    return unit["active_state"] not in ("inactive", "failed")


def known_units(pattern: str) -> dict[str, str]:
    """{name: active state} of the units that match a glob, of the system's and this user's own systemd."""
    found = {}
    for scope in sorted({"system", own_scope()}):
        lists = ["systemctl", *manager(scope), "list-units", "--all", "--plain", "--no-legend", "--full"]
        _code, out, _err = run([*lists, pattern])
        rows = [line.split() for line in out.splitlines()]
        found.update({row[0]: row[2] for row in rows if len(row) > 2})
    return found


def between_attempts(unit: Unit) -> bool:
    """Whether an attempt is over and the unit waits for its next start. unit: the result of `read_unit`."""
    waits = unit["sub_state"] in ("condition", "start-pre") and unit["restarts"] > 0
    return unit["sub_state"] == "auto-restart" or waits


def process_state(pid: int) -> str:
    """The state of process `pid` as in /proc/PID/status, such as "running" or "disk sleep"; "" if unknown."""
    for line in read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith("State:"):
            return line.partition("(")[2].rstrip(")")
    return ""


def is_missing(pid: int) -> bool:
    """Whether no process has this pid. False if /proc hides the processes of other users."""
    return os.path.isdir("/proc/1") and not os.path.isdir(f"/proc/{pid}")


def booted(now: float) -> float | None:
    """Unix time at which PID 1 started: the boot of the host, or the start of the container. now: Unix time.

    None if /proc/1/stat cannot be read.
    """
    try:
        started = int(read_text("/proc/1/stat").rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return round(now - float(read_text("/proc/uptime").split()[0]) + started, 1)
    except (IndexError, ValueError):
        return None


def unit_of(pid: int) -> str:
    """The systemd service to which a process belongs; "" for none.

    The service of a user's own systemd (user@UID.service) does not count.
    """
    groups = read_text(f"/proc/{pid}/cgroup").splitlines()
    return next(filter(None, map(_service_in, groups)), "")


def _service_in(group: str) -> str:
    """The innermost service unit in the path of a control group; "" without one."""
    parts = group.rstrip().split("/")
    services = [part for part in parts if part.endswith(".service") and not part.startswith("user@")]
    return services[-1] if services else ""


def processes_of(name: str, scope: str = "system") -> list[int]:
    """PIDs in the control group of a unit, read from /proc/PID/cgroup (works with any cgroup layout).

    In the scope `user` only processes of this user count: the systemd of another user may have a unit of the
    same name.
    """
    known = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    pids = [pid for pid in known if unit_of(pid) == unit_name(name) and not _is_zombie(pid)]
    return pids if scope == "system" else [pid for pid in pids if _uid_of(pid) == os.geteuid()]


def _uid_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _is_zombie(pid: int) -> bool:
    return ") Z " in read_text(f"/proc/{pid}/stat")


def describe(pid: int) -> Process | None:
    """{"pid", "user", "command", "unit"} of a process; None if it has ended."""
    command = read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or read_text(f"/proc/{pid}/comm")
    unit, uid = unit_of(pid), _uid_of(pid)
    if uid is None:
        return None
    return {"pid": pid, "user": user_name(uid), "command": command[:200], "unit": unit}


def listeners(ports: Collection[int]) -> list[Process]:
    """The listening TCP sockets on these ports: [{"port", "pid", "user", "command", "unit"}].

    pid is None, and command empty, if this user may not see the process.
    """
    try:
        # --extended shows the control group: root in a container may not see the processes of others.
        lines = run(["ss", "-Htlnpe"])[1].splitlines() if ports else []
    except OSError:
        lines = []
    by_inode = {found[1]: line for line in lines if (found := re.search(r" ino:(\d+)", line))}
    held = []
    # The table is read last, so that it does not contain the socket of a process that has just ended.
    for socket in listening(tables()):
        if socket.port in ports:
            line = by_inode.get(str(socket.inode), "")
            pid, group = re.search(r"\bpid=(\d+)", line), re.search(r" cgroup:(\S+)", line)
            unit = _service_in(group[1]) if group else ""
            unseen = {"pid": None, "user": user_name(socket.uid), "command": "", "unit": unit}
            held.append({"port": socket.port, **((describe(int(pid[1])) if pid else None) or unseen)})
    return sorted(held, key=lambda one: (one["port"], one["pid"] or 0))
