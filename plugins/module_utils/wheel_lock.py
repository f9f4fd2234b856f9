"""Wheels and their lock file: written on the controller, verified there and on every host.

pip and uv read a lock line; its comment has the file name and size in bytes, which `faults` compares:

    numpy==2.4.6 --hash=sha256:4f0c...  # numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl 16873291
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import sha256_of

REQUIREMENTS = "requirements.lock"  # the packages of an environment, and uv, which installs them


class Wheel(NamedTuple):
    """A wheel in a lock file.

    name, version: of the package. sha256: of the file, as hex digits. file: its name. bytes: its size.
    """

    name: str
    version: str
    sha256: str
    file: str
    bytes: int

    def line(self) -> str:
        """The line of the lock file about this wheel."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file} {self.bytes}"


def wheel_of(path: Path) -> Wheel:
    """The name, version, size and sha256 of the wheel file `path`; the name is normalised (PEP 503)."""
    name, version = path.name.split("-")[:2]
    name = re.sub(r"[-_.]+", "-", name).lower()
    return Wheel(name, version, sha256_of(path), path.name, path.stat().st_size)


def write_lock(path: Path, wheels: list[Wheel]) -> None:
    """Write the lock file `path` with a line for each of `wheels`, sorted."""
    path.write_text("".join(wheel.line() + "\n" for wheel in sorted(wheels)), encoding="utf-8")


def read_lock(path: Path) -> list[Wheel]:
    """The wheels in a lock file.

    Raises ValueError if the file is empty or has an invalid line, OSError if it cannot be read.
    """
    return parse_lock(path.read_text(encoding="utf-8"), str(path))


def parse_lock(text: str, source: str) -> list[Wheel]:
    """The wheels in the text of a lock file. source: name of the file, for messages.

    Raises ValueError if the text is empty or has an invalid line.
    """
    wheels = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            pin, sha256, _, file, size = line.split()
            name, version = pin.split("==")
            wheels.append(Wheel(name, version, sha256.removeprefix("--hash=sha256:"), file, int(size)))
        except ValueError:
            file = ""
        if "/" in file or not file.endswith(".whl"):
            raise ValueError(
                f"{source}, line {number}, is not a locked wheel: {line[:80]!r}. The file was edited or cut "
                "off. Remove its folder on the controller and run the playbook again."
            )
    if not wheels:
        raise ValueError(
            f"{source} is empty. Remove its folder on the controller and run the playbook again."
        )
    return wheels


def faults(folder: Path, wheels: list[Wheel], sha256: Callable[[Path], str] = sha256_of) -> list[str]:
    """A phrase for each wheel that is missing in the folder or altered; it begins with the file's name.

    folder: the folder of the wheels. wheels: those of the lock file. sha256: the function that computes the
    sha256 of a file.
    """
    found = []
    for wheel in wheels:
        path = folder / wheel.file
        if not path.is_file():
            found.append(f"{wheel.file} is missing")
        elif path.stat().st_size != wheel.bytes:
            found.append(f"{wheel.file} has {path.stat().st_size} bytes instead of {wheel.bytes}")
        elif sha256(path) != wheel.sha256:
            found.append(f"{wheel.file} was altered: its sha256 is not the locked one")
    return found


def copy_wheel(source: Path, target: Path) -> None:
    """Copy `source` to `target` if it is a regular file and no symbolic link; else do nothing.

    Another user may replace the source at any time.
    """
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            with target.open("xb") as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
