#!/usr/bin/python
"""Make a wheelhouse: every wheel an extra of this project needs on one kind of Linux host, and a sha256 lock.

Runs on the controller, which may be another system than the hosts (macOS, another Python): the pins come from
constraints.txt, the requirements are followed with the *host's* markers, and pip only fetches named wheels.
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
from ansible.module_utils.nanofleet_lock import (
    REQUIREMENTS,
    TOOLS,
    faults,
    normal,
    read_lock,
    wheel_of,
    write_lock,
)
from ansible.module_utils.nanofleet_pins import markers_of, needed, read_pins, requires_of

DOCUMENTATION = r"""
module: wheelhouse
short_description: Make a wheelhouse with a sha256 lock for one kind of host
description:
  - Fetches the pinned wheels of an extra with pip, builds the project's own, writes C(requirements.lock).
  - Does nothing when pins, requirements and sources are what it was made from; checks every wheel each time.
options:
  source: {description: The repository's root., type: path, required: true}
  dest: {description: The wheelhouse's folder., type: path, required: true}
  constraints: {description: File with one C(name==version) a line., type: path, required: true}
  extra: {description: "Extra of pyproject.toml to serve; empty for none.", type: str, default: ""}
  project: {description: Take in the project's own wheel and base dependencies., type: bool, default: true}
  python_version: {description: "The hosts' Python, as 3.11.", type: str, required: true}
  architecture: {description: "The hosts' machine, as x86_64.", type: str, required: true}
  torch_build: {description: "Torch's build, as cpu; empty for the index's own.", type: str, default: cpu}
  torch_index: {description: Asked where pip's own indexes lack that build., type: str, default: ""}
"""
RETURN = r"""
digest: {description: "sha256 of requirements.lock, or empty.", type: str, returned: always}
wheels: {description: Number of wheels., type: int, returned: always}
bytes: {description: Their size., type: int, returned: always}
fetched: {description: Wheels that were fetched or built., type: list, elements: str, returned: always}
"""

STAMP = "made-from.json"
TOOL = "uv"
OLDEST_GLIBC = 34  # every supported distribution has glibc 2.34 or newer
SOURCES = ("pyproject.toml", "LICENSE", "trainer", "fleet")


class WheelhouseError(Exception):
    """A sentence for the person who ran the playbook."""


def tree_digest(root: Path) -> str:
    """sha256 over names and bytes of what the project's wheel is built from."""
    digest = hashlib.sha256()
    for name in SOURCES:
        paths = sorted((root / name).rglob("*")) if (root / name).is_dir() else [root / name]
        for path in paths:
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


class Wheelhouse:
    """One wheelhouse folder and what it has to be made from."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.p = params
        self.source, self.dest = Path(params["source"]), Path(params["dest"])
        self.pins = read_pins(Path(params["constraints"]))
        self.markers = markers_of(params["python_version"], params["architecture"])
        self.roots = self._roots()
        self.fetched: list[str] = []
        kind = [params["python_version"], params["architecture"], params["torch_build"], params["extra"]]
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
        """Is it made from just this? An altered wheel is an error: it is never silently replaced."""
        try:
            stamp = json.loads((self.dest / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        found = faults(self.dest)
        broken = [fault for fault in found if not fault.endswith("is missing")]
        if broken:
            raise WheelhouseError(
                f"{self.dest}: {'; '.join(broken)}. "
                "Remove the named file there and run the playbook again: it is fetched anew."
            )
        return bool(stamp == self.stamp) and not found

    def make(self) -> None:
        """Build beside the old one, then change places: there is never half a wheelhouse."""
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
        kept = self._kept(staging)
        wheels: dict[str, Path] = {}
        todo = set(needed([*self.roots, TOOL], self.markers))
        seen = set(todo)
        while todo:
            names = {name for name, _ in todo} - wheels.keys()
            self._fetch({name for name in names if name not in kept}, staging)
            here = {wheel_name(path): path for path in staging.glob("*.whl")}
            wheels |= {name: here[name] for name in names}
            todo = {
                need
                for name, extras in todo
                for need in needed(requires_of(wheels[name]), self.markers, extras)
                if need not in seen
            }
            seen |= todo
        for path in set(staging.glob("*.whl")) - set(wheels.values()):
            path.unlink()
        if self.p["project"]:
            self._build(staging)
        locked = [wheel_of(path) for path in sorted(staging.glob("*.whl"))]
        write_lock(staging / REQUIREMENTS, [wheel for wheel in locked if wheel.name != TOOL])
        write_lock(staging / TOOLS, [wheel for wheel in locked if wheel.name == TOOL])
        (staging / STAMP).write_text(json.dumps(self.stamp), encoding="utf-8")
        for path in staging.iterdir():
            path.chmod(0o644)

    def _version(self, name: str) -> str:
        if name not in self.pins:
            raise WheelhouseError(
                f"{name} is needed ({self.p['extra'] or 'base'}) but not pinned in {self.p['constraints']}: "
                "renew that file as its first lines say."
            )
        build = self.p["torch_build"] if name == "torch" else ""
        return self.pins[name] + (f"+{build}" if build else "")

    def _kept(self, staging: Path) -> set[str]:
        """Link in what the old wheelhouse already has in the wanted version; only the rest is fetched."""
        try:
            old = read_lock(self.dest / REQUIREMENTS) + read_lock(self.dest / TOOLS)
        except ValueError:
            return set()
        kept = set()
        for wheel in old:
            path = self.dest / wheel.file
            wanted = wheel.name in self.pins and wheel.version == self._version(wheel.name)
            if wanted and path.is_file() and wheel_of(path) == wheel:
                link_or_copy(path, staging / wheel.file)
                kept.add(wheel.name)
        return kept

    def _fetch(self, names: set[str], staging: Path) -> None:
        wanted = [f"{name}=={self._version(name)}" for name in sorted(names)]
        plain = [each for each in wanted if not each.startswith("torch==")]
        if plain:
            self._pip(plain, staging)
        for torch in set(wanted) - set(plain):
            try:
                self._pip([torch], staging)
            except WheelhouseError:
                if not self.p["torch_index"]:
                    raise
                self._pip([torch], staging, "--extra-index-url", self.p["torch_index"])
        self.fetched += wanted

    def _pip(self, wanted: list[str], staging: Path, *options: str) -> None:
        version, machine = self.p["python_version"], self.p["architecture"]
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(OLDEST_GLIBC, 4, -1)]
        platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(staging), "--implementation", "cp", "--python-version", version]
        command += ["--retries", "2", "--timeout", "30", "--disable-pip-version-check", "--no-input"]
        command += [f"--platform={platform}" for platform in platforms] + list(options) + wanted
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if result.returncode == 0:
            return
        if "No module named pip" in result.stderr:
            raise WheelhouseError(f"{sys.executable} has no pip; on the controller run: make venv")
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")] or [
            result.stderr[-500:]
        ]
        missing = errors[-1].removeprefix("ERROR: No matching distribution found for ")
        if missing != errors[-1]:
            looked = f" and {self.p['torch_index']}" if options else ""
            raise WheelhouseError(
                f"{missing} has no wheel for Python {version} on {machine} in pip's indexes{looked}. "
                "Use hosts whose Python has one, or give pip (or runtime_torch_index) an index that holds it."
            )
        raise WheelhouseError(f"pip could not fetch {', '.join(wanted)}: {errors[0].removeprefix('ERROR: ')}")

    def _build(self, staging: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(staging)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}
        result = subprocess.run(command, cwd=self.source, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            reason = (result.stderr.strip() or result.stdout.strip() or "no reason given").splitlines()[-1]
            raise WheelhouseError(f"The project's wheel could not be built from {self.source}: {reason}")
        self.fetched.append("nanofleet")


def wheel_name(path: Path) -> str:
    return normal(path.name.split("-")[0])


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def run(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    house = Wheelhouse(params)
    parent = house.dest.parent
    if check_mode and not parent.is_dir():
        return {"changed": True, "digest": "", "wheels": 0, "bytes": 0, "fetched": []}
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
            return {"changed": True, "digest": "", "wheels": 0, "bytes": 0, "fetched": []}
        wheels = read_lock(house.dest / REQUIREMENTS)
        digest = hashlib.sha256((house.dest / REQUIREMENTS).read_bytes()).hexdigest()
    size = sum(wheel.bytes for wheel in wheels)
    return {
        "changed": not current,
        "digest": digest,
        "wheels": len(wheels),
        "bytes": size,
        "fetched": house.fetched,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "constraints": {"type": "path", "required": True},
            "extra": {"type": "str", "default": ""},
            "project": {"type": "bool", "default": True},
            "python_version": {"type": "str", "required": True},
            "architecture": {"type": "str", "required": True},
            "torch_build": {"type": "str", "default": "cpu"},
            "torch_index": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module.params, module.check_mode)
    except (WheelhouseError, ValueError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
