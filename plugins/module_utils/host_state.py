# SPDX-License-Identifier: MIT
"""Reads all that setup.yml makes on a host, in one process, and returns the differences as phrases.

Nothing is changed, except that the sha256 of the data files can be stored beside them. The roles of setup.yml
compare the same facts with modules of their own, one after the other. Facts that depend on the other hosts or
on the controller (firewall rules, environments, the tracker's unit) are returned as they are;
setup_comparison.py compares them on the controller. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.nanofleet.fleet.plugins.module_utils import port_range
from ansible_collections.nanofleet.fleet.plugins.module_utils.claim_file import (
    claim_text,
    merge,
    parse,
    refusal,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.data_folder import own
from ansible_collections.nanofleet.fleet.plugins.module_utils.file_digests import folder_digest
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import read_text
from ansible_collections.nanofleet.fleet.plugins.module_utils.host_accounts import (
    described,
    folder,
    groups_of,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.service_user import acting_as
from ansible_collections.nanofleet.fleet.plugins.module_utils.shard_digests import verify
from ansible_collections.nanofleet.fleet.plugins.module_utils.venv_state import (
    PRINT_VERSION,
    damaged,
    installed_digest,
    read_marker,
)

FILTER_TEST = (
    "systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--property=IPAddressDeny=any",
    "/bin/bash", "-c",
    # Prints closed if IPAddressDeny= has an effect, else open: sending a packet that it drops is an error.
    "{ echo >/dev/udp/127.0.0.1/9; } 2>/dev/null && echo open || echo closed",
)  # fmt: skip
"""The command of the role network's filter.yml."""
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
HEALTH_SECONDS = 5.0
Options = Mapping[str, Any]


