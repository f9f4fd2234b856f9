#!/usr/bin/python
"""Ansible module: make a wheelhouse: the wheels that an extra needs on one kind of Linux host, and a lock.

Runs on the controller, which may be another system than the hosts (macOS, another Python). The pinned
versions come from constraints.txt, requirements are evaluated with the markers of the host, and pip downloads
only named wheels.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_hashes import judge, read_hashes
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_lock import (
    REQUIREMENTS,
    TOOLS,
    Wheel,
    faults,
    normal,
    read_lock,
    wheel_of,
    write_lock,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_pins import (
    Need,
    markers_of,
    needed,
    read_pins,
    requires_of,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_pip import (
    PipError,
    download,
    is_build,
    torch_request,
)

DOCUMENTATION = r"""
module: wheelhouse
short_description: Make a wheelhouse with a sha256 lock for one kind of host
description:
  - Downloads the pinned wheels of an extra with pip, builds the project's own wheel, and writes
    C(requirements.lock).
  - Refuses a wheel whose sha256 differs from the committed ones. A wheel without a committed hash is accepted
    at its first download, with a warning, and refused if a later download differs.
  - Changes nothing if pins, requirements and sources are unchanged. Verifies every wheel each time.
options:
  source: {description: The repository's root., type: path, required: true}
  dest: {description: The wheelhouse's folder., type: path, required: true}
  constraints: {description: File with lines C(name==version)., type: path, required: true}
  hashes: {description: "File with the committed hashes; empty for none.", type: path, default: ""}
  require_hashes: {description: Refuse wheels without a committed hash., type: bool, default: false}
  extra: {description: "Extra of pyproject.toml; empty for none.", type: str, default: ""}
  project: {description: Include the project's own wheel and base dependencies., type: bool, default: true}
  python_version: {description: "The hosts' Python, as 3.11.", type: str, required: true}
  architecture: {description: "The hosts' machine, as x86_64.", type: str, required: true}
  torch: {description: "Torch's build.", type: str, choices: [cpu, cuda], default: cpu}
  torch_index: {description: "Index URL or folder of wheels for torch.", type: str, default: ""}
  offline: {description: Download nothing and fail if a wheel is missing., type: bool, default: false}
author: the nanofleet authors
"""

EXAMPLES = r"""
- name: Make the wheelhouse of the hosts with Python 3.11
  nanofleet.fleet.wheelhouse:
    source: .
    dest: .wheelhouse/3.11-x86_64/train
    constraints: constraints.txt
    hashes: requirements/hashes.txt
    extra: train
    python_version: "3.11"
    architecture: x86_64
  delegate_to: localhost
"""

RETURN = r"""
path: {description: The folder of the wheelhouse., type: str, returned: always}
digest: {description: "sha256 of requirements.lock, or empty.", type: str, returned: always}
wheels: {description: Number of wheels., type: int, returned: always}
bytes: {description: Size of all wheels., type: int, returned: always}
unverified: {description: Wheels without a committed hash., type: list, elements: str, returned: always}
fetched: {description: Wheels that were downloaded or built., type: list, elements: str, returned: always}
"""

STAMP = "made-from.json"
TOOL = "uv"
PROJECT = "nanofleet"
NOTHING_YET: dict[str, Any] = {
    "changed": True, "digest": "", "wheels": 0, "bytes": 0, "unverified": [], "fetched": []
}  # fmt: skip
SOURCES = ("pyproject.toml", "LICENSE", "trainer", "fleet")


class WheelhouseError(Exception):
    """An error whose text is a sentence for the person who ran the playbook."""


def tree_digest(root: Path) -> str:
    """sha256 over names and contents of the files from which the project's wheel is built."""
    digest = hashlib.sha256()
    for name in SOURCES:
        paths = sorted((root / name).rglob("*")) if (root / name).is_dir() else [root / name]
        for path in paths:
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


class Wheelhouse:
    """One wheelhouse folder, and the packages, sources and hashes that it is made from."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.p = params
        self.source, self.dest = Path(params["source"]), Path(params["dest"])
        self.pins = read_pins(Path(params["constraints"]))
        self.markers = markers_of(params["python_version"], params["architecture"])
        self.hashes = read_hashes(Path(params["hashes"]), self.markers) if params["hashes"] else {}
        self.roots = self._roots()
        self.unverified: list[Wheel] = []
        self.versions: dict[str, str] = {}
        self.fetched: list[str] = []
        kind = [params[name] for name in ("python_version", "architecture", "torch", "torch_index", "extra")]
        pins = sorted(self.pins.items())
        self.stamp = {
            "packages": hashlib.sha256(json.dumps([kind, pins, sorted(self.roots)]).encode()).hexdigest(),
            "project": tree_digest(self.source) if params["project"] else "",
        }

    def _roots(self) -> list[str]:
        path = self.source / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras, extra = project.get("optional-dependencies", {}), self.p["extra"]
        if extra and extra not in extras:
            raise WheelhouseError(f"{path} has no extra {extra!r}; it has: {', '.join(sorted(extras))}.")
        roots = [*extras.get(extra, []), *(project.get("dependencies", []) if self.p["project"] else [])]
        if not roots:
            raise WheelhouseError("There is nothing to install: name an extra, or take the project itself.")
        return roots

    def current(self) -> bool:
        """Whether the wheelhouse is complete and made from the present packages and sources.

        Raises WheelhouseError for an altered wheel, which is never replaced silently.
        """
        try:
            stamp = json.loads((self.dest / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        found = faults(self.dest)
        broken = [fault for fault in found if not fault.endswith("is missing")]
        if broken:
            raise WheelhouseError(
                f"{self.dest}: {'; '.join(broken)}. "
                "Remove the named file there and run the playbook again: it is fetched again."
            )
        if not found:
            self._check(read_lock(self.dest / REQUIREMENTS) + read_lock(self.dest / TOOLS), self.dest)
        return bool(stamp == self.stamp) and not found

    def make(self) -> None:
        """Make the new wheelhouse beside the old one, then replace the old one by renaming."""
        parent = self.dest.parent
        for leftover in parent.glob(f".{self.dest.name}.making-*"):
            shutil.rmtree(leftover)
        staging = Path(tempfile.mkdtemp(prefix=f".{self.dest.name}.making-", dir=parent))
        try:
            self._fill(staging)
            staging.chmod(0o755)
            old = parent / f".{self.dest.name}.old"
            if self.dest.exists():
                self.dest.rename(old)
            staging.rename(self.dest)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _fill(self, staging: Path) -> None:
        kept = self._kept()
        wheels: dict[str, Path] = {}
        todo = set(needed([*self.roots, TOOL], self.markers))
        seen = set(todo)
        while todo:
            for need in sorted(todo):
                self._choose(need)
            names = {need.name for need in todo} - wheels.keys()
            again = {name for name in names & kept.keys() if self._is_wanted(name, kept[name].version)}
            for name in again:
                link_or_copy(self.dest / kept[name].file, staging / kept[name].file)
            self._fetch(names - again, staging)
            here = {normal(path.name.split("-")[0]): path for path in staging.glob("*.whl")}
            wheels |= {name: here[name] for name in names}
            todo = {
                further
                for need in todo
                for further in needed(requires_of(wheels[need.name]), self.markers, need.extras)
                if further not in seen
            }
            seen |= todo
        if self.p["project"]:
            self._build(staging)
        locked = [wheel_of(path) for path in sorted(staging.glob("*.whl"))]
        self._check(locked, staging)
        self._compare_with_first(locked)
        write_lock(staging / REQUIREMENTS, [wheel for wheel in locked if wheel.name != TOOL])
        write_lock(staging / TOOLS, [wheel for wheel in locked if wheel.name == TOOL])
        (staging / STAMP).write_text(json.dumps(self.stamp), encoding="utf-8")
        for path in staging.iterdir():
            path.chmod(0o644)

    def _check(self, wheels: list[Wheel], folder: Path) -> None:
        """Raise WheelhouseError if a wheel differs from the committed hashes; collect those without one."""
        altered, self.unverified = judge([wheel for wheel in wheels if wheel.name != PROJECT], self.hashes)
        if altered:
            names = ", ".join(f"{wheel.file} (sha256 {wheel.sha256})" for wheel in altered)
            raise WheelhouseError(
                f"{names} in {folder} does not match {self.p['hashes']}. The index serves another "
                "file, or the file was replaced. Remove it and find out which index pip took it from "
                "(pip config list); if the new file is right, type: make lock"
            )
        if self.unverified and self.p["require_hashes"]:
            raise WheelhouseError(
                f"{', '.join(wheel.file for wheel in self.unverified)} has no hash in {self.p['hashes']}, "
                "and wheelhouse_require_hashes refuses such wheels. Where an index holds it, type: make lock"
            )

    def _compare_with_first(self, locked: list[Wheel]) -> None:
        """Raise WheelhouseError if a wheel differs from the one that was downloaded first.

        That one is in the old wheelhouse's lock. The project's own wheel may differ.
        """
        try:
            first = {wheel.file: wheel.sha256 for wheel in read_lock(self.dest / REQUIREMENTS)}
        except ValueError:
            return
        other = [
            wheel.file
            for wheel in locked
            if wheel.name != PROJECT and first.get(wheel.file, wheel.sha256) != wheel.sha256
        ]
        if other:
            raise WheelhouseError(
                f"{', '.join(other)} is not the file that was first downloaded: its sha256 is not that of "
                f"{self.dest / REQUIREMENTS}. If the new file is right, remove {self.dest} and type the "
                "same again."
            )

    def _choose(self, need: Need) -> None:
        """Set the version of a needed package: the pinned one, else the one that its requirement fixes.

        A build of torch for another CUDA version requires exact versions of its own.
        """
        chosen = self.versions.get(need.name, "")
        known = chosen or self.pins.get(need.name, "")
        version = known if known and need.allows(known) else "" if chosen else need.exact()
        if not version:
            what = f"pinned to {known} instead of {need.versions}" if known else "not pinned"
            raise WheelhouseError(
                f"{need.name} is needed ({self.p['extra'] or 'base'}) but {what} in {self.p['constraints']}: "
                "renew that file as its first lines say."
            )
        self.versions[need.name] = version

    def _is_wanted(self, name: str, version: str) -> bool:
        return is_build(version, self.versions[name], self.p["torch"] if name == "torch" else None)

    def _kept(self) -> dict[str, Wheel]:
        """{name: wheel} of the intact wheels in the old wheelhouse, which need not be downloaded again."""
        try:
            old = read_lock(self.dest / REQUIREMENTS) + read_lock(self.dest / TOOLS)
        except ValueError:
            return {}
        here = {wheel.name: wheel for wheel in old if (self.dest / wheel.file).is_file()}
        return {name: wheel for name, wheel in here.items() if wheel_of(self.dest / wheel.file) == wheel}

    def _fetch(self, names: set[str], staging: Path) -> None:
        plain = [f"{name}=={self.versions[name]}" for name in sorted(names - {"torch"})]
        torch = [torch_request(self.versions["torch"], self.p["torch"])] if "torch" in names else []
        if (plain or torch) and self.p["offline"]:
            kind = f"--python {self.p['python_version']} --machine {self.p['architecture']}"
            kind += " --torch cuda" if self.p["torch"] == "cuda" else ""
            raise WheelhouseError(
                f"{self.dest} lacks {', '.join(plain + torch)} (and what only these need), and with "
                "wheelhouse_offline no index is asked. On a machine with a network, in the same checkout: "
                f"python scripts/wheelhouse.py {kind}, then bring its folder."
            )
        self._pip(plain, staging)
        try:
            # A CPU build is asked for by name, at torch's own index only where pip's own have none.
            self._pip(torch, staging, "" if self.p["torch"] == "cpu" else self.p["torch_index"])
        except WheelhouseError:
            if self.p["torch"] != "cpu" or not self.p["torch_index"]:
                raise
            self._pip(torch, staging, self.p["torch_index"])
        self.fetched += plain + torch

    def _pip(self, wanted: list[str], staging: Path, index: str = "") -> None:
        if not wanted:
            return
        try:
            download(wanted, staging, self.p["python_version"], self.p["architecture"], index)
        except PipError as error:
            raise WheelhouseError(str(error)) from None

    def _build(self, staging: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(staging)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}
        result = subprocess.run(command, cwd=self.source, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            reason = (result.stderr.strip() or result.stdout.strip() or "no reason given").splitlines()[-1]
            raise WheelhouseError(f"The project's wheel could not be built from {self.source}: {reason}")
        self.fetched.append("nanofleet")


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def run(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    house = Wheelhouse(params)
    parent = house.dest.parent
    if check_mode and not parent.is_dir():
        return {**NOTHING_YET, "path": params["dest"]}
    parent.mkdir(parents=True, exist_ok=True)
    # Two playbooks may start at once on one controller; the second finds the first one's work done.
    with (parent / f".{house.dest.name}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        old = parent / f".{house.dest.name}.old"
        if old.is_dir() and not house.dest.exists():
            old.rename(house.dest)
        current = house.current()
        if not current and not check_mode:
            house.make()
        elif not current:
            return {**NOTHING_YET, "path": params["dest"]}
        wheels = read_lock(house.dest / REQUIREMENTS)
        digest = hashlib.sha256((house.dest / REQUIREMENTS).read_bytes()).hexdigest()
    size = sum(wheel.bytes for wheel in wheels)
    return {
        "changed": not current,
        "path": params["dest"],
        "digest": digest,
        "wheels": len(wheels),
        "bytes": size,
        "unverified": [wheel.file for wheel in house.unverified],
        "fetched": house.fetched,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "constraints": {"type": "path", "required": True},
            "hashes": {"type": "path", "default": ""},
            "require_hashes": {"type": "bool", "default": False},
            "extra": {"type": "str", "default": ""},
            "project": {"type": "bool", "default": True},
            "python_version": {"type": "str", "required": True},
            "architecture": {"type": "str", "required": True},
            "torch": {"type": "str", "default": "cpu", "choices": ["cpu", "cuda"]},
            # Its URL may hold a password.
            "torch_index": {"type": "str", "default": "", "no_log": True},
            "offline": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module.params, module.check_mode)
    except (WheelhouseError, ValueError, OSError) as error:
        module.fail_json(msg=str(error))
    if result["unverified"]:
        module.warn(
            f"{', '.join(result['unverified'])} in {module.params['dest']} is trusted as it was first "
            "downloaded: no hash of it was committed. -e wheelhouse_require_hashes=true refuses such wheels."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
