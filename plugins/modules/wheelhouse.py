#!/usr/bin/python
"""Ansible module: make a wheelhouse, the folder of all wheels for one kind of host, with a lock file.

The wheels are those that an extra of pyproject.toml needs. With the option project (the default), the
project's own wheel, which the module builds, and the wheels that the project needs are included. The module
runs on the controller, whose system and Python may differ from those of the hosts. The packages are the ones
in requirements/hashes.txt whose markers hold for the host, in the versions of constraints.txt. If the wheel
of torch from the index torch_index needs another CUDA version, the CUDA packages are the ones that this wheel
names. pip downloads these packages in these versions, and resolves no dependencies.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanofleet.fleet.plugins.module_utils.file_digests import Digests
from ansible_collections.nanofleet.fleet.plugins.module_utils.files import load_json, sha256_of, write_whole
from ansible_collections.nanofleet.fleet.plugins.module_utils.project_sources import sources_digest
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_lock import (
    REQUIREMENTS,
    Wheel,
    faults,
    read_lock,
    wheel_of,
    write_lock,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_pins import (
    Hashes,
    holds,
    markers_of,
    read_hashes,
    read_pins,
)
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_pip import download
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = "nanofleet"


class Wheelhouse:
    """A wheelhouse, the folder of wheels for one kind of host, and the packages that it must contain.

    params: options of the module. Raises ValueError if pyproject.toml needs a package that is not locked.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        self.p = params
        self.source, self.dest = Path(params["source"]), Path(params["dest"])
        self.cuda = params["torch"] == "cuda"
        self.markers = markers_of(params["python_version"], params["architecture"])
        self.pins = read_pins(Path(params["constraints"]))
        self.hashes = self._locked(self.cuda)
        self.wanted = self._versions(self.hashes)
        self.kept: dict[str, Wheel] = {}
        self.unverified: list[str] = []
        self.digests = Digests(self._beside("verified.json"))
        self.sources = sources_digest(self.source) if self.p["project"] else ""
        self._check_requirements()

    def _beside(self, name: str) -> Path:
        """The path of the file `name` about this wheelhouse. It is beside the folder that the hosts get."""
        return self.dest.with_name(f".{self.dest.name}.{name}")

    def _locked(self, cuda: bool) -> Hashes:
        extra = self.p["extra"]
        sets = [extra, *([""] if self.p["project"] else []), *([f"{extra}-cuda"] if cuda else [])]
        return read_hashes(Path(self.p["hashes"]), self.markers, sets)

    def _versions(self, locked: Hashes) -> dict[str, str]:
        return {name: self.pins.get(name, version.public) for name, version in locked}

    def _check_requirements(self) -> None:
        """Raise ValueError if pyproject.toml lacks the extra, or needs a package or version not locked."""
        path = self.source / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras, extra = project.get("optional-dependencies", {}), self.p["extra"]
        if extra and extra not in extras:
            raise ValueError(f"{path} has no extra {extra!r}; it has: {', '.join(sorted(extras))}.")
        lines = [*extras.get(extra, []), *(project.get("dependencies", []) if self.p["project"] else [])]
        if not lines:
            raise ValueError("There is nothing to install: name an extra, or include the project.")
        for name, needed in needs(lines, self.markers):
            version = self.wanted.get(name, "")
            if not allows(needed, version):
                what = f"it is pinned to {version}" if version else f"{self.p['hashes']} does not have it"
                raise ValueError(
                    f"{path} needs {needed}, but {what}. Pin a version that fits in "
                    f"{self.p['constraints']}, then type: make lock"
                )

    def update(self, check_mode: bool) -> bool:
        """Download and build the missing wheels beside the wheelhouse, move them into it and write its lock.

        Returns whether the wheelhouse was changed, or with `check_mode` would be. check_mode: download
        nothing and leave the wheelhouse unchanged. Raises ValueError if a wheel cannot be made, or if one was
        altered: an altered wheel is never replaced silently.
        """
        lock = self.dest / REQUIREMENTS
        old = read_lock(lock) if lock.is_file() else []
        found = faults(self.dest, old, lambda path: self.digests.sha256(path.name, path))
        altered = [fault for fault in found if not fault.endswith("is missing")]
        if altered:
            raise ValueError(
                f"{self.dest}: {'; '.join(altered)}. Remove the named file there and run the playbook again: "
                "it is downloaded again."
            )
        self.kept = {wheel.name: wheel for wheel in old if (self.dest / wheel.file).is_file()}
        scratch = self.dest.with_name(f".{self.dest.name}.new")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            for only_torch in (True, False):
                missing = {name for name in self._missing() if (name == "torch") == only_torch}
                if missing and check_mode:
                    return True
                self._fetch(missing, scratch)
                if only_torch and self.cuda and self.p["torch_index"] and "torch" in self.wanted:
                    self._follow_torch(scratch)
            built = self.p["project"] and not self._is_built()
            if built:
                self._build(scratch)
            new = {wheel.name: wheel for wheel in map(wheel_of, scratch.iterdir())}
            kept = {*self.wanted, *([PROJECT] if self.p["project"] and not built else [])} - new.keys()
            wheels = sorted([*new.values(), *(self.kept[name] for name in kept)])
            self._check(wheels, old)
            same = wheels == sorted(old) and len(self.kept) == len(old)
            if not same and not check_mode:
                self._move(scratch, wheels)
            if not check_mode:
                self._remember(new)
            return not same
        finally:
            shutil.rmtree(scratch)

    def _is_built(self) -> bool:
        """Whether the wheelhouse has a wheel of the project that was built from the present sources."""
        known = load_json(str(self._beside("sources.json"))) or {}
        wheel = self.kept.get(PROJECT)
        return wheel is not None and known == {"sources": self.sources, "sha256": wheel.sha256}

    def _remember(self, new: dict[str, Wheel]) -> None:
        """Save the digests that the next call compares: of the wheels, and of the project's sources.

        new: {package: its wheel} of the wheels that were downloaded or built.
        """
        self.digests.save()
        if PROJECT in new:
            known = {"sources": self.sources, "sha256": new[PROJECT].sha256}
            write_whole(str(self._beside("sources.json")), json.dumps(known))

    def _missing(self) -> set[str]:
        """The names of the packages in `wanted` whose version or build the wheelhouse lacks."""
        missing = set(self.wanted)
        for name, version in self.wanted.items():
            found = Version(self.kept[name].version) if name in self.kept else None
            if found and name == "torch":
                is_cuda = found.local != "cpu"
                missing -= {name} if found.public == version and is_cuda == self.cuda else set()
            elif found == Version(version):
                missing.remove(name)
        return missing

    def _fetch(self, names: set[str], folder: Path) -> None:
        """Download the wheels of the packages `names` into `folder`.

        If torch is in `names`, it must be the only one, because it can come from another index. Raises
        ValueError if the option offline forbids downloads, or if pip fails.
        """
        if not names:
            return
        if self.p["offline"]:
            lacks = ", ".join(f"{name}=={self.wanted[name]}" for name in sorted(self._missing()))
            kind = f"-e wheelhouse_python={self.p['python_version']}"
            kind += f" -e wheelhouse_machine={self.p['architecture']} -e runtime_torch={self.p['torch']}"
            raise ValueError(
                f"{self.dest} lacks {lacks}, and wheelhouse_offline forbids downloads. On a machine with a "
                f"network, in a checkout of the same commit, type: ansible-playbook wheelhouse.yml {kind}  "
                "Then copy its folder .wheelhouse to this controller."
            )
        wanted = [f"{name}=={self.wanted[name]}" for name in sorted(names)]
        indexes = [""]
        if names == {"torch"}:
            # A bare version matches every build, and pip prefers builds with a label such as +cpu. PyTorch's
            # index is asked for a CPU build only if pip's indexes have none.
            wanted = [f"{wanted[0]},!={self.wanted['torch']}+cpu" if self.cuda else f"{wanted[0]}+cpu"]
            indexes = [self.p["torch_index"]] if self.cuda else ["", self.p["torch_index"]]
        for index in indexes:
            try:
                return download(wanted, folder, self.p["python_version"], self.p["architecture"], index)
            except ValueError:
                if index == indexes[-1]:
                    raise

    def _follow_torch(self, scratch: Path) -> None:
        """Replace the CUDA packages in `wanted`, if the wheel of torch needs others than the locked ones.

        They are replaced by those that the wheel names. scratch: the folder of the new wheels. Raises
        ValueError if neither the wheel nor constraints.txt pins a package that the wheel needs.
        """
        wheel = next(scratch.glob("torch-*"), None) or self.dest / self.kept["torch"].file
        with zipfile.ZipFile(wheel) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
        needed = needs(lines, self.markers)
        if all(allows(need, self.wanted.get(name, "")) for name, need in needed):
            return
        self.wanted = self._versions(self._locked(cuda=False))
        for name, need in needed:
            exact = [each.version for each in need.specifier if each.operator == "=="]
            self.wanted[name] = exact[0] if exact else self.pins.get(name, "")
            if need.extras or not allows(need, self.wanted[name]):
                raise ValueError(
                    f"{wheel.name} needs {need}, which {self.p['constraints']} does not pin. Set "
                    "runtime_torch_index to an index whose CUDA version is that of the pinned packages."
                )

    def _build(self, folder: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}
        result = subprocess.run(command, cwd=self.source, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            reason = (result.stderr.strip() or result.stdout.strip() or "no reason given").splitlines()[-1]
            raise ValueError(f"The project's wheel could not be built from {self.source}: {reason}")

    def _check(self, wheels: list[Wheel], old: list[Wheel]) -> None:
        """Raise ValueError for a wheel whose sha256 is not a committed one, or not that of the old lock.

        A committed hash is one in hashes.txt. A wheel without one is added to `unverified`; if the option
        require_hashes is set, it is an error. old: the wheels of the old lock.
        """
        wheels = [wheel for wheel in wheels if wheel.name != PROJECT]
        known = {wheel: self.hashes.get((wheel.name, Version(wheel.version))) for wheel in wheels}
        altered = [wheel for wheel, hashes in known.items() if hashes and wheel.sha256 not in hashes]
        if altered:
            names = ", ".join(f"{wheel.file} (sha256 {wheel.sha256})" for wheel in altered)
            raise ValueError(
                f"{names} in {self.dest} does not match {self.p['hashes']}. The index serves another "
                "file, or the file was replaced. Remove it and find out which index pip took it from "
                "(pip config list); if the new file is right, type: make lock"
            )
        self.unverified = [wheel.file for wheel, hashes in known.items() if not hashes]
        if self.unverified and self.p["require_hashes"]:
            raise ValueError(
                f"{', '.join(self.unverified)} has no hash in {self.p['hashes']}, "
                "and wheelhouse_require_hashes=true refuses such wheels. If a package index offers them, add "
                "their hashes: make lock. Else repeat the command with -e wheelhouse_require_hashes=false"
            )
        first = {wheel.file: wheel.sha256 for wheel in old}
        other = [wheel.file for wheel in wheels if first.get(wheel.file, wheel.sha256) != wheel.sha256]
        if other:
            raise ValueError(
                f"{', '.join(other)} is not the file that was first downloaded: its sha256 is not that in "
                f"{self.dest / REQUIREMENTS}. If the new file is right, remove {self.dest} and run the "
                "playbook again."
            )

    def _move(self, scratch: Path, wheels: list[Wheel]) -> None:
        """Move the new wheels into the wheelhouse, then the new lock, and remove all other wheels."""
        write_lock(scratch / REQUIREMENTS, wheels)
        self.dest.mkdir(exist_ok=True)
        for path in sorted(scratch.iterdir(), key=lambda path: path.suffix == ".lock"):
            path.replace(self.dest / path.name)
        for path in set(self.dest.glob("*.whl")) - {self.dest / wheel.file for wheel in wheels}:
            path.unlink()


def needs(lines: list[str], markers: dict[str, str]) -> list[tuple[str, Requirement]]:
    """The requirements in `lines` whose markers hold on a host, as (normalised name, requirement).

    markers: the marker environment of the host (see markers_of).
    """
    found = [(canonicalize_name(each.name), each) for each in map(Requirement, lines)]
    return [(name, each) for name, each in found if holds(each, markers)]


def allows(needed: Requirement, version: str) -> bool:
    return bool(version) and needed.specifier.contains(version, prereleases=True)


def run(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    house = Wheelhouse(params)
    dest, wheels, changed = house.dest, [], True
    if not check_mode:
        dest.parent.mkdir(parents=True, exist_ok=True)
    if dest.parent.is_dir():
        # Two playbooks may start at once on one controller; the second finds the first one's work done.
        with (dest.parent / f".{dest.name}.lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            changed = house.update(check_mode)
            wheels = [] if changed and check_mode else read_lock(dest / REQUIREMENTS)
    return {
        "changed": changed,
        "path": params["dest"],
        "digest": sha256_of(dest / REQUIREMENTS) if wheels else "",
        "wheels": len(wheels),
        "bytes": sum(wheel.bytes for wheel in wheels),
        "unverified": house.unverified if wheels else [],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "constraints": {"type": "path", "required": True},
            "hashes": {"type": "path", "required": True},
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
    except (ValueError, OSError) as error:
        module.fail_json(msg=str(error))
    if result["unverified"]:
        module.warn(
            f"{', '.join(result['unverified'])} in {module.params['dest']} is trusted as it was first "
            "downloaded: no hash of it was committed. -e wheelhouse_require_hashes=true refuses such wheels."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