class Commands:
    """Commands that run in the background, while this process reads other facts about the host.

    commands: {name: words of the command}. A command whose program is not installed is not started. The
    method `answer` waits until a command has ended, and returns what it printed.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self.started: dict[str, subprocess.Popen[str]] = {}
        for name, (program, *words) in commands.items():
            path = shutil.which(program, path=PATH)
            if path:
                self.started[name] = subprocess.Popen(
                    [path, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C", "LANG": "C", "PATH": PATH},
                )  # fmt: skip

    def answer(self, name: str) -> tuple[int | None, str]:
        """(exit status, what it printed) of the command `name`; (None, "") if it is not installed."""
        process = self.started.get(name)
        if process is None:
            return None, ""
        printed, _none = process.communicate()
        return process.returncode, printed


# -- what differs, as phrases -------------------------------------------------------------------------------


def claim_differences(asked: Options, host: str) -> Iterator[str]:
    """A phrase if the claim of this host is not the one that setup.yml would write.

    The claim is the file that names the fleet which the host serves. asked: options of the module
    fleet_claim. host: name of this host.
    """
    text = read_text(asked["path"], strip=False)
    try:
        claim = parse(text, asked["path"], host)
    except ValueError as error:
        yield str(error)
        return
    wanted = claim_text(claim, asked)
    if refusal(claim, asked["fleet_id"], {name: str(each) for name, each in asked["hosts"].items()}, host):
        yield "it serves another fleet"
    elif text != wanted:
        yield f"its file {asked['path']} does not match this fleet" if text else "it is not set up"


def controllers(asked: Options, host: str) -> list[str]:
    """The addresses of the controllers that setup.yml would write into the claim of this host.

    The claim is the file that names the fleet which the host serves.
    asked: options of fleet_claim. host: name of this host, for messages. Raises ValueError if the present
    claim is damaged, or was written by a newer release.
    """
    claim = parse(read_text(asked["path"], strip=False), asked["path"], host)
    found: list[str] = merge(claim, asked)["controllers"]
    return found


def account_differences(user: str, wanted: Options, group_member: str) -> Iterator[str]:
    """Phrases if the account or the group of the service user `user` is not as setup.yml makes it.

    wanted: dict with the comment, home and shell of the account. If the account has another comment, its home
    and shell are not compared, because setup.yml keeps them. group_member: the login user, who has to be in
    the primary group of `user`; "" if there is none.
    """
    found = described(user)
    if not found or (found["comment"] == wanted["comment"] and found != dict(wanted)):
        yield f"the user {user} is missing or was changed"
    elif group_member not in ("", "root") and groups_of(user)[0] not in groups_of(group_member):
        yield f"{group_member} is not in the group of {user}"


def folder_differences(folders: Sequence[Options]) -> Iterator[str]:
    """Phrases about folders that are missing, or have another owner or mode.

    folders: dicts with path, owner, mode ("" for any) and needed (whether a missing folder is a difference).
    """
    for each in folders:
        found = folder(each["path"])
        if found is None and not each["needed"]:
            continue
        if (found or {}).get("owner") != each["owner"] or (
            each["mode"] and (found or {}).get("mode") != each["mode"]
        ):
            yield f"{each['path']} is missing or has another owner or mode"


def data_differences(
    path: str, user: str, mode: str, manifest_sha256: str, remember: bool, core_sha256: str = ""
) -> Iterator[str]:
    """Phrases about a data directory: its owner and mode, and files that differ from the controller's.

    path: the path of the directory. user, mode: the owner and the mode that the directory has to have, the
    mode as text such as "0750". manifest_sha256: sha256 of the controller's manifest. remember: whether each
    computed sha256 is stored beside the data. core_sha256: sha256 of the controller's CORE bundle, as
    `folder_digest` computes it; "" if the controller has none. Raises ValueError if the directory is a link,
    if a file in it has several hard links, if there is a link in the CORE bundle, or if the manifest is
    invalid.
    """
    if not os.path.isdir(path) or own(Path(path), user, user, int(mode, 8), True)["changed"]:
        yield f"{path} is missing, or something in it has another owner or mode"
        return
    with acting_as(user):
        yield from verify(Path(path), manifest_sha256, remember)["findings"]
        bundle = Path(path, "core")
        if core_sha256 and folder_digest(bundle)["sha256"] != core_sha256:
            yield f"the CORE bundle in {bundle} differs from the controller's"


# -- what is returned as it is ------------------------------------------------------------------------------


def python_version(python: str) -> str:
    """The version of a Python as MAJOR.MINOR; "" if it does not run."""
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        return "{}.{}".format(*sys.version_info[:2])
    try:
        done = subprocess.run(
            [python, "-I", "-c", PRINT_VERSION], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def machine() -> str:
    """The processor architecture of this host, such as x86_64."""
    return platform.machine()


def environment(link: str, venvs: str, python: str) -> dict[str, Any]:
    """The Python environment that the path `link` points to, as the module locked_venv compares it.

    link: the symbolic link. venvs: folder of the environments. python: path of the Python that makes them.
    Keys of the result:
    linked: whether the link leads to a folder in `venvs`. name: the name of the folder that it leads to.
    complete: whether the environment was made with `python` and all of its files are as they were installed.
    digest, installed, versions, project: what nanofleet-venv.json in it records.
    """
    venv = Path(os.path.realpath(link))
    marker = read_marker(venv)
    complete = (
        (venv / "bin" / "python").exists()
        and marker.get("python") == os.path.realpath(python)
        and not damaged(venv)
        and marker.get("installed") == installed_digest(venv)
    )
    return {
        "linked": os.path.islink(link) and str(venv.parent) == os.path.realpath(venvs),
        "name": venv.name,
        "complete": complete,
        "digest": marker.get("digest", ""),
        "installed": marker.get("installed", ""),
        "versions": marker.get("versions", {}),
        "project": marker.get("project", ""),
    }


def firewall(commands: Commands) -> dict[str, Any]:
    """The state of ufw, as {"status", "added"}.

    status: absent, inactive, active or error; inactive also while a timer is about to disable ufw, because
    nobody has seen that the host can still be reached (see fleet_firewall). added: what `ufw show added`
    prints; with the status error, the error message. commands: the started commands, with `ufw show added` as
    "added", `ufw status` as "status", and `systemctl is-active` of the timer as "timer".
    """
    (added_code, added), (status_code, status) = commands.answer("added"), commands.answer("status")
    if added_code is None:
        return {"status": "absent", "added": ""}
    if added_code or status_code:
        return {"status": "error", "added": (added or status).strip()}
    stays = "Status: active" in status and commands.answer("timer")[1].strip() != "active"
    return {"status": "active" if stays else "inactive", "added": added}


def tracker(asked: Options, address: str) -> dict[str, Any]:
    """The state of the tracker (the MLflow server) on this host, as a dict.

    unit: text of its unit file. unit_mode: mode of this file. folder: owner and mode of its folder.
    stamp: name of the environment that its database was made for.
    login: sha256 of the file with its login, "" without one. login_mode: mode of this file.
    enabled, active: whether its unit is enabled, and whether it is active.
    answers: whether the tracker answers HTTP requests.
    asked: the option `tracker` of host_state. address: the address at which the tracker listens.
    """
    path = f"{asked['folder']}/{asked['unit']}"
    shown = subprocess.run(
        ["systemctl", "show", "--property=ActiveState,UnitFileState", "--", asked["unit"]],
        capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"},
    ).stdout  # fmt: skip
    state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    login = stamp_of(asked["login"])
    return {
        "unit": read_text(path, strip=False),
        "unit_mode": (folder(path) or {}).get("mode", ""),
        "folder": folder(asked["path"]),
        "stamp": stamp_of(asked["stamp"]),
        "login": hashlib.sha256(login.rstrip().encode()).hexdigest()
        if os.path.lexists(asked["login"])
        else "",
        "login_mode": (folder(asked["login"]) or {}).get("mode", ""),
        "enabled": state.get("UnitFileState") == "enabled",
        "active": state.get("ActiveState") == "active",
        "answers": answers(address, asked["port"]),
    }


def stamp_of(path: str) -> str:
    """The first 1024 bytes of a file as text; "" if it cannot be opened, or is a link or no regular file.

    Another user, to whom the folder can belong, could have put a link there. Links among the parent folders
    are followed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1024).decode(errors="replace") if _is_file(descriptor) else ""
    finally:
        os.close(descriptor)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def answers(address: str, port: int) -> bool:
    """Whether the tracker answers at this address of this host."""
    where = f"[{address}]" if ":" in address else address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{where}:{port}/health", timeout=HEALTH_SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def ports(asked: Options) -> dict[str, Any]:
    """The result of the module ephemeral_ports in check mode: changed, before and port_range.hindrances.

    asked: options of that module.
    """
    change = port_range.change_to(asked["path"], asked["low"], asked["high"], asked["fleet"])
    found = port_range.hindrances(asked["path"], asked["low"], asked["high"], asked["user"])
    return {"changed": change.changed, "before": change.before, **found}
