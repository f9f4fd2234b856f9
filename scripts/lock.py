"""Write requirements/hashes.txt: the packages of each extra of pyproject.toml, with their hashes and markers.

    make lock                                       after constraints.txt or pyproject.toml has changed
    TORCH_INDEX_URL=FOLDER_OR_URL make lock         where torch's CPU build comes from elsewhere

uv resolves each extra for every supported Python, in the versions of constraints.txt, and reads the hashes
from the package index; it downloads nothing if the index publishes them. Only PyTorch's own index has the CPU
build of torch: its hashes, for each Python and machine with a wheel, come from TORCH_INDEX_URL, else from the
folder PIP_FIND_LINKS, else from PyTorch's index. Builds without a hash are printed and listed in the file;
setup.yml trusts their first download, with a warning.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from ansible_collections.nanofleet.fleet.plugins.module_utils.files import sha256_of
from ansible_collections.nanofleet.fleet.plugins.module_utils.wheel_pins import (
    holds,
    markers_of,
    read_entries,
    read_pins,
)

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / "requirements" / "hashes.txt"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
KINDS = [(python, machine) for machine in MACHINES for python in PYTHONS]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_ONLY = ("nvidia-", "cuda-", "triton")  # how the names of packages begin that only the CUDA build needs
HEADER = """\
# Written by: make lock
# The packages of each extra of pyproject.toml (extra == "" for the base dependencies), with the sha256 of
# every file of their version, as the package index lists them; a wheelhouse takes no other file.
# torch==VERSION is the CUDA build, which alone needs the packages of EXTRA-cuda; torch==VERSION+cpu is the
# CPU build, one entry for each Python and machine, from an index or of a wheel that was at hand.
"""


class LockError(Exception):
    """Raised if the hashes cannot be locked. The message is a sentence for the user."""


def compile_hashes(requirements: str, *options: str, **environment: str) -> str:
    """Run `uv pip compile` on requirement lines; returns the pinned packages with their hashes.

    options: more options of uv. environment: more variables for it. Raises LockError if uv is missing or
    fails.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", *options]
    merged = {**os.environ, **environment}
    done = subprocess.run(command, input=requirements, capture_output=True, text=True, env=merged)
    if "No module named uv" in done.stderr:
        raise LockError("uv is missing. Fix: make venv")
    if done.returncode != 0:
        raise LockError(" ".join(done.stderr.split()) or f"uv ended with status {done.returncode}.")
    return done.stdout


def torch_hashes(version: str, index: str, python: str, machine: str) -> list[str]:
    """The sha256 of the wheels of torch's CPU build; [] if none fits this Python and machine, or uv fails.

    index: a folder with wheels, of which only those for this Python and machine count, or the URL of an
    index, of which uv lists all. python: such as "3.12". machine: such as "x86_64".
    """
    if Path(index).is_dir():
        name = f"torch-{version}+cpu-cp{python.replace('.', '')}-*_{machine}.whl"
        return [sha256_of(path) for path in sorted(Path(index).glob(name))]
    kind = ["--no-deps", "--python-version", python, "--python-platform", f"{machine}-manylinux_2_34"]
    try:
        text = compile_hashes(f"torch=={version}+cpu\n", *kind, UV_INDEX=index)
    except LockError:
        return []
    return re.findall(r"--hash=sha256:([0-9a-f]{64})", text)


def entry(pin: str, conditions: list[str], hashes: list[str]) -> str:
    marker = f" ; {' or '.join(conditions)}" if conditions else ""
    return " \\\n".join([pin + marker, *(f"    --hash=sha256:{each}" for each in hashes)]) + "\n"


def resolve(pins: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Resolve all extras to the packages that a supported Linux host needs.

    Returns ({package: markers of the hosts and extras that need it}, {package: sha256 of each of its files}).
    pins: {package: version} of constraints.txt. Raises LockError if uv fails, or if a package has another
    version than in `pins`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    conditions: dict[str, list[str]] = {}
    hashes: dict[str, list[str]] = {}
    options = ["--universal", "--python-version", PYTHONS[0], "--constraint", str(CONSTRAINTS)]
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        text = compile_hashes("\n".join(lines), *options)
        for requirement, version, found in read_entries(text, f"uv pip compile of extra {extra!r}"):
            name = requirement.name
            needed = [holds(requirement, markers_of(*kind)) for kind in KINDS]
            if not any(needed):
                continue
            if pins.get(name) != str(version):
                raise LockError(
                    f"extra {extra!r} needs {name} {version}, which {CONSTRAINTS} does not pin. Write that "
                    "file again as its first lines describe."
                )
            condition = f'extra == "{extra}{"-cuda" if name.startswith(CUDA_ONLY) else ""}"'
            if not all(needed):
                condition = f"({requirement.marker}) and {condition}"
            conditions.setdefault(name, []).append(condition)
            hashes[name] = sorted(found)
    return conditions, hashes


def main() -> int:
    pins = read_pins(CONSTRAINTS)
    conditions, hashes = resolve(pins)
    of_torch = " or ".join(conditions["torch"])
    conditions["uv"] = []  # every wheelhouse has it: it installs the others
    entries = "".join(
        entry(f"{name}=={pins[name]}", conditions[name], hashes[name]) for name in sorted(hashes)
    )
    note, index = "", os.environ.get("TORCH_INDEX_URL") or os.environ.get("PIP_FIND_LINKS") or CPU_INDEX
    for python, machine in KINDS:
        found = torch_hashes(pins["torch"], index, python, machine)
        if found:
            marker = f'python_version == "{python}" and platform_machine == "{machine}" and ({of_torch})'
            entries += entry(f"torch=={pins['torch']}+cpu", [marker], found)
        else:
            note += f"#   Python {python} on {machine}\n"
    if note:
        note = f"# No hash of torch=={pins['torch']}+cpu is known for:\n{note}"
    partial = HASHES.with_name(f"{HASHES.name}.partial")
    partial.write_text(HEADER + note + entries, encoding="utf-8")
    partial.replace(HASHES)
    print(f"{HASHES.relative_to(ROOT)}: {len(hashes)} packages")
    if note:
        print(note.replace("#", "").rstrip() + "\nsetup.yml trusts the first download of these builds.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LockError, ValueError) as error:
        sys.exit(f"lock: {error}")
