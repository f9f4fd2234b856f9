#!/usr/bin/python
"""Ansible module: install a wheelhouse into a virtual environment of its own, and point a link to it.

    VENVS/<first 12 digits of the lock's sha256>/     with nanofleet-venv.json inside, written last
    LINK -> the environment of the current lock

uv installs offline from the wheelhouse. An environment without nanofleet-venv.json was not finished; it is
installed again. So is an environment whose packages differ from those that nanofleet-venv.json records.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.venv_state import (
    MARKER,
    installed_digest,
    problems_of,
    read_marker,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_lock import (
    REQUIREMENTS,
    copy_wheel,
    faults,
    parse_lock,
    write_lock,
)

PROJECT = "nanofleet"
TOOL = "uv"


def switch(link: Path, venv: Path) -> None:
    """Make `link` point to the environment `venv`, atomically.

    Raises ValueError if the path `link` exists and is not a link.
    """
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{link} is not a link: move it away and run the playbook again.")
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(venv, link.parent))
    os.replace(fresh, link)


def in_use(venv: Path) -> bool:
    """Whether a process on this host was started from the environment or has mapped one of its files."""
    inside = f"{venv}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if inside in (process / "cmdline").read_bytes() or inside in (process / "maps").read_bytes():
                return True
        except OSError:  # it ended meanwhile
            continue
    return False


class CrashedError(ValueError):
    """Raised for a command that a signal has ended."""


def command(arguments: list[str], what: str, folder: Path | str, **environment: str) -> None:
    """Run a command in `folder`. Raises ValueError if its exit status is not 0, CrashedError for a signal.

    what: the first part of the error message, such as "uv could not install the wheelhouse"; the last six
    lines of the command's output follow it. environment: more variables for the command. There is no default
    for `folder`, because the present folder may be the home of the login user.
    """
    merged = {**os.environ, **environment}
    result = subprocess.run(arguments, capture_output=True, text=True, env=merged, cwd=folder)
    if result.returncode < 0:
        raise CrashedError(f"{what}: the command was ended by {signal.Signals(-result.returncode).name}.")
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
        raise ValueError(f"{what}: {' '.join(line.strip() for line in lines[-6:])}")


def build(p: dict[str, Any], venv: Path) -> None:
    """Make the environment in the folder `venv`; its nanofleet-venv.json is written last.

    p: the options of the module. The login user can change the wheelhouse at any time. So its wheels are
    copied, and the copies are verified and installed. Raises ValueError if a wheel is missing or altered, or
    if the environment cannot be made.
    """
    if hashlib.sha256(p["requirements"].encode()).hexdigest() != p["digest"]:
        raise ValueError("The lock that was sent is not the one the controller made: run the playbook again.")
    wheelhouse, locked = Path(p["wheelhouse"]), parse_lock(p["requirements"], REQUIREMENTS)
    packages = [wheel for wheel in locked if wheel.name != TOOL]
    if venv.exists():
        shutil.rmtree(venv)
    # uv and its cache lie beside the environments: one file system, so that it links instead of copying.
    with tempfile.TemporaryDirectory(prefix=".uv-", dir=venv.parent) as scratch:
        wheels, lock, uv = Path(scratch) / "wheels", Path(scratch) / REQUIREMENTS, Path(scratch) / "uv"
        wheels.mkdir()
        for wheel in locked:
            copy_wheel(wheelhouse / wheel.file, wheels / wheel.file)
        if broken := "; ".join(faults(wheels, locked)):
            raise ValueError(f"{wheelhouse}: {broken}. Remove it there and run the playbook again.")
        write_lock(lock, packages)
        with zipfile.ZipFile(next(wheels.glob(f"{TOOL}-*.whl"))) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            uv.write_bytes(archive.read(member))
        uv.chmod(0o700)
        settings = {"UV_CACHE_DIR": f"{scratch}/cache", "UV_NO_CONFIG": "1", "UV_OFFLINE": "1"}
        settings |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        make = [str(uv), "venv", "--quiet", "--python", p["python"], str(venv)]
        install = [str(uv), "pip", "install", "--quiet", "--python", f"{venv}/bin/python", "--no-index"]
        install += ["--find-links", str(wheels), "--require-hashes", "--no-deps", "-r", str(lock)]
        for is_last in (False, True):
            try:
                command(make, f"No environment could be made on {p['python']}", scratch, **settings)
                command(install, "uv could not install the wheelhouse", scratch, **settings)
                break
            except CrashedError as error:  # seen with uv 0.13.8: SIGSEGV, once in hundreds of installations
                if is_last:
                    raise ValueError(f"{error} Run the playbook again.") from None
                shutil.rmtree(venv, ignore_errors=True)
        check = [str(uv), "pip", "check", "--quiet", "--python", f"{venv}/bin/python"]
        command(check, "The locked packages do not fit together", scratch, **settings)
    for name in p["imports"] or []:
        # As root once, so that the bytecode is there for every later start; and a wheel that this CPU or
        # system cannot run is found now. Isolated, so that nothing but the environment is on the path.
        check = [f"{venv}/bin/python", "-I", "-c", f"import {name}"]
        command(check, f"{name} does not work on this host", venv)
    marker = {
        "digest": p["digest"],
        "installed": installed_digest(venv),
        "python": os.path.realpath(p["python"]),
        "versions": {wheel.name: wheel.version for wheel in packages},
        "project": "".join(wheel.sha256 for wheel in packages if wheel.name == PROJECT),
    }
    write_whole(str(venv / MARKER), json.dumps(marker, indent=1))


def run(p: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    venv, link = Path(p["venvs"]) / p["digest"][:12], Path(p["link"])
    found = problems_of(venv, p["digest"], p["python"])
    ready = not found and link.is_symlink() and link.resolve() == venv.resolve()
    removed: list[Path] = []
    before = read_marker(link).get("versions", {})
    if not check_mode and not ready:
        venv.parent.mkdir(parents=True, exist_ok=True)
        if found:
            build(p, venv)
        switch(link, venv)
        others = [path for path in venv.parent.iterdir() if path.is_dir() and path != venv]
        removed = [path for path in others if not in_use(path)]
        for path in removed:
            shutil.rmtree(path)
    marker = read_marker(venv if p["digest"] else link)
    return {
        "changed": not ready,
        "ready": ready,
        "problems": found if read_marker(venv) else [],
        "path": str(venv),
        "digest": marker.get("digest", ""),
        "installed": marker.get("installed", ""),
        "versions": marker.get("versions", {}),
        "project": marker.get("project", ""),
        "removed": [str(path) for path in removed],
        "diff": {"before": listing(before), "after": listing(marker.get("versions", {}) or before)},
    }


def listing(versions: dict[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def main() -> None:
    os.umask(0o022)  # the service user reads the environment, whatever umask root has here
    module = AnsibleModule(
        argument_spec={
            "wheelhouse": {"type": "path", "required": True},
            "digest": {"type": "str", "required": True},
            "requirements": {"type": "str", "default": ""},
            "python": {"type": "path", "required": True},
            "venvs": {"type": "path", "required": True},
            "link": {"type": "path", "required": True},
            "imports": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module.params, module.check_mode)
    except (ValueError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
